"""An ImageNet-style tree: PATH/train/CLASS/image and PATH/val/CLASS/image."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from experiments.data.stream import Example, ImageData
from experiments.harness.config import ExperimentError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_RESIZE = 256 / 224  # evaluation: shorter side before the centre crop, relative to the crop
_AREA, _LOG_RATIO = (0.08, 1.0), (math.log(3 / 4), math.log(4 / 3))  # of random crops


def image_folder(path: Path | None, *, image_size: int, broken_log: Path | None) -> ImageData:
    """The images under `path`, read when they are asked for, as (image_size, image_size, 3).

    Training: random resized crop (8 to 100% of the area, ratio 3/4 to 4/3) and horizontal flip. Test: shorter
    side to 256/224 of the size, centre crop. Names that start with a dot are left out.

    Args:
      path: the tree.
      image_size: side of the examples, in pixels.
      broken_log: None: a file that is damaged or no image raises an error that names it. A path: such files
        are skipped, and their names appended there (`broken_files` counts them).

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


def broken_files(broken_log: Path) -> list[str]:
    """The files skipped so far, each once."""
    return sorted(set(broken_log.read_text().splitlines())) if broken_log.exists() else []


def read_image(file: str) -> Image.Image:
    """The whole image as RGB. Raises ExperimentError naming the file if it is damaged or no image."""
    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    except FileNotFoundError:
        raise ExperimentError(f"image {file} has disappeared since the run began") from None
    except (
        UnidentifiedImageError,
        OSError,
        SyntaxError,
        ValueError,
    ) as error:  # what Pillow's decoders raise
        raise ExperimentError(
            f"cannot read image {file}: {error}; remove it, or skip such files with --skip-broken"
        ) from None


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
            with self.broken_log.open("a") as log:
                log.write(file + "\n")
            return None


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
    names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    if not names:
        raise ExperimentError(f"{folder} is empty: it needs one folder of images per class")
    return names


def _files(folder: Path, classes: list[str]) -> list[tuple[str, int]]:
    files = [
        (entry.path, label)
        for label, name in enumerate(classes)
        if (folder / name).is_dir()
        for entry in sorted(os.scandir(folder / name), key=lambda entry: entry.name)
        if entry.is_file() and not entry.name.startswith(".")
    ]
    if not files:
        raise ExperimentError(f"{folder} has no files in its class folders")
    return files


def _require_one_readable(files: list[tuple[str, int]]) -> None:
    """Skipping every file would look for the next one for ever."""
    for file, _ in files:
        try:
            read_image(file)
            return
        except ExperimentError:
            continue
    raise ExperimentError(f"none of the {len(files)} files beside {files[0][0]} can be read as an image")
