"""Errors of a trained network's gradients, predicted and measured.

Jin et al. 2020, section 3: an error of a gradient is a sum over positions of cotangents times independent errors of what a
convolution reads.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from experiments.compression.observed import Images, layers_of
from experiments.harness import files
from experiments.harness.loop.step import Batch, Loss, TrainState
from experiments.models.compressed import Compressed
from memjax import compress

EDGES = np.linspace(-4, 4, 65)  # of histograms, in standard deviations


def save_analysis(
    folder: Path,
    make_model: Callable[[], Compressed],
    loss: Loss,
    batches: Callable[[], Iterable[Batch]],
    images: Images,
    state: TrainState,
) -> None:
    """Write analysis.json: the standard deviation of the error of each convolution's gradient, predicted and measured.

    The error is the difference between gradients from compressed and from raw activations. Both deviations are root mean
    squares over the batches that reach a layer: the errors of its weights in one batch are correlated, and their deviation
    scatters. Histograms have each error divided by a deviation of its own, because mixtures of normal distributions are not
    normal.

    Args:
      folder: the folder of analysis.json.
      make_model: makes the model with compression.
      loss: the loss of training.
      batches: gives the batches whose gradients are compared.
      images: the bytes that are kept in place of what the first convolution reads.
      state: the state of training.
    """
    graph = nnx.graphdef(nnx.eval_shape(make_model))
    squares = nnx.graphdef(nnx.eval_shape(lambda: _Uncompressed(make_model().net)))
    layers = layers_of(state)
    names = {name for weights in layers.weights for name in weights}

    def gradients_of(graph, params, rest, batch):
        def mean_loss(params):
            sums = loss(nnx.merge(graph, params, rest, copy=True), batch)
            return sums["loss"] / sums["count"]

        with jax.default_matmul_precision("highest"):  # GPUs round what convolutions read, and that adds up, too
            return jax.grad(mean_loss)(params)

    @jax.jit
    def gradients(params, rest, batch):
        """The gradients of convolutions, by name, and statistics."""
        gradient = gradients_of(graph, params, rest, batch)
        return _by_name(gradient, names), layers_of(dataclasses.replace(state, params=gradient)).statistics

    @jax.jit
    def variances(params, rest, batch):
        """The variances of the errors of these gradients, relative to each other, by name."""
        return _by_name(gradients_of(squares, {"net": params["net"]}, {"net": rest["net"]}, batch), names)

    half_step = jnp.asarray(np.ldexp(np.float32(1), np.frexp(layers.bound)[1] - 1))
    errors_by_weight: dict[tuple[int, int], list[_Error]] = {}
    for on_host in batches():
        batch = jax.tree.map(jnp.asarray, on_host)
        lossy, _ = gradients(_with_bounds(state.params, layers.bound), state.rest, batch)
        raw, statistics = gradients(_with_bounds(state.params, jnp.zeros_like(layers.bound)), state.rest, batch)
        variance = jax.device_get(variances(state.params, state.rest, batch))
        predicted = np.asarray(compress.predicted_sigma(statistics, half_step))
        simplified = np.asarray(compress.predicted_sigma(statistics, half_step, coefficient=1.0))
        errors = jax.device_get(jax.tree.map(jnp.subtract, lossy, raw))
        for i, weights in enumerate(layers.weights):
            for j, name in enumerate(weights):
                error = errors[name].astype(np.float64)
                if error.any():  # else nothing reaches this layer: its cotangents or its values are zero
                    normalised = _normalised(error, variance[name])
                    counts = np.histogram(normalised, EDGES)[0] / normalised.size
                    of_batch = _Error(
                        predicted[i, j], error.std(), simplified[i, j], np.mean(np.abs(normalised) < 1), counts
                    )
                    errors_by_weight.setdefault((i, j), []).append(of_batch)
    rows = []
    for (i, j), of_batches in sorted(errors_by_weight.items()):
        sigma, predicted_sigma, simple = (
            float(np.sqrt(np.mean(np.square(values))))
            for values in zip(*((one.measured, one.predicted, one.simplified) for one in of_batches), strict=True)
        )
        rows.append(
            {
                "layer": layer_name(layers.weights[i][j]),
                "shape": list(layers.shapes[i][0]),
                "bound": float(layers.bound[i]),
                "predicted": predicted_sigma,
                "measured": sigma,
                "coefficient": sigma / simple,
                "within_sigma": float(np.mean([one.within_sigma for one in of_batches])),
                "histogram": (np.mean([one.counts for one in of_batches], 0) / np.diff(EDGES)).tolist(),
            }
        )
    info = {
        "names": [layer_name(name) for name in layers.names],
        "values": images.values + sum(math.prod(shape) for shape, _ in layers.shapes),
        "rows": rows,
    }
    files.write_text(folder / "analysis.json", json.dumps(info) + "\n")


class _Error(NamedTuple):
    """The error of a gradient in one batch."""

    predicted: float
    measured: float
    simplified: float
    within_sigma: float
    counts: np.ndarray


def layer_name(path: str) -> str:
    """The name of a layer, from the path of its kernel."""
    return path.removeprefix("net/").removesuffix("/value").removesuffix("/kernel")


class _Uncompressed(nnx.Module):
    """The network without compression, whose convolutions have the variances of their errors as gradients.

    Only positions where the convolution reads a value that is not zero have an error.
    """

    def __init__(self, net: nnx.Module):
        self.net = net
        for _, module in nnx.iter_modules(net):
            if isinstance(module, nnx.Conv):
                module.conv_general_dilated = _with_squares

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.net(images)


def _with_squares(x: jax.Array, kernel: jax.Array, *args, **kwargs) -> jax.Array:
    """A convolution whose kernel's gradient is the sum of the squares of cotangents where x is not zero."""

    plain = lambda x, kernel: lax.conv_general_dilated(x, kernel, *args, **kwargs)
    convolve = jax.custom_vjp(plain)

    def forward(x, kernel):
        return plain(x, kernel), (x, kernel)

    def backward(kept, cotangent):
        x, kernel = kept
        [by_x] = jax.vjp(lambda x: plain(x, kernel), x)[1](cotangent)
        nonzero = (x != 0).astype(x.dtype)
        [by_kernel] = jax.vjp(lambda kernel: plain(nonzero, kernel), kernel)[1](jnp.square(cotangent))
        return by_x, by_kernel

    convolve.defvjp(forward, backward)
    return convolve(x, kernel)


def _normalised(error: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Errors in units of their deviations, scaled to a mean square of one.

    Errors of no variance are left out: where a sum has no terms, algorithms of convolution may leave rounding errors.
    """
    known = variance > 1e-5 * variance.mean()
    normalised = error[known] / np.sqrt(variance[known], dtype=np.float64)
    return normalised / np.sqrt(np.mean(np.square(normalised)))


def _with_bounds(params: nnx.State, bounds: jax.Array) -> nnx.State:
    """The parameters with other bounds, capacities that cannot overflow, and statistics of all values."""
    is_layers = lambda node: isinstance(node, compress.Layers)
    new = {"bound": bounds, "bits_per_value": (None,) * len(bounds), "samples": None}
    replaced = lambda node: dataclasses.replace(node, **new) if is_layers(node) else node
    return jax.tree.map(replaced, params, is_leaf=is_layers)


def _by_name(tree: nnx.State, names: Iterable[str]) -> dict[str, jax.Array]:
    """The leaves whose paths end in these names."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    by_path = {f"/{jax.tree_util.keystr(path, simple=True, separator='/')}": leaf for path, leaf in leaves}
    return {name: next(leaf for path, leaf in by_path.items() if path.endswith(f"/{name}")) for name in names}
