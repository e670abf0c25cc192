"""Data of the experiments: digits, trees of images, broken files, streams whose position can be saved."""

import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from experiments.data.digits import digits
from experiments.data.image_folder import _AREA, _random_box, broken_files, image_folder, read_image
from experiments.data.stream import test_batches as one_pass
from experiments.data.stream import train_batches
from experiments.harness.errors import ExperimentError
from experiments.harness.loop.classification import NO_LABEL


@pytest.fixture
def tree(tmp_path):
    """Two classes, red and blue; ten training and three test images each, of several shapes."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 3)):
        for channel, name in ((0, "red"), (2, "blue")):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 60, (20 + i, 30 - i, 3), dtype=np.uint8)
                pixels[..., channel] += 180
                Image.fromarray(pixels).save(folder / f"{i}.jpg")
    (tmp_path / "train" / "red" / ".hidden").write_text("not an image")
    return tmp_path


def truncate(file):
    file.write_bytes(file.read_bytes()[:-200])


def test_digits_are_split_by_class_and_always_alike():
    first, second = digits(16), digits(16)
    assert (len(first.train), len(first.test)) == (1437, 360)
    for a, b in zip(first.test, second.test, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
    counts = np.bincount([label for _, label in first.test])
    assert counts.min() >= 34
    assert counts.max() <= 37
    image, _ = first.train[0]
    assert (image.shape, image.dtype) == ((16, 16, 1), np.uint8)
    pixels = np.stack([image for image, _ in first.train]) / 255
    assert abs(pixels.mean() - first.mean[0]) < 0.02
    assert abs(pixels.std() - first.std[0]) < 0.03


def test_training_digits_are_only_shifted():
    data = digits(16)
    moved = [data.train_example(data.train[0], np.random.default_rng(seed))["image"] for seed in range(20)]
    padded = np.pad(data.train[0][0], [(4, 4), (4, 4), (0, 0)])
    windows = [padded[top : top + 16, left : left + 16] for top in range(2, 7) for left in range(2, 7)]
    for image in moved:
        assert any(np.array_equal(image, window) for window in windows)
    assert len({image.tobytes() for image in moved}) > 5


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_continues_where_its_saved_position_is(tree, workers):
    """With a worker there is also a broken file, whose name is not UTF-8."""
    log = tree / "broken_files.txt" if workers else None
    if workers:
        a_name_of_other_bytes(tree / "train" / "red")
    data = image_folder(tree, image_size=16, broken_log=log)

    def stream():
        return train_batches(data, batch_size=8, seed=3, workers=workers)

    batches = stream()
    for _ in range(3):
        next(batches)
    position = batches.get_state()
    expected = [next(batches) for _ in range(3)]
    again = stream()
    again.set_state(position)
    for batch in expected:
        resumed = next(again)
        np.testing.assert_array_equal(resumed["label"], batch["label"])
        np.testing.assert_array_equal(resumed["image"], batch["image"])
    for iterator in (batches, again):
        iterator.close()
    if workers:
        assert len(broken_files(log)) == 1


def test_every_image_comes_once_an_epoch_in_a_new_order():
    data = digits(8)
    labels = np.array([label for _, label in data.train])
    batches = train_batches(data, batch_size=479, seed=0, workers=0)  # 3 x 479 = 1437
    epochs = [np.concatenate([next(batches)["label"] for _ in range(3)]) for _ in range(2)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.bincount(epoch), np.bincount(labels))
    assert (epochs[0] != epochs[1]).any()


@pytest.mark.parametrize("workers", [0, 2])
def test_one_pass_shows_every_test_image_once_and_fills_up_batches(tree, workers):
    data = image_folder(tree, image_size=16, broken_log=None)
    batches = list(one_pass(data, batch_size=4, workers=workers))
    assert {batch["image"].shape for batch in batches} == {(4, 16, 16, 3)}
    images = np.concatenate([batch["image"] for batch in batches])
    labels = np.concatenate([batch["label"] for batch in batches])
    assert sorted(labels[labels != NO_LABEL]) == [0] * 3 + [1] * 3
    assert data.classes == ["blue", "red"]
    colour = images[labels != NO_LABEL].mean((1, 2))
    np.testing.assert_array_equal(colour[:, 0] > colour[:, 2], labels[labels != NO_LABEL] == 1)
    assert not images[labels == NO_LABEL].any()


def test_centre_crop_is_the_middle_of_the_resized_image(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        ramp = np.tile(np.arange(128, dtype=np.uint8), (64, 1))
        Image.fromarray(np.stack([ramp] * 3, -1)).save(tmp_path / split / "a" / "ramp.png")
    data = image_folder(tmp_path, image_size=56, broken_log=None)
    row = data.test_example(data.test[0])["image"][10, :, 0].astype(int)
    np.testing.assert_allclose(row, np.arange(36, 92), atol=1)  # 64 -> 64 high, the middle 56 of 128 columns


def test_random_crops_are_inside_and_of_the_right_size():
    rng = np.random.default_rng(0)
    for size in ((40, 30), (1, 1), (500, 4), (3, 900)):
        for _ in range(100):
            left, top, right, bottom = _random_box(size, rng)
            assert 0 <= left < right <= size[0]
            assert 0 <= top < bottom <= size[1]
            if size == (40, 30):
                assert _AREA[0] * 0.85 <= (right - left) * (bottom - top) / (40 * 30) <= 1


def test_a_truncated_jpeg_is_an_error_that_names_it(tree):
    truncate(tree / "train" / "blue" / "4.jpg")
    data = image_folder(tree, image_size=16, broken_log=None)
    batches = train_batches(data, batch_size=20, seed=0, workers=0)
    with pytest.raises(ExperimentError, match=r"blue/4\.jpg.*--skip-broken"):
        next(batches)
    batches.close()


def test_broken_files_are_skipped_and_counted_once(tree, tmp_path):
    truncate(tree / "train" / "blue" / "4.jpg")
    (tree / "train" / "red" / "notes.txt").write_text("not an image")
    (tree / "val" / "red" / "0.jpg").write_bytes(b"")
    log = tmp_path / "broken_files.txt"
    assert broken_files(log) == []
    data = image_folder(tree, image_size=16, broken_log=log)
    batches = train_batches(data, batch_size=19, seed=0, workers=0)
    for _ in range(2):
        labels = next(batches)["label"]
        np.testing.assert_array_equal(np.bincount(labels), [9, 10])
    batches.close()
    tests = np.concatenate([batch["label"] for batch in one_pass(data, batch_size=4, workers=0)])
    np.testing.assert_array_equal(np.bincount(tests[tests >= 0]), [3, 2])
    expected = ["train/blue/4.jpg", "train/red/notes.txt", "val/red/0.jpg"]
    assert broken_files(log) == sorted(str(tree / name) for name in expected)


def test_a_tree_without_a_readable_image_is_an_error_even_when_skipping(tree, tmp_path):
    for file in (tree / "val").rglob("*.jpg"):
        file.write_text("nothing")
    with pytest.raises(ExperimentError, match="none of the 6 files"):
        image_folder(tree, image_size=16, broken_log=tmp_path / "broken_files.txt")


def test_missing_and_empty_folders(tmp_path):
    def load(path):
        return image_folder(path, image_size=16, broken_log=None)

    with pytest.raises(ExperimentError, match="--data-dir"):
        load(None)
    with pytest.raises(ExperimentError, match="absent does not exist"):
        load(tmp_path / "absent")
    with pytest.raises(ExperimentError, match="train does not exist"):
        load(tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(ExperimentError, match="train has no folder"):
        load(tmp_path)
    (tmp_path / "train" / "a").mkdir()
    (tmp_path / "val" / "a").mkdir(parents=True)
    with pytest.raises(ExperimentError, match="train has no files"):
        load(tmp_path)


def test_a_class_that_training_lacks(tree):
    (tree / "val" / "green").mkdir()
    with pytest.raises(ExperimentError, match=r"classes that .*train lacks: green"):
        image_folder(tree, image_size=16, broken_log=None)


def greys(dtype):
    """256 values, evenly spaced over 16 bits, in a square."""
    return np.linspace(0, 65535, 256).round().reshape(16, 16).astype(dtype)


@pytest.mark.parametrize("extension", ["png", "tiff", "pgm"])
def test_grey_images_of_16_bits_keep_their_greys(tmp_path, extension):
    file = tmp_path / f"ramp.{extension}"
    Image.fromarray(greys(np.uint16)).save(file)
    want = np.broadcast_to(np.arange(256).reshape(16, 16, 1), (16, 16, 3))
    np.testing.assert_array_equal(np.asarray(read_image(str(file))), want)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_images_of_an_unknown_range_are_refused(tree, tmp_path, dtype):
    file = tree / "train" / "red" / "0.tiff"
    Image.fromarray(greys(dtype)).save(file)
    with pytest.raises(ExperimentError, match=r"red/0\.tiff.*nobody knows what is white"):
        read_image(str(file))
    log = tmp_path / "broken_files.txt"
    data = image_folder(tree, image_size=16, broken_log=log)
    assert [data.train_example(item, np.random.default_rng(0)) is None for item in data.train].count(True) == 1
    assert broken_files(log) == [str(file)]


def png_of(width, height) -> bytes:
    """A black PNG of one bit per pixel, as small as a bomb is."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = zlib.compress(bytes((width // 8 + 1) * height), 9)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def a_bomb(folder):
    (folder / "bomb.png").write_bytes(png_of(20_000, 20_000))
    return folder / "bomb.png"


