"""Loss and accuracy of an image classifier."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.harness.loop.step import Batch, Loss, Sums

NO_LABEL = -1  # of examples that only fill up a batch


@dataclass(frozen=True)
class Prepare:
    """(B, H, W, C) bytes to floats: scaled to [0, 1], normalised, and resized to (size, size), linearly."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int | None = None

    def __call__(self, images: jax.Array) -> jax.Array:
        images = (images.astype(jnp.float32) / 255 - jnp.array(self.mean)) / jnp.array(self.std)
        if self.size is not None and images.shape[1:3] != (self.size, self.size):
            images = jax.image.resize(images, (len(images), self.size, self.size, images.shape[-1]), "linear")
        return images


def classification_loss(
    *, mean: Sequence[float], std: Sequence[float], label_smoothing: float, size: int | None = None
) -> Loss:
    """A loss over batches of `image`, (B, H, W, C) uint8, and `label`, (B,) int32.

    Images are normalised here, on the device: bytes are a quarter of what floats would cost on the way from the loading
    processes. A model with a method `from_bytes(images, prepare)` does that itself, so that it may keep bytes for its backward
    pass. Sums: cross-entropy, hits among the best one and five, count.
    """
    prepare = Prepare(tuple(mean), tuple(std), size)

    def sums(model: nnx.Module, batch: Batch) -> Sums:
        images = batch["image"]
        logits = model.from_bytes(images, prepare) if hasattr(model, "from_bytes") else model(prepare(images))
        classes = logits.shape[-1]
        labels = batch["label"]
        counted = (labels != NO_LABEL).astype(jnp.float32)
        targets = optax.smooth_labels(jax.nn.one_hot(labels, classes), label_smoothing)
        losses = optax.softmax_cross_entropy(logits, targets)
        own = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], axis=-1)
        better = jnp.sum(logits > own, axis=-1)
        return {
            "loss": jnp.sum(losses * counted),
            "top1": jnp.sum(jnp.where(better < 1, counted, 0)),
            "top5": jnp.sum(jnp.where(better < 5, counted, 0)),
            "count": jnp.sum(counted),
        }

    return sums
