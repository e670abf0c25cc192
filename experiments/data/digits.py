"""scikit-learn's handwritten digits: 1797 real images of 8x8 pixels that ship with the package."""

import numpy as np
from PIL import Image

from experiments.data.stream import Example, ImageData

_TEST_SHARE = 0.2
_SPLIT_SEED = 0  # the same split in every run, whatever its seed


def digits(image_size: int) -> ImageData:
    """The digits enlarged to (image_size, image_size, 1), one fifth of each class for testing.

    Training images are shifted by up to an eighth of their size.
    """
    # Imported here: it takes seconds, which processes that load other data would spend too.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    images = np.stack([_enlarge(image.reshape(8, 8), image_size) for image in pixels])
    items = list(zip(images, labels.astype(np.int32), strict=True))
    train, test = train_test_split(items, test_size=_TEST_SHARE, random_state=_SPLIT_SEED, stratify=labels)
    return ImageData(
        train=train,
        test=test,
        train_example=_Shifted(image_size // 8),
        test_example=_as_example,
        classes=[str(digit) for digit in range(10)],
        mean=(0.305,),
        std=(0.32,),
    )


def _enlarge(image: np.ndarray, size: int) -> np.ndarray:
    """(8, 8) values 0 to 16 -> (size, size, 1) bytes."""
    as_bytes = Image.fromarray(np.round(image * (255 / 16)).astype(np.uint8))
    return np.asarray(as_bytes.resize((size, size), Image.Resampling.BILINEAR))[..., None]


def _as_example(item) -> Example:
    image, label = item
    return {"image": image, "label": label}


class _Shifted:
    def __init__(self, most: int):
        self._most = most

    def __call__(self, item, rng: np.random.Generator) -> Example:
        image, label = item
        margin = self._most
        top, left = rng.integers(0, 2 * margin + 1, 2)
        height, width = image.shape[:2]
        padded = np.pad(image, [(margin, margin), (margin, margin), (0, 0)])
        return {"image": padded[top : top + height, left : left + width], "label": label}
