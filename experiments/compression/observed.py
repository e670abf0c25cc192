"""A transactional step, and records of each layer's bits and bounds."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.harness.loop.step import TrainState
from memjax import compress

_HEADER_BITS = 8 * (32 + 4) / 4096  # per value, of the codes of ErrorBounded


class Images(NamedTuple):
    """What the first convolution reads. It follows from bytes, which are kept in its place.

    Attributes:
      values: number of values that it reads.
      nbytes: number of bytes that these follow from.
    """

    values: int
    nbytes: int


class Observed:
    """Compiles a training step as a transaction, and records the bits that its layers needed.

    Args:
      window: see `memjax.compress.transactional`.
      images: the images of a device's batch.
    """

    def __init__(self, window: int, images: Images):
        self._window, self._images = window, images
        self._run: Any = None  # what `compress.transactional` gives

    def compile_step(self, step: Callable, **options) -> Callable:
        self._run = compress.transactional(step, window=self._window, ahead=True, **options)
        return self._run

    def settle(self, state: TrainState) -> TrainState:
        assert self._run is not None
        return self._run.finish(state)

    def observe(self, state: TrainState) -> dict[str, float | list[float]]:
        """The bits per value that the last step's codes needed, and the bounds, by layer; and the size of float32 over that of
        all codes, headers and the bytes of images included.
        """
        assert self._run is not None
        layers, last = layers_of(state), jax.device_get(state.optimizer.last[0])
        bits = last.bits / np.maximum(last.uses, 1) + _HEADER_BITS
        values = np.array([np.prod(shape) for shape, _ in layers.shapes], float)
        kept_bits = (bits * values).sum() + 8 * self._images.nbytes
        return {
            "ratio": float(32 * (values.sum() + self._images.values) / kept_bits),
            "bits": [round(float(b), 4) for b in bits],
            "bounds": [float(b) for b in jax.device_get(layers.bound)],
            "replays": self._run.replays,
            "programs": self._run.compiled,
        }


def layers_of(state: TrainState) -> compress.Layers:
    """The settings of the state's compressed model."""
    is_layers = lambda node: isinstance(node, compress.Layers)
    return next(node for node in jax.tree.leaves(state.params, is_leaf=is_layers) if is_layers(node))
