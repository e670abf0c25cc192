"""What kernels do with memory for which Pallas has no words: pairs of neighbouring values as one load or store, and an
addition at once that orders nothing else.

Pallas loads arrays by their own dtype, and its atomic additions wait for all that was written before them and empty the
cache. JAX has no public way to say this: it is said in its own terms, to its backend.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax._src.core import ShapedArray
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith
from jax._src.lib.triton import dialect
from jax._src.pallas.triton import lowering
from jax._src.state.types import ReadEffect, WriteEffect
from jax.extend.core import Primitive
from jaxtyping import Array, Bool, Int32

from memjax.compress._bits import Words


class Rows(NamedTuple):
    """Pairs `start + row * distance`. Multiplied by a constant in 64 bits, the distance takes one instruction a row.

    Attributes:
      start: of 32 threads.
      row: constants.
      distance: of rows.
    """

    start: Int32[Array, "32"]
    row: Int32[Array, "*more"]
    distance: Int32[Array, ""]


def load_pairs(ref, rows: Rows) -> list[Words]:
    """The bits of values 2 i and 2 i + 1, i the index of a pair: in one word if they have 16 each, or else in two."""
    return _load_p.bind(ref, *rows)


def store_pairs(ref, rows: Rows, words: list[Words], live: Array | None = None) -> None:
    """The inverse; only where `live`."""
    _store_p.bind(ref, *rows, *words, *([] if live is None else [live]), masked=live is not None)


def fetch_add(ref, x: Int32[Array, "n"], live: Bool[Array, "n"]) -> Int32[Array, "n"]:
    """`ref[0] += x` by threads that are `live`; for them, the value before."""
    return _fetch_add_p.bind(ref, x, live)


_load_p, _store_p, _fetch_add_p = (Primitive(f"memjax_{name}") for name in ("load_pairs", "store_pairs", "fetch_add"))
_load_p.multiple_results = _store_p.multiple_results = True


@_load_p.def_effectful_abstract_eval
def _(ref, start, row, distance):
    shape = jnp.broadcast_shapes(start.shape, row.shape)
    return [ShapedArray(shape, jnp.dtype(jnp.uint32))] * _words(ref), {ReadEffect(0)}


@_store_p.def_effectful_abstract_eval
def _(ref, start, row, distance, *words, masked):
    return [], {WriteEffect(0)}


@_fetch_add_p.def_effectful_abstract_eval
def _(ref, x, live):
    return ShapedArray(x.shape, x.dtype), {ReadEffect(0), WriteEffect(0)}


def _words(ref) -> int:
    return 2 * ref.dtype.itemsize // 4


def _base(ctx, ref):
    """Where the kernel's part of the array begins: with `vmap`, arrays of all of the batch are one."""
    info = ctx.block_infos[0]
    shape = info.full_shape_dtype.shape
    i64 = ir.IntegerType.get_signless(64)
    for axis, (size, first) in enumerate(zip(info.block_shape, info.start_indices, strict=True)):
        if not isinstance(size, int):  # an axis of the batch
            first = lowering._ir_cast(first, i64, signed=True)
            ref = lowering._add(ref, arith.muli(first, lowering._full(i64, math.prod(shape[axis + 1 :]))))
    return ref


def _pointers(ref, start, row, distance, shape, words: int):
    integer = ir.IntegerType.get_signless(32 * words)
    pointer = dialect.bitcast(dialect.PointerType.get(integer, 1), ref)
    first = lowering._add(lowering._bcast_to(pointer, ir.RankedTensorType(start.type).shape), start)
    return lowering._add(_spread(first, shape), arith.muli(_wide(row, shape), _wide(distance, shape)))


@lowering.register_lowering(_load_p)
def _(ctx, ref, start, row, distance):
    words, shape = _words(ctx.avals_in[0]), ctx.avals_out[0].shape
    start, row, distance = _values(ctx, start, row, distance)
    both = lowering._load(_pointers(_base(ctx, ref), start, row, distance, shape, words))
    if words == 1:
        return [both]
    word = ir.RankedTensorType.get(shape, ir.IntegerType.get_signless(32))
    return [arith.trunci(word, both), arith.trunci(word, arith.shrui(both, lowering._full(both.type, 32)))]


@lowering.register_lowering(_store_p)
def _(ctx, ref, start, row, distance, *words_and_mask, masked):
    shape = ctx.avals_in[4].shape
    start, row, distance = _values(ctx, start, row, distance)
    words = words_and_mask[: _words(ctx.avals_in[0])]
    value = words[0]
    if len(words) == 2:
        low, high = (_wide(word, shape, signed=False) for word in words)
        value = arith.ori(low, arith.shli(high, lowering._full(low.type, 32)))
    pointers = _pointers(_base(ctx, ref), start, row, distance, shape, len(words))
    lowering._store(pointers, value, words_and_mask[-1] if masked else None)
    return []


def _values(ctx, *rows):
    """Not literals."""
    return (lowering._ensure_ir_value(x, aval) for x, aval in zip(rows, ctx.avals_in[1:4], strict=True))


def _wide(x, shape, signed=True):
    """As 64-bit integers."""
    x = _spread(x, shape)
    wide = ir.RankedTensorType.get(shape, ir.IntegerType.get_signless(64))
    return arith.extsi(wide, x) if signed else arith.extui(wide, x)


def _spread(x, shape):
    while isinstance(x.type, ir.RankedTensorType) and len(ir.RankedTensorType(x.type).shape) < len(shape):
        x = lowering._expand_dims(x, 0)
    return lowering._bcast_to(x, shape)


@lowering.register_lowering(_fetch_add_p)
def _(ctx, ref, x, live):
    pointers = lowering._bcast_to(_base(ctx, ref), ir.RankedTensorType(x.type).shape)
    return lowering._atomic_rmw(dialect.RMWOp.ADD, pointers, x, live, semantic=dialect.MemSemantic.RELAXED)
