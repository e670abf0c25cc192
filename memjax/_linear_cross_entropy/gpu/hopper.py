"""Both algorithms on Hopper GPUs, by three matmuls that also do what takes passes over memory elsewhere.

Logits are turned into statistics, or into their gradient, in the matmul that makes them (`mosaic_logits`). The other
two read windows of the head and write into dx and dW in place, where XLA would copy a slice in and a slice out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl

from memjax._core.arrays import vary, varying_axes
from memjax._linear_cross_entropy.gpu import mosaic_logits
from memjax._linear_cross_entropy.gpu.mosaic_matmul import (
    ALIGNMENT,
    Operand,
    Tile,
    Tiling,
    fullest,
    matmul,
    staging,
    store,
)
from memjax._linear_cross_entropy.options import Array, Operands, Options, columns
from memjax._linear_cross_entropy.rows import Stats

_LEAST = 256  # of every dimension: a tile


def unsuited(operands: Operands, options: Options) -> str | None:
    """Why these kernels do not apply, or None."""
    (tokens, dim), width = operands.x.shape, columns(operands, options)
    if operands.x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, and x is {operands.x.dtype}"
    if operands.targets is not None:
        return "it takes integer labels, not soft targets"
    if operands.class_weights is not None:
        return "it takes no class weights beside smoothing or a z-loss"
    if dim % ALIGNMENT or width % ALIGNMENT:
        return f"it needs D and V, here and on each device, that {ALIGNMENT} divides, got D = {dim} and V = {width}"
    if min(tokens, dim, width) < _LEAST:
        return f"it needs at least {_LEAST} tokens, D and V, got {tokens}, {dim} and {width}"
    return None


def statistics(operands: Operands, labels: Array, options: Options) -> Stats:
    """Row statistics over this device's columns, from the first of which `labels` count."""

    def call(operands: Operands) -> Stats:
        stats = mosaic_logits.statistics(_whole_rows(operands), options)
        return jax.tree.map(lambda a: a[: operands.x.shape[0]], stats)

    return _launch(call, operands, labels, options)


def logit_gradient(
    operands: Operands, labels: Array, lse: Array, scale: Array, start: Any, size: int, options: Options
) -> Array:
    """`scale` times the gradient in `size` columns of the products from `start` on, in x's dtype."""

    def call(operands: Operands, lse: Array, scale: Array, start: Array) -> Array:
        tokens = operands.x.shape[0]
        operands = _whole_rows(operands)
        lse, scale = (jnp.pad(a, (0, operands.x.shape[0] - tokens)) for a in (lse, scale))
        return mosaic_logits.logit_gradient(operands, lse, scale, start, size, options)[:tokens]

    return _launch(call, operands, labels, options, lse, scale, jnp.asarray(start, jnp.int32))


def gradients(
    operands: Operands, labels: Array, lse: Array, cotangent: Array, options: Options, wanted: frozenset[str]
) -> dict[str, Array]:
    """Gradients of sum(cotangent * losses), of those of "x", "w" and "bias" that are wanted, in chunks of the vocabulary.

    Not inside a `shard_map` that tracks what differs between devices: there kernels cannot write in place.
    """

    def call(operands: Operands, lse: Array, cotangent: Array) -> dict[str, Array]:
        return _gradients(operands, lse, cotangent, options, wanted)

    return _launch(call, operands, labels, options, lse, cotangent)


def _launch(call: Callable[..., Any], operands: Operands, labels: Array, options: Options, *arrays: Array) -> Any:
    """Runs `call`; under `vmap` one example after another, since kernels know only matrices."""
    # The last tile reaches over the last column, where another device's labels must not be found.
    labels = jnp.where(labels < columns(operands, options), labels, -1)
    out = sequential_vmap(call)(operands._replace(labels=labels, scale=None), *arrays)
    return vary(out, varying_axes(operands.x))


def _whole_rows(operands: Operands) -> Operands:
    """The operands with a multiple of eight rows, as the copy engine moves eight at a time."""
    missing = -operands.x.shape[0] % 8
    x = jnp.pad(operands.x, ((0, missing), (0, 0)))
    return operands._replace(x=x, labels=jnp.pad(operands.labels, (0, missing), constant_values=-1))


