"""Photographs that come with scikit-image and scikit-learn: which one is a crop from?"""

from collections.abc import Callable

import numpy as np
from PIL import Image

from experiments.data.image_folder import IMAGENET_MEAN, IMAGENET_STD
from experiments.data.stream import Example, ImageData

_OF_SKIMAGE = (
    *("astronaut", "brick", "camera", "cell", "chelsea", "coffee", "coins", "grass", "gravel"),
    *("hubble_deep_field", "immunohistochemistry", "moon", "retina", "rocket"),
)
_OF_SKLEARN = ("china.jpg", "flower.jpg")
_TRAIN_WIDTH = 0.65  # share of a photograph's width; the rest is for testing
_PER_CLASS = 128  # training crops of an epoch


def photographs(image_size: int) -> ImageData:
    """Crops of (image_size, image_size, 3) pixels from 16 photographs, each a class.

    Training: anywhere in the left 65% of a photograph, flipped at random. Test: on a grid in the rest of it, so that no pixel
    is in both.

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


def _edge(photo: np.ndarray) -> int:
    """Where the test region begins."""
    return round(photo.shape[1] * _TRAIN_WIDTH)


def _grid(label: int, photo: np.ndarray, size: int) -> list[tuple[int, int, int]]:
    """(label, top, left) of 32 crops, evenly over the test region."""
    tops = np.linspace(0, photo.shape[0] - size, 8).astype(int)
    lefts = np.linspace(_edge(photo), photo.shape[1] - size, 4).astype(int)
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
    def __call__(self, item, rng: np.random.Generator) -> Example:
        label, _ = item
        photo = self._photos[label]
        top = int(rng.integers(0, photo.shape[0] - self._size + 1))
        left = int(rng.integers(0, _edge(photo) - self._size + 1))
        example = self._crop(label, top, left)
        return example | {"image": example["image"][:, ::-1]} if rng.random() < 0.5 else example
