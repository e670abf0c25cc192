"""Errors of a trained network's gradients: as predicted, and as they are."""

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.compression.observed import layers_of
from experiments.harness.step import Batch, Loss, TrainState
from memjax import compress

EDGES = np.linspace(-4, 4, 65)  # of histograms, in standard deviations


def save_analysis(
    folder: Path,
    make_model: Callable[[], nnx.Module],
    loss: Loss,
    batches: Callable[[], Iterable[Batch]],
    state: TrainState,
) -> None:
    """Writes analysis.json: of each convolution's gradient the standard deviation of its error, predicted and measured.

    The error is the difference between gradients from compressed and from raw activations. Both deviations are root mean
    squares over the batches that reach a layer: in a single one the errors of its weights have so much in common that their
    deviation scatters.
    """
    graph = nnx.graphdef(nnx.eval_shape(make_model))

    @jax.jit
    def gradients(params, rest, batch):
        def mean_loss(params):
            sums = loss(nnx.merge(graph, params, rest, copy=True), batch)
            return sums["loss"] / sums["count"]

        with jax.default_matmul_precision("highest"):  # GPUs round what convolutions read, and that adds up, too
            return jax.grad(mean_loss)(params)

    layers = layers_of(state)
    half_step = jnp.exp2(jnp.floor(jnp.log2(2 * layers.bound))) / 2
    found: dict[tuple[int, int], list[_Error]] = {}
    for on_host in batches():
        batch = jax.tree.map(jnp.asarray, on_host)
        lossy = gradients(_with_bounds(state.params, layers.bound), state.rest, batch)
        raw = gradients(_with_bounds(state.params, jnp.zeros_like(layers.bound)), state.rest, batch)
        statistics = layers_of(dataclasses.replace(state, params=raw)).statistics
        predicted = np.asarray(compress.predicted_sigma(statistics, half_step))
        simplified = np.asarray(compress.predicted_sigma(statistics, half_step, coefficient=1.0))
        by_path = _by_path(jax.tree.map(jnp.subtract, lossy, raw))
        for i, names in enumerate(layers.weights):
            for j, name in enumerate(names):
                error = next(leaf for path, leaf in by_path.items() if path.endswith("/" + name)).astype(np.float64)
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
        "shapes": [shape for shape, _ in layers.shapes],
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
    return path.removesuffix("/value").removesuffix("/kernel")


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


def _by_path(tree) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}
