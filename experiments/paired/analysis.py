"""What compression does to the gradients and the memory of one model: errors by layer, predicted and measured, and bytes.

The prediction knows the codec's steps alone: errors of decoded values are uniform in a step, and independent of each other and
of the values (`Errors`, which stand for bits).

Both are means over many draws of the errors. After training a few examples carry most of a gradient, and in a batch that holds
one, an error is a single random number times what that example adds: draws of one batch differ by six times, and one draw for
each of 16 batches was off by up to half. Predictions then look wrong in many layers at once, for they share the example.
"""

import concurrent.futures
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import memjax
from experiments.harness import files
from experiments.harness.console import output
from experiments.harness.loop.progress import waiting
from experiments.harness.loop.step import Batch, Loss
from experiments.paired.fitted import sigma_gradient
from experiments.paired.members import PLAIN, is_sigma, kind_name, with_bits
from memjax import compress
from memjax.compress._training.array_bits import Errors  # private: no user of the library asks for errors without codes

_DRAWS = 8  # of errors, for each batch
_OPTIONS = {"gpu": {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}}


def errors(
    make: Callable[[], Any], params: nnx.State, loss: Loss, kinds: Sequence[float], batches: Sequence[Batch]
) -> list[dict]:
    """A row for each layer inside a block and each kind: the relative error of its gradient, predicted and measured.

    Errors are root mean squares over batches and draws, in units of the gradient's norm, of a layer's kernel and bias together.

    Args:
      make: the model without compression, of float32.
      params: its parameters.
      loss: of training.
      kinds: numbers of bits, and a sigma: its bits are chosen with the first batch.
      batches: some to take gradients of.
    """

    def gradient(wrap: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def mean_loss(params, batch, seed):
            graph = nnx.graphdef(nnx.eval_shape(lambda: wrap(make(), seed)))
            sums = loss(nnx.merge(graph, params), batch)
            return sums["loss"] / sums["count"]

        return jax.grad(mean_loss)

    def error(wrap: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        of = gradient(wrap)

        def mean_squares(params, batch, exact):
            def squares(draw):
                return _squares(jax.tree.map(jnp.subtract, of(params, _reordered(batch, draw), draw), exact))

            return jax.tree.map(lambda of_draws: jnp.mean(of_draws, 0), jax.lax.map(squares, jnp.arange(_DRAWS)))

        return mean_squares

    def with_norms(params, batch):
        exact = gradient(lambda model, seed: model)(params, batch, 0)
        return exact, _squares(exact)

    lossy = [bits for bits in kinds if bits != PLAIN]
    ways = {}
    for bits in lossy:
        of_blocks = _fitted(make, params, loss, bits, batches[0]) if is_sigma(bits) else [bits] * len(make().blocks)
        ways[bits, "measured"] = error(functools.partial(_with_codes, of_blocks))
        ways[bits, "predicted"] = error(functools.partial(_with_errors, of_blocks))
    console = output()
    with waiting(console, "Compiling errors of gradients"):
        plain, *others = _compiled(
            [(with_norms, (params, batches[0]))] + [(of_way, (params, batches[0], params)) for of_way in ways.values()]
        )
    sums: Any = None
    with waiting(console, f"Errors of gradients of {len(batches)} batches, {_DRAWS} draws of each"):
        for batch in batches:
            exact, norms = plain(params, batch)
            found = norms, {way: of_way(params, batch, exact) for way, of_way in zip(ways, others, strict=True)}
            sums = found if sums is None else jax.tree.map(jnp.add, sums, found)
        norms, squares = jax.device_get(sums)
    return [
        {"layer": name, "bits": bits}
        | {way: (float(squares[bits, way][name]) / float(norm)) ** 0.5 for way in ("predicted", "measured")}
        for name, norm in norms.items()
        if "blocks" in name and norm > 0
        for bits in lossy
    ]


def _compiled(programs: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Callable[..., Any]]:
    """Functions, compiled at the same time for these arguments.

    XLA:GPU would try many kernels for each product, and those that do not round float32 take seconds each to compile.
    """
    # GPUs round what products read to fewer bits otherwise, and that adds up, too.
    with jax.default_matmul_precision("highest"):
        lowered = [jax.jit(function).lower(*args) for function, args in programs]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(lambda one: one.compile(compiler_options=_OPTIONS.get(jax.default_backend())), lowered))


def _fitted(make: Callable[[], Any], params: nnx.State, loss: Loss, sigma: float, batch: Batch) -> Sequence[Any]:
    """Bits for each array of each block."""
    parts = len(make().blocks)
    return compress.fit_bits(sigma_gradient(make, loss, sigma), params, batch, sigma=sigma, parts=parts).bits


def _with_codes(of_blocks: Sequence[Any], model: Any, seed: Any) -> Any:
    pairs = zip(model.blocks, of_blocks, strict=True)
    model.blocks = nnx.List([memjax.compressed(block, bits=bits) for block, bits in pairs])
    return model


def _with_errors(of_blocks: Sequence[Any], model: Any, seed: Any) -> Any:
    def wrapped(block, bits):
        if isinstance(bits, compress.ArrayBits):
            return memjax.compressed(block, bits=bits.errors(seed))
        errors: Any = Errors(bits, seed=seed)
        return memjax.compressed(block, bits=errors)

    model.blocks = nnx.List([wrapped(*pair) for pair in zip(model.blocks, of_blocks, strict=True)])
    return model


def _reordered(batch: Batch, by: Any) -> Batch:
    """The same examples, so many places further. The gradient stays; dither, which depends on places, meets other values."""
    return jax.tree.map(lambda x: jnp.roll(x, by, 0), batch)


def _squares(gradient: Any) -> dict[str, Any]:
    """The sum of the squares of each layer's gradient."""
    layers: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value").rpartition("/")[0]
        layers[name] = layers.get(name, 0) + jnp.sum(leaf.astype(jnp.float32) ** 2)
    return layers


def kept_bytes(
    make: Callable[[], Any], kinds: Sequence[float], x: jax.ShapeDtypeStruct, of_blocks: Sequence[Any] = ()
) -> list[dict]:
    """A row for each kind and block: bytes that the block keeps for its backward pass, parameters left out.

    Args:
      make: the model.
      kinds: numbers of bits, and a sigma.
      x: what a block reads.
      of_blocks: bits for each array of each block, those of the sigma.
    """
    rows = []
    for bits in kinds:
        model: Any = nnx.eval_shape(lambda bits=bits: with_bits(make(), bits, of_blocks))
        for i, block in enumerate(model.blocks):
            graph, params = nnx.split(block)
            residuals = jax.eval_shape(
                lambda params, x, graph=graph: jax.vjp(lambda p, x: nnx.merge(graph, p)(x), params, x)[1], params, x
            )
            own = {leaf.shape for leaf in jax.tree.leaves(params)}
            kept = [leaf for leaf in jax.tree.leaves(residuals) if leaf.shape not in own]
            rows.append({"kind": kind_name(bits), "block": i, "bytes": sum(a.size * a.dtype.itemsize for a in kept)})
    return rows


def save(folder: Path, errors: list[dict], kept: list[dict]) -> None:
    files.write_text(folder / "analysis.json", json.dumps({"errors": errors, "bytes": kept}) + "\n")