def a_loop(folder):
    (folder / "loop.png").symlink_to("loop.png")
    return folder / "loop.png"


def a_loop_among_classes(folder):
    (folder.parent / "loop").symlink_to("loop")
    return folder.parent / "loop"


def a_dangling_link(folder):
    (folder / "gone.png").symlink_to("nowhere.png")
    return folder / "gone.png"


def a_name_of_other_bytes(folder):
    file = os.fsencode(folder) + b"/caf\xe9.png"
    with open(file, "wb") as opened:
        opened.write(b"nothing")
    return os.fsdecode(file)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("make", [a_bomb, a_loop, a_loop_among_classes, a_dangling_link, a_name_of_other_bytes])
def test_files_that_harm_are_named_or_skipped_and_counted(tree, tmp_path, make, split):
    file = str(make(tree / split / "red"))

    def examples(log):
        data = image_folder(tree, image_size=16, broken_log=log)
        rng = np.random.default_rng(0)
        read = (lambda item: data.train_example(item, rng)) if split == "train" else data.test_example
        return [read(item) for item in (data.train if split == "train" else data.test)]

    with pytest.raises(ExperimentError, match="--skip-broken") as caught:
        examples(None)
    assert file in str(caught.value)
    log = tmp_path / "broken_files.txt"
    assert examples(log).count(None) == 1
    assert broken_files(log) == [file.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")]


def test_a_broken_file_in_a_loading_process_may_have_any_name(tree):
    """Skipped it is in `test_stream_continues_where_its_saved_position_is`."""
    a_name_of_other_bytes(tree / "train" / "red")
    batches = train_batches(image_folder(tree, image_size=16, broken_log=None), batch_size=20, seed=0, workers=1)
    with pytest.raises(ExperimentError, match="cannot read image"):
        [next(batches) for _ in range(2)]
    batches.close()


def test_nothing_but_links_that_lead_nowhere(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        a_loop(tmp_path / split)
    with pytest.raises(ExperimentError, match="train has no folder"):
        image_folder(tmp_path, image_size=16, broken_log=None)