def _gradients(
    operands: Operands, lse: Array, cotangent: Array, options: Options, wanted: frozenset[str]
) -> dict[str, Array]:
    tokens = operands.x.shape[0]
    operands = _whole_rows(operands)
    x, w, bias = operands.x, operands.w, operands.bias
    width = columns(operands, options)
    # Relative to the largest cotangent until the end: 1 / N would round, or vanish in float16.
    norm = jnp.abs(cotangent).max()
    scale = cotangent / jnp.where(norm == 0, 1.0, norm)
    lse, scale = (jnp.pad(a, (0, x.shape[0] - tokens)) for a in (lse, scale))
    dx = dw = db = None
    if "x" in wanted:
        dx = jax.new_ref(jnp.zeros(x.shape, jnp.float32))
    if "w" in wanted:
        dw = jax.new_ref(lax.empty(w.shape, w.dtype))
    if "bias" in wanted and bias is not None:
        db = jax.new_ref(jnp.zeros(bias.shape, bias.dtype))

    def one_chunk(start: Any, size: int) -> None:
        d = mosaic_logits.logit_gradient(operands, lse, scale, start, size, options)
        if dw is not None:
            _write_head_gradient(dw, d, x, norm, start, options)
        if dx is not None:
            _add_input_gradient(dx, d, operands, start, options)
        if db is not None:
            db[pl.ds(start, size)] = (d.sum(0, dtype=jnp.float32) * norm).astype(db.dtype)

    # In rising order: the last tiles of a chunk reach into the next one, which overwrites what they leave there.
    size = vocabulary_chunk(operands, options)
    lax.fori_loop(0, width // size, lambda i, _: one_chunk(i * size, size), None)
    if width % size:
        one_chunk(width // size * size, width % size)
    grads = {}
    if dx is not None:
        grads["x"] = (jax.freeze(dx)[:tokens] * norm).astype(x.dtype)
    if dw is not None:
        grads["w"] = jax.freeze(dw)
    if db is not None:
        grads["bias"] = jax.freeze(db)
    return grads


def vocabulary_chunk(operands: Operands, options: Options) -> int:
    """Entries of the vocabulary per chunk: at most `chunk` or, by default, 8 D bytes of logits a token, so that they
    take at most twice the float32 gradient of x, but 1024; of those sizes that divide into tiles the largest, by
    default the one that leaves the least of the GPU idle."""
    width = columns(operands, options)
    tokens, dim = operands.x.shape
    most = options.chunk or max(8 * dim // operands.x.dtype.itemsize, 1024)
    # The copy engine does not write arrays of 64 columns, so none may be left over.
    sizes = [s for s in range(2 * ALIGNMENT, width + 1, ALIGNMENT) if width % s != ALIGNMENT]
    fitting = [s for s in sizes if s <= most] or sizes[:1]
    if options.chunk is not None:
        return fitting[-1]

    def fill(size: int) -> float:
        return fullest(size, dim).fill(size, dim) * Tiling().fill(tokens, size)

    return max((s for s in fitting if 2 * s > most or s == fitting[-1]), key=fill)


def _add_input_gradient(dx: Any, d: Array, operands: Operands, start: Any, options: Options) -> None:
    """dx += d w, over the chunk."""
    tokens, dim = dx.shape
    tiling = fullest(tokens, dim)

    def epilogue(products: Array, tile: Tile, inputs: Any, outputs: Any, scratch: Any) -> None:
        store(lambda first: products[:, first : first + 32], inputs[0], tile, tiling, *scratch, add=True)

    matmul(
        Operand(d, 1),
        mosaic_logits.head(operands, options, contract_vocabulary=True),
        epilogue,
        shape=(tokens, dim, d.shape[1]),
        start=start,
        inputs=[dx],
        scratch=[staging(dx.dtype, tiling)],
        tiling=tiling,
    )


def _write_head_gradient(dw: Any, d: Array, x: Array, norm: Array, start: Any, options: Options) -> None:
    """The chunk's part of dW = norm d^T x, stored as the head is."""
    by_row = options.layout == "vd"
    a, b = (d, x) if by_row else (x, d)
    tiling = fullest(a.shape[1], b.shape[1])
    width = 128 // dw.dtype.itemsize

    def epilogue(products: Array, tile: Tile, inputs: Any, outputs: Any, scratch: Any) -> None:
        out, norm = inputs
        factor = norm[0]
        if by_row:
            tile = tile._replace(row=pl.multiple_of(tile.start + tile.row, ALIGNMENT))
        else:
            tile = tile._replace(column=pl.multiple_of(tile.start + tile.column, ALIGNMENT))
        store(lambda first: products[:, first : first + width] * factor, out, tile, tiling, *scratch)

    matmul(
        Operand(a, 0),
        Operand(b, 0),
        epilogue,
        shape=(a.shape[1], b.shape[1], x.shape[0]),
        start=start,
        inputs=[dw, norm.astype(jnp.float32).reshape(1)],
        scratch=[staging(dw.dtype, tiling)],
        tiling=tiling,
    )
