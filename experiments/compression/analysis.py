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
    lossy = gradients(state.params, state.rest, batch)
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
            rows.append(
                {
                    "layer": name.removesuffix("/kernel"),
                    "shape": list(layers.shapes[i][0]),
                    "bound": float(layers.bound[i]),
                    "predicted": float(predicted[i, j]),
                    "measured": float(sigma),
                    "coefficient": float(sigma / simplified[i, j]),
                    "within_sigma": float(np.mean(np.abs(error) < sigma)),
                    "histogram": np.histogram(error / sigma, EDGES, density=True)[0].tolist(),
                }
            )
    info = {"names": layers.names, "shapes": [shape for shape, _ in layers.shapes], "rows": rows}
    (folder / "analysis.json").write_text(json.dumps(info) + "\n")


def _with_bounds(params: nnx.State, bounds: jax.Array) -> nnx.State:
    is_layers = lambda node: isinstance(node, compress.Layers)
    replaced = lambda node: dataclasses.replace(node, bound=bounds) if is_layers(node) else node
    return jax.tree.map(replaced, params, is_leaf=is_layers)


def _by_path(tree) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}
