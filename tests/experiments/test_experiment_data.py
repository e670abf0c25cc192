"""Data of the experiments: digits, trees of images, broken files, streams whose position can be saved."""

import numpy as np
import pytest
from PIL import Image

from experiments.data.digits import digits
from experiments.data.image_folder import _AREA, _random_box, broken_files, image_folder
from experiments.data.stream import test_batches as one_pass
from experiments.data.stream import train_batches
from experiments.harness.classification import NO_LABEL
from experiments.harness.config import ExperimentError


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
    data = image_folder(tree, image_size=16, broken_log=None)

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


@pytest.mark.parametrize("workers", [0, 1])
def test_a_truncated_jpeg_is_an_error_that_names_it(tree, workers):
    truncate(tree / "train" / "blue" / "4.jpg")
    data = image_folder(tree, image_size=16, broken_log=None)
    batches = train_batches(data, batch_size=20, seed=0, workers=workers)
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
    batches = train_batches(data, batch_size=19, seed=0, workers=1)
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
    with pytest.raises(ExperimentError, match="train is empty"):
        load(tmp_path)
    (tmp_path / "train" / "a").mkdir()
    (tmp_path / "val" / "a").mkdir(parents=True)
    with pytest.raises(ExperimentError, match="train has no files"):
        load(tmp_path)


def test_a_class_that_training_lacks(tree):
    (tree / "val" / "green").mkdir()
    with pytest.raises(ExperimentError, match=r"classes that .*train lacks: green"):
        image_folder(tree, image_size=16, broken_log=None)
