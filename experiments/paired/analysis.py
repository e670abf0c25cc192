"""What compression does to the gradients and the memory of one model: errors by layer, predicted and measured, and bytes.

The prediction knows the codec's steps alone: errors of decoded values are uniform in a step, and independent of each other and
of the values. Random ones, with the steps of 8 bits, are added to what is encoded; the change of each gradient, times the ratio
of steps, is the prediction for every number of bits. It holds if the codec's errors are that random, and gradients are linear in
them.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.harness import files
from experiments.harness.step import Batch, Loss
from experiments.paired.members import PLAIN, codec_of, kind_name, with_codec
from memjax import compress

_PROBE = 8  # bits
_DRAWS = 4  # of random errors, for each batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RandomErrors:
    """A codec that saves nothing: adds random errors, uniform in the steps of `PositionQuantized(bits)`."""

    seed: Any
    bits: int = dataclasses.field(metadata={"static": True})

    def encode(self, x: jax.Array) -> jax.Array:
        checksum = jnp.sum(jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32), dtype=jnp.uint32)
        key = jax.random.fold_in(jax.random.key(self.seed), checksum)
        steps = compress.PositionQuantized(self.bits).steps(x)
        return x + (steps * (jax.random.uniform(key, x.shape) - 0.5)).astype(x.dtype)

    def decode(self, code: jax.Array) -> jax.Array:
        return code

    def nbytes(self, aval: Any) -> int:
        return compress.PositionQuantized(self.bits).nbytes(aval)


def errors(
    make: Callable[[], nnx.Module], params: nnx.State, loss: Loss, kinds: Sequence[int], batches: Iterable[Batch]
) -> list[dict]:
    """A row for each layer inside a block and each kind: the relative error of its gradient, predicted and measured.

    Errors are root mean squares over batches, in units of the gradient's norm, of a layer's kernel and bias together.

    Args:
      make: the model without compression, of float32.
      params: its parameters.
      loss: of training.
      kinds: numbers of bits.
      batches: some to take gradients of.
    """

    def gradient(make_codec: Callable[[Any], Any]) -> Callable[..., Any]:
        def mean_loss(params, batch, seed):
            graph = nnx.graphdef(nnx.eval_shape(lambda: with_codec(make(), make_codec(seed))))
            sums = loss(nnx.merge(graph, params), batch)
            return sums["loss"] / sums["count"]

        return jax.jit(jax.grad(mean_loss))

    lossy = [bits for bits in kinds if bits != PLAIN]
    plain = gradient(lambda seed: None)
    ways = {bits: gradient(functools.partial(_codec_of_seed, bits)) for bits in lossy}
    ways[PLAIN] = gradient(lambda seed: RandomErrors(seed, _PROBE))
    squares: dict[tuple[str, int], float] = {}
    norms: dict[str, float] = {}
    with jax.default_matmul_precision("highest"):  # GPUs round otherwise, and that adds up, too
        for batch in batches:
            exact = _by_layer(plain(params, batch, 0))
            for name, value in exact.items():
                norms[name] = norms.get(name, 0) + float(np.sum(value**2))
            for way, of_way in ways.items():
                draws = range(_DRAWS if way == PLAIN else 1)
                for draw in draws:
                    for name, value in _by_layer(of_way(params, batch, draw)).items():
                        error = float(np.sum((value - exact[name]) ** 2)) / len(draws)
                        squares[name, way] = squares.get((name, way), 0) + error
    rows = []
    for name, norm in norms.items():
        if "blocks" in name and norm > 0:
            for bits in lossy:
                probe, measured = ((squares[name, way] / norm) ** 0.5 for way in (PLAIN, bits))
                predicted = probe * (2**_PROBE - 1) / (2**bits - 1)
                rows.append({"layer": name, "bits": bits, "predicted": predicted, "measured": measured})
    return rows


def _codec_of_seed(bits: int, seed: Any) -> compress.Codec | None:
    return codec_of(bits)


def _by_layer(gradient: Any) -> dict[str, np.ndarray]:
    """The gradient of each layer as one vector."""
    leaves: dict[str, list[np.ndarray]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value").rpartition("/")[0]
        leaves.setdefault(name, []).append(np.asarray(leaf, np.float64).ravel())
    return {name: np.concatenate(of_layer) for name, of_layer in leaves.items()}


def kept_bytes(make: Callable[[], Any], kinds: Sequence[int], x: jax.ShapeDtypeStruct) -> list[dict]:
    """A row for each kind and block: bytes that the block keeps for its backward pass, parameters left out.

    Args:
      make: the model.
      kinds: numbers of bits.
      x: what a block reads.
    """
    rows = []
    for bits in kinds:
        model: Any = nnx.eval_shape(lambda bits=bits: with_codec(make(), codec_of(bits)))
        for i, block in enumerate(model.blocks):
            graph, params = nnx.split(block)
            residuals = jax.eval_shape(
                lambda params, x, graph=graph: jax.vjp(nnx.merge(graph, params), x)[1], params, x
            )
            own = {leaf.shape for leaf in jax.tree.leaves(params)}
            kept = [leaf for leaf in jax.tree.leaves(residuals) if leaf.shape not in own]
            rows.append({"kind": kind_name(bits), "block": i, "bytes": sum(a.size * a.dtype.itemsize for a in kept)})
    return rows


def save(folder: Path, errors: list[dict], kept: list[dict]) -> None:
    files.write_text(folder / "analysis.json", json.dumps({"errors": errors, "bytes": kept}) + "\n")
