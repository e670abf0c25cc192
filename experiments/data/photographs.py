"""Photographs that come with scikit-image and scikit-learn: which one is a crop from?"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from experiments.data.image_folder import IMAGENET_MEAN, IMAGENET_STD
from experiments.data.stream import Example, ImageData

_OF_SKIMAGE = (
    *("astronaut", "brick", "camera", "cell", "chelsea", "coffee", "coins", "grass", "gravel"),
    *("hubble_deep_field", "immunohistochemistry", "moon", "retina", "rocket"),
)
_OF_SKLEARN = ("china.jpg", "flower.jpg")
_PER_CLASS = 128  # training crops of an epoch
_GRID = (16, 8)  # test crops of a photograph, downwards and across


def photographs(image_size: int) -> ImageData:
    """Crops of (image_size, image_size, 3) pixels from 16 photographs, each a class.

    Each photograph is cut into upright stripes, those for training at the edges and between those for testing, so that most
    of what test crops show has been seen beside them, and no pixel is in both. Training: anywhere in a stripe, flipped at
    random. Test: 128 of a photograph on a grid.

    Args:
      image_size: side of the crops; up to 96, since some photographs are small.
    """
    # Imported here: it takes seconds, which processes that load other data would spend too.
    import skimage.data
    from sklearn.datasets import load_sample_image

    loaders: list[tuple[str, Callable]] = [(name, getattr(skimage.data, name)) for name in _OF_SKIMAGE]
    loaders += [(name.split(".")[0], lambda name=name: load_sample_image(name)) for name in _OF_SKLEARN]
    photos = [_rgb(load()) for _, load in loaders]
    train = [(label, np.int32(i)) for label in range(len(photos)) for i in range(_PER_CLASS)]
    test = [place for label, photo in enumerate(photos) for place in _grid(label, photo, image_size)]
    return ImageData(
        train=train,
        test=test,
        train_example=_RandomCrop(photos, image_size),
        test_example=_GridCrop(photos, image_size),
        classes=[name for name, _ in loaders],
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def _rgb(pixels: np.ndarray) -> np.ndarray:
    """As (H, W, 3) bytes."""
    return np.asarray(Image.fromarray(pixels).convert("RGB"))


@dataclass(frozen=True)
class _Stripes:
    """Where crops of a photograph may begin, in columns."""

    train: np.ndarray
    test: np.ndarray


def _stripes(width: int, size: int) -> _Stripes:
    """Test stripes an eighth wider than crops; those for training, one more, at least half as wide again if they can be."""
    test_width = size + size // 8
    tests = max(1, (width - size * 3 // 2) // (test_width + size * 3 // 2))
    edges = np.linspace(0, width - tests * test_width, tests + 2).astype(int)
    begins = edges[:-1] + test_width * np.arange(tests + 1)  # of training stripes
    ends = edges[1:] + test_width * np.arange(tests + 1)
    train = [np.arange(begin, end - size + 1) for begin, end in zip(begins, ends, strict=True)]
    test = [np.arange(end, begin - size + 1) for end, begin in zip(ends[:-1], begins[1:], strict=True)]
    return _Stripes(np.concatenate(train), np.concatenate(test))


def _grid(label: int, photo: np.ndarray, size: int) -> list[tuple[int, int, int]]:
    """(label, top, left) of crops, evenly over the test stripes."""
    tops = np.linspace(0, photo.shape[0] - size, _GRID[0]).astype(int)
    lefts = _stripes(photo.shape[1], size).test
    lefts = lefts[np.linspace(0, len(lefts) - 1, _GRID[1]).astype(int)]
    return [(label, int(top), int(left)) for top in tops for left in lefts]


class _Crop:
    def __init__(self, photos: list[np.ndarray], size: int):
        self._photos, self._size = photos, size

    def _crop(self, label: int, top: int, left: int) -> Example:
        image = self._photos[label][top : top + self._size, left : left + self._size]
        return {"image": image, "label": np.array(label, np.int32)}


class _GridCrop(_Crop):
    def __call__(self, item) -> Example:
        label, top, left = item
        return self._crop(label, top, left)


class _RandomCrop(_Crop):
    def __init__(self, photos: list[np.ndarray], size: int):
        super().__init__(photos, size)
        self._lefts = [_stripes(photo.shape[1], size).train for photo in photos]

    def __call__(self, item, rng: np.random.Generator) -> Example:
        label, _ = item
        photo = self._photos[label]
        top = int(rng.integers(0, photo.shape[0] - self._size + 1))
        left = int(rng.choice(self._lefts[label]))
        example = self._crop(label, top, left)
        return example | {"image": example["image"][:, ::-1]} if rng.random() < 0.5 else example
