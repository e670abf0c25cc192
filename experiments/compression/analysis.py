"""Errors of a trained network's gradients: as predicted, and as they are."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.compression.observed import layers_of
from experiments.harness.step import Batch, Loss, TrainState
from memjax import compress

EDGES = np.linspace(-4, 4, 65)  # of histograms, in standard deviations


def save_analysis(
    folder: Path, make_model: Callable[[], nnx.Module], loss: Loss, next_batch: Callable[[], Batch], state: TrainState
) -> None:
    """Writes analysis.json: of each convolution's gradient the standard deviation of its error, predicted and measured.

    The error is the difference between gradients from compressed and from raw activations, of one batch.
    """
    graph = nnx.graphdef(nnx.eval_shape(make_model))

    @jax.jit
    def gradients(params, rest, batch):
        def mean_loss(params):
            sums = loss(nnx.merge(graph, params, rest, copy=True), batch)
            return sums["loss"] / sums["count"]

        return jax.grad(mean_loss)(params)

    batch = jax.tree.map(jnp.asarray, next_batch())
    layers = layers_of(state)
    lossy = gradients(_with_bounds(state.params, layers.bound), state.rest, batch)
    raw = gradients(_with_bounds(state.params, jnp.zeros_like(layers.bound)), state.rest, batch)
    statistics = layers_of(dataclasses.replace(state, params=raw)).statistics
    half_step = jnp.exp2(jnp.floor(jnp.log2(2 * layers.bound))) / 2
    predicted = np.asarray(compress.predicted_sigma(statistics, half_step))
    simplified = np.asarray(compress.predicted_sigma(statistics, half_step, coefficient=1.0))
    by_path = _by_path(jax.tree.map(jnp.subtract, lossy, raw))
    rows = []
    for i, names in enumerate(layers.weights):
        for j, name in enumerate(names):
            error = next(leaf for path, leaf in by_path.items() if path.endswith("/" + name)).astype(np.float64)
            sigma = error.std()
            if sigma == 0:  # nothing reaches this layer: its cotangents or its values are zero
                continue
            normalised = error / _own_sigma(error)
            rows.append(
                {
                    "layer": layer_name(name),
                    "shape": list(layers.shapes[i][0]),
                    "bound": float(layers.bound[i]),
                    "predicted": float(predicted[i, j]),
                    "measured": float(sigma),
                    "coefficient": float(sigma / simplified[i, j]),
                    "within_sigma": float(np.mean(np.abs(normalised) < 1)),
                    "histogram": np.histogram(normalised, EDGES, density=True)[0].tolist(),
                }
            )
    info = {
        "names": [layer_name(name) for name in layers.names],
        "shapes": [shape for shape, _ in layers.shapes],
        "rows": rows,
    }
    (folder / "analysis.json").write_text(json.dumps(info) + "\n")


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
    """Other bounds, and capacities that cannot overflow."""
    is_layers = lambda node: isinstance(node, compress.Layers)
    new = {"bound": bounds, "bits_per_value": (None,) * len(bounds)}
    replaced = lambda node: dataclasses.replace(node, **new) if is_layers(node) else node
    return jax.tree.map(replaced, params, is_leaf=is_layers)


def _by_path(tree) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}
