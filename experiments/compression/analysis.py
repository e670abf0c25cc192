"""Errors of a trained network's gradients: as predicted, and as they are."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.compression.observed import Images, layers_of
from experiments.harness.step import Batch, Loss, TrainState
from memjax import compress

EDGES = np.linspace(-4, 4, 65)  # of histograms, in standard deviations


def save_analysis(
    folder: Path,
    make_model: Callable[[], nnx.Module],
    loss: Loss,
    batches: Callable[[], Iterable[Sequence[Batch]]],
    images: Images,
    state: TrainState,
) -> None:
    """Writes analysis.json: of each convolution's gradient the standard deviation of its error, predicted and measured.

    The error is the difference between gradients from compressed and from raw activations, means over a batch. Both deviations
    are root mean squares over the batches that reach a layer: in a single one the errors of its weights have so much in common
    that their deviation scatters.

    Args:
      folder: to write to.
      make_model: with compression.
      loss: of training.
      batches: each in parts of equal size, of which a gradient is the mean.
      images: what stands for what the first convolution reads.
      state: of training.
    """
    graph = nnx.graphdef(nnx.eval_shape(make_model))

    layers = layers_of(state)
    weights = {name for names in layers.weights for name in names}

    @jax.jit
    def gradients(params, rest, batch):
        """Of convolutions, by name, and statistics."""

        def mean_loss(params):
            sums = loss(nnx.merge(graph, params, rest, copy=True), batch)
            return sums["loss"] / sums["count"]

        with jax.default_matmul_precision("highest"):  # GPUs round what convolutions read, and that adds up, too
            found = jax.grad(mean_loss)(params)
        by_path = _by_path(found)
        own = {
            name: next(leaf for path, leaf in by_path.items() if f"/{path}".endswith(f"/{name}")) for name in weights
        }
        return own, layers_of(dataclasses.replace(state, params=found)).statistics

    half_step = jnp.exp2(jnp.floor(jnp.log2(2 * layers.bound))) / 2

    def errors_of(batch):
        """Of gradients, and two predictions of their deviations."""
        lossy, _ = gradients(_with_bounds(state.params, layers.bound), state.rest, batch)
        raw, statistics = gradients(_with_bounds(state.params, jnp.zeros_like(layers.bound)), state.rest, batch)
        predicted = [compress.predicted_sigma(statistics, half_step, coefficient=a) for a in (None, 1.0)]
        return jax.tree.map(jnp.subtract, lossy, raw), predicted

    found: dict[tuple[int, int], list[_Error]] = {}
    for parts in batches():
        of_parts = [errors_of(jax.tree.map(jnp.asarray, part)) for part in parts]
        errors = jax.device_get(jax.tree.map(lambda *own: sum(own) / len(own), *[own for own, _ in of_parts]))
        # Errors of parts are independent.
        predicted, simplified = np.sqrt(np.mean(np.square([sigmas for _, sigmas in of_parts]), 0) / len(parts))
        for i, names in enumerate(layers.weights):
            for j, name in enumerate(names):
                error = errors[name].astype(np.float64)
                if error.any():  # else nothing reaches this layer: its cotangents or its values are zero
                    normalised = error / _own_sigma(error)
                    counts = np.histogram(normalised, EDGES)[0] / error.size
                    of_batch = _Error(
                        predicted[i, j], error.std(), simplified[i, j], np.mean(np.abs(normalised) < 1), counts
                    )
                    found.setdefault((i, j), []).append(of_batch)
    rows = []
    for (i, j), errors in sorted(found.items()):
        sigma, predicted_sigma, simple = (
            float(np.sqrt(np.mean(np.square(values))))
            for values in zip(*((error.measured, error.predicted, error.simplified) for error in errors), strict=True)
        )
        rows.append(
            {
                "layer": layer_name(layers.weights[i][j]),
                "shape": list(layers.shapes[i][0]),
                "bound": float(layers.bound[i]),
                "predicted": predicted_sigma,
                "measured": sigma,
                "coefficient": sigma / simple,
                "within_sigma": float(np.mean([error.within_sigma for error in errors])),
                "histogram": (np.mean([error.counts for error in errors], 0) / np.diff(EDGES)).tolist(),
            }
        )
    info = {
        "names": [layer_name(name) for name in layers.names],
        "values": images.values + sum(math.prod(shape) for shape, _ in layers.shapes),
        "rows": rows,
    }
    (folder / "analysis.json").write_text(json.dumps(info) + "\n")


class _Error(NamedTuple):
    """Of a gradient, in one batch."""

    predicted: float
    measured: float
    simplified: float
    within_sigma: float
    counts: np.ndarray


def layer_name(path: str) -> str:
    """Of the path of its kernel."""
    return path.removeprefix("net/").removesuffix("/value").removesuffix("/kernel")


def _own_sigma(error: np.ndarray) -> np.ndarray:
    """Standard deviations of a gradient's errors, (..., inputs, outputs).

    Channels differ in it: the mixture of their normal distributions is not normal. Here it is a product of a factor for each
    input and one for each output.
    """
    squares = np.square(error)
    by_input = squares.mean((*range(error.ndim - 2), error.ndim - 1), keepdims=True)
    by_output = squares.mean(tuple(range(error.ndim - 1)), keepdims=True)
    return np.sqrt(by_input * by_output / squares.mean()) + 1e-30


def _with_bounds(params: nnx.State, bounds: jax.Array) -> nnx.State:
    """Other bounds, capacities that cannot overflow, and statistics of all values."""
    is_layers = lambda node: isinstance(node, compress.Layers)
    new = {"bound": bounds, "bits_per_value": (None,) * len(bounds), "samples": None}
    replaced = lambda node: dataclasses.replace(node, **new) if is_layers(node) else node
    return jax.tree.map(replaced, params, is_leaf=is_layers)


def _by_path(tree) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
