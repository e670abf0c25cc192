"""Memory operations that Pallas lacks: one load or store for a pair of neighbouring values, and a relaxed atomic addition.

Pallas loads arrays in their dtype, and its atomic additions wait for all earlier stores and empty the cache. JAX has no public
way to do otherwise, so this file adds primitives to its private Triton lowering. They are assembly, because Triton takes seconds
to compile each of its own loads and stores in kernels with many of them.
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

from memjax.compress._codecs.bits import Words


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


def load_words(ref, index: Int32[Array, "*n"], live: Bool[Array, "*n"]) -> Words:
    """`ref[index]` where `live`, elsewhere zero."""
    return _load_words_p.bind(ref, index, live)


def store_words(ref, index: Int32[Array, "*n"], word: Words, live: Bool[Array, "*n"]) -> None:
    """`ref[index] = word` where `live`."""
    _store_words_p.bind(ref, index, word, live)


def prefetch(ref, index: Int32[Array, "*n"]) -> None:
    """Bring `ref[index]` and what is around it nearer, without waiting."""
    _prefetch_p.bind(ref, index)


def fetch_add(ref, x: Int32[Array, "n"], live: Bool[Array, "n"]) -> Int32[Array, "n"]:
    """Atomically `ref[0] += x` in threads that are `live`; returns the value before to them."""
    return _fetch_add_p.bind(ref, x, live)


_load_p, _store_p = Primitive("memjax_load_pairs"), Primitive("memjax_store_pairs")
_load_words_p, _store_words_p = Primitive("memjax_load_words"), Primitive("memjax_store_words")
_prefetch_p, _fetch_add_p = Primitive("memjax_prefetch"), Primitive("memjax_fetch_add")
for _primitive in (_load_p, _store_p, _store_words_p, _prefetch_p):
    _primitive.multiple_results = True


@_load_p.def_effectful_abstract_eval
def _(ref, start, row, distance):
    shape = jnp.broadcast_shapes(start.shape, row.shape)
    return [ShapedArray(shape, jnp.dtype(jnp.uint32))] * _words(ref), {ReadEffect(0)}


@_store_p.def_effectful_abstract_eval
def _(ref, start, row, distance, *words, masked):
    return [], {WriteEffect(0)}


@_load_words_p.def_effectful_abstract_eval
def _(ref, index, live):
    return ShapedArray(index.shape, jnp.dtype(jnp.uint32)), {ReadEffect(0)}


@_store_words_p.def_effectful_abstract_eval
def _(ref, index, word, live):
    return [], {WriteEffect(0)}


@_prefetch_p.def_effectful_abstract_eval
def _(ref, index):
    return [], {ReadEffect(0), WriteEffect(0)}  # or it is left out, for it gives nothing


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
    address = _integers(_pointers(_base(ctx, ref), start, row, distance, shape, words))
    code = ("ld.global.b32 $0, [$1];", "ld.global.v2.b32 {$0, $1}, [$2];")[words - 1]
    loaded = _asm(code, words * "=r," + "l", address, results=words, pure=True)
    return [loaded] if words == 1 else list(loaded)


@lowering.register_lowering(_store_p)
def _(ctx, ref, start, row, distance, *words_and_mask, masked):
    shape = ctx.avals_in[4].shape
    start, row, distance = _values(ctx, start, row, distance)
    words = words_and_mask[: _words(ctx.avals_in[0])]
    address = _integers(_pointers(_base(ctx, ref), start, row, distance, shape, len(words)))
    store = ("st.global.b32 [$1], $2;", "st.global.v2.b32 [$1], {$2, $3};")[len(words) - 1]
    live = [_flags(words_and_mask[-1])] if masked else []
    if masked:
        store = f".reg .pred p; setp.ne.u32 p, ${2 + len(words)}, 0; @p {store}"
    # It has to give something.
    _asm(f"{{ {store} mov.u32 $0, 0; }}", "=r,l" + ",r" * (len(words) + masked), address, *words, *live, pure=False)
    return []


def _values(ctx, *rows):
    """The values of operands, some of which may be literals."""
    return (lowering._ensure_ir_value(x, aval) for x, aval in zip(rows, ctx.avals_in[1:4], strict=True))


def _wide(x, shape):
    """As 64-bit integers."""
    wide = ir.RankedTensorType.get(shape, ir.IntegerType.get_signless(64))
    return arith.extsi(wide, _spread(x, shape))


def _spread(x, shape):
    while isinstance(x.type, ir.RankedTensorType) and len(ir.RankedTensorType(x.type).shape) < len(shape):
        x = lowering._expand_dims(x, 0)
    return lowering._bcast_to(x, shape)


@lowering.register_lowering(_load_words_p)
def _(ctx, ref, index, live):
    code = "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.u32 $0, 0; @p ld.global.b32 $0, [$1]; }"
    return _asm(code, "=r,l,r", _addresses(ctx, ref, index), _flags(live), pure=True)


@lowering.register_lowering(_store_words_p)
def _(ctx, ref, index, word, live):
    code = "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p st.global.b32 [$1], $2; mov.u32 $0, 0; }"
    _asm(code, "=r,l,r,r", _addresses(ctx, ref, index), word, _flags(live), pure=False)
    return []


@lowering.register_lowering(_prefetch_p)
def _(ctx, ref, index):
    _asm("{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", _addresses(ctx, ref, index), pure=False)
    return []


def _addresses(ctx, ref, index):
    return _integers(lowering._add(lowering._bcast_to(_base(ctx, ref), ir.RankedTensorType(index.type).shape), index))


def _integers(pointers):
    shape = ir.RankedTensorType(pointers.type).shape
    return dialect.ptr_to_int(ir.RankedTensorType.get(shape, ir.IntegerType.get_signless(64)), pointers)


def _flags(live):
    word = ir.IntegerType.get_signless(32)
    return arith.extui(ir.RankedTensorType.get(ir.RankedTensorType(live.type).shape, word), live)


def _asm(code, constraints, *args, results=1, pure):
    word = ir.IntegerType.get_signless(32)
    out = [ir.RankedTensorType.get(ir.RankedTensorType(args[0].type).shape, word)] * results
    return dialect.elementwise_inline_asm(out, code, constraints=constraints, pure=pure, packed_element=1, args=args)


@lowering.register_lowering(_fetch_add_p)
def _(ctx, ref, x, live):
    pointers = lowering._bcast_to(_base(ctx, ref), ir.RankedTensorType(x.type).shape)
    return lowering._atomic_rmw(dialect.RMWOp.ADD, pointers, x, live, semantic=dialect.MemSemantic.RELAXED)
