"""An ImageNet-style tree: PATH/train/CLASS/image and PATH/val/CLASS/image."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from experiments.data.stream import Example, ImageData
from experiments.harness.errors import ExperimentError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_RESIZE = 256 / 224  # evaluation: shorter side before the centre crop, relative to the crop
_BITS_PER_SAMPLE = 258  # a tag of TIFF
_AREA, _LOG_RATIO = (0.08, 1.0), (math.log(3 / 4), math.log(4 / 3))  # of random crops


def image_folder(path: Path | None, *, image_size: int, broken_log: Path | None) -> ImageData:
    """The images under `path`, read when they are asked for, as (image_size, image_size, 3) bytes; see `read_image`.

    Training: random resized crop (8 to 100% of the area, ratio 3/4 to 4/3) and horizontal flip. Test: shorter
    side to 256/224 of the size, centre crop. Names that start with a dot are left out.

    Args:
      path: the tree.
      image_size: side of the examples, in pixels.
      broken_log: None: a file that is damaged, too large or no image, and a link that leads nowhere, raises an error that
        names it. A path: such files are skipped, and their names appended there (`broken_files` counts them).

    Raises:
      ExperimentError: no tree there, no images in it, or a class in val/ that train/ lacks.
    """
    if path is None:
        raise ExperimentError("--data folder needs --data-dir, a folder with train/CLASS/ and val/CLASS/")
    if not path.is_dir():
        raise ExperimentError(f"--data-dir {path} does not exist or is not a folder")
    classes = _classes(path / "train")
    if new := sorted(set(_classes(path / "val")) - set(classes)):
        raise ExperimentError(f"{path / 'val'} has classes that {path / 'train'} lacks: {', '.join(new[:5])}")
    train, test = (_files(path / split, classes) for split in ("train", "val"))
    if broken_log is not None:
        for files in (train, test):
            _require_one_readable(files)
    return ImageData(
        train=train,
        test=test,
        train_example=_RandomCrop(image_size, broken_log),
        test_example=_CentreCrop(image_size, broken_log),
        classes=classes,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def broken_log(run: Path) -> Path:
    """Where in the folder of a run the names of skipped files are."""
    return run / "broken_files.txt"


def skipped(run: Path) -> dict[str, str]:
    """How many files were skipped in a run, for its report."""
    return {"broken files skipped": str(len(broken_files(broken_log(run))))}


def broken_files(log: Path) -> list[str]:
    """The files skipped so far, each once."""
    return sorted(set(log.read_text(encoding="utf-8").split("\n")) - {""}) if log.exists() else []


def read_image(file: str) -> Image.Image:
    """The whole image as RGB, 8 bits each.

    Grey values of 9 to 16 bits are scaled from their whole range, so that 65535 (of 16 bits) becomes 255; of colours of 16 bits
    the upper 8 are taken. Integers of 32 bits and floats have no range that is known, and are refused.

    Raises:
      ExperimentError: the file is damaged, no image, of a kind that is refused, or has so many pixels (Pillow's limit, 179
        million) that it must be meant to fill the memory. It names the file.
    """
    try:
        with Image.open(file) as image:
            largest = _largest_grey(image)
            return image.convert("RGB") if largest is None else _scaled(image, largest)
    except FileNotFoundError:
        raise ExperimentError(
            f"image {file} has disappeared, or is a link that leads nowhere; remove it, or add --skip-broken"
        ) from None
    except Exception as error:  # of any kind: Pillow has a decoder for each format
        raise ExperimentError(
            f"cannot read image {file}: {error or type(error).__name__}; remove it, or skip such files with --skip-broken"
        ) from None


def _largest_grey(image: Image.Image) -> int | None:
    """The largest value that grey pixels of more than 8 bits can have; None if there are no such pixels."""
    if image.mode.startswith("I;16"):
        tags = getattr(image, "tag_v2", {})  # of TIFF, which knows any number of bits
        return 2 ** int(tags.get(_BITS_PER_SAMPLE, (16,))[0]) - 1
    if image.mode == "I" and image.format in ("PNG", "PPM"):
        return 2**16 - 1
    if image.mode in ("I", "F"):
        kind = "32-bit integers" if image.mode == "I" else "floats"
        raise ValueError(f"its pixels are {kind}, of which nobody knows what is white; save it with 8 or 16 bits")
    return None


def _scaled(image: Image.Image, largest: int) -> Image.Image:
    """Grey values up to `largest` as RGB, rounded."""
    values = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((255 * values + largest // 2) // largest).astype(np.uint8)).convert("RGB")


@dataclass(frozen=True)
class _Crop:
    size: int
    broken_log: Path | None

    def _read(self, file: str) -> Image.Image | None:
        try:
            return read_image(file)
        except ExperimentError:
            if self.broken_log is None:
                raise
            # One short write in append mode: loading processes do not mix up their lines.
            with self.broken_log.open("a", encoding="utf-8") as log:
                log.write(_in_one_line(file) + "\n")
            return None


def _in_one_line(file: str) -> str:
    """Its name, with escapes for line breaks and for bytes that are no UTF-8."""
    return os.fsencode(file).decode("utf-8", "backslashreplace").replace("\n", "\\n")


class _RandomCrop(_Crop):
    def __call__(self, item, rng: np.random.Generator) -> Example | None:
        file, label = item
        image = self._read(file)
        if image is None:
            return None
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=_random_box(image.size, rng))
        pixels = np.asarray(image)
        return {
            "image": pixels[:, ::-1] if rng.random() < 0.5 else pixels,
            "label": np.array(label, np.int32),
        }


class _CentreCrop(_Crop):
    def __call__(self, item) -> Example | None:
        file, label = item
        image = self._read(file)
        if image is None:
            return None
        # Cropping and resizing in one go gives the pixels of resizing first, without the border.
        box = _centred_square(image.size, min(image.size) / _RESIZE)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        return {"image": np.asarray(image), "label": np.array(label, np.int32)}


def _random_box(size: tuple[int, int], rng: np.random.Generator) -> tuple[float, float, float, float]:
    """A random part of the image, (left, top, right, bottom); after ten misses the largest centred square."""
    width, height = size
    for _ in range(10):
        area = rng.uniform(*_AREA) * width * height
        ratio = math.exp(rng.uniform(*_LOG_RATIO))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
            return (left, top, left + w, top + h)
    return _centred_square(size, min(width, height))


def _centred_square(size: tuple[int, int], side: float) -> tuple[float, float, float, float]:
    left, top = (size[0] - side) / 2, (size[1] - side) / 2
    return (left, top, left + side, top + side)


def _classes(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise ExperimentError(f"{folder} does not exist; an image tree has train/CLASS/ and val/CLASS/")
    names = sorted(e.name for e in _entries(folder) if not _leads_nowhere(e) and e.is_dir())
    if not names:
        raise ExperimentError(f"{folder} has no folder in it: it needs one folder of images per class")
    return names


def _files(folder: Path, classes: list[str]) -> list[tuple[str, int]]:
    files = [
        (entry.path, label)
        for label, name in enumerate(classes)
        if (folder / name).is_dir()
        for entry in _entries(folder / name)
        if _leads_nowhere(entry) or entry.is_file()
    ]
    # Reading them says what they are.
    files += [(entry.path, 0) for entry in _entries(folder) if _leads_nowhere(entry)]
    if not files:
        raise ExperimentError(f"{folder} has no files in its class folders")
    return files


def _entries(folder: Path) -> list[os.DirEntry]:
    """What is in the folder and not hidden, by name."""
    visible = (entry for entry in os.scandir(folder) if not entry.name.startswith("."))
    return sorted(visible, key=lambda entry: entry.name)


def _leads_nowhere(entry: os.DirEntry) -> bool:
    """Whether it is a link to itself, in a circle, or to something that does not exist."""
    try:
        entry.stat()
    except OSError:
        return entry.is_symlink()
    return False


def _require_one_readable(files: list[tuple[str, int]]) -> None:
    """Skipping every file would look for the next one for ever."""
    for file, _ in files:
        try:
            read_image(file)
            return
        except ExperimentError:
            continue
    raise ExperimentError(f"none of the {len(files)} files beside {files[0][0]} can be read as an image")
