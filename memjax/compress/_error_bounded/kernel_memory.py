"""Memory operations that Pallas lacks: one load or store for a pair of neighbouring values, and a relaxed atomic addition.

Pallas loads arrays in their dtype, and its atomic additions wait for all earlier stores and empty the cache. JAX has no public
way to do otherwise, so this file adds primitives to its private Triton lowering. They are assembly, because Triton takes seconds
to compile each of its own loads and stores in kernels with many of them.
"""

import math
from typing import Any, NamedTuple

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
    """Pairs `start + row * distance`. Multiplied by a constant in 64 bits, the distance takes one instruction a row."""

    start: Int32[Array, "32"]
    row: Int32[Array, "*more"]
    distance: Int32[Array, ""]


def load_pairs(ref, rows: Rows) -> list[Words]:
    """The bits of values 2 i and 2 i + 1, i the index of a pair: in one word if they have 16 each, or else in two."""
    words = _words(ref)
    code = ("ld.global.b32 $0, [$1];", "ld.global.v2.b32 {$0, $1}, [$2];")[words - 1]
    return _access_p.bind(ref, *rows, code=code, results=words, effects=(ReadEffect,), in_rows=True)


def store_pairs(ref, rows: Rows, words: list[Words], live: Array | None = None) -> None:
    """The inverse; only where `live`."""
    code = ("st.global.b32 [$1], $2;", "st.global.v2.b32 [$1], {$2, $3};")[len(words) - 1]
    operands = words if live is None else [*words, live]
    if live is not None:
        code = f".reg .pred p; setp.ne.u32 p, ${2 + len(words)}, 0; @p {code}"
    code = f"{{ {code} mov.u32 $0, 0; }}"
    _access_p.bind(ref, *rows, *operands, code=code, results=0, effects=(WriteEffect,), in_rows=True)


def load_words(ref, index: Int32[Array, "*n"], live: Bool[Array, "*n"]) -> Words:
    """`ref[index]` where `live`, elsewhere zero."""
    code = "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.u32 $0, 0; @p ld.global.b32 $0, [$1]; }"
    return _access_p.bind(ref, index, live, code=code, results=1, effects=(ReadEffect,), in_rows=False)[0]


def store_words(ref, index: Int32[Array, "*n"], word: Words, live: Bool[Array, "*n"]) -> None:
    """`ref[index] = word` where `live`."""
    code = "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p st.global.b32 [$1], $2; mov.u32 $0, 0; }"
    _access_p.bind(ref, index, word, live, code=code, results=0, effects=(WriteEffect,), in_rows=False)


def prefetch(ref, index: Int32[Array, "*n"]) -> None:
    """Bring `ref[index]` and what is around it nearer, without waiting."""
    code = "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }"
    # With an effect of a store, or it is left out, for it gives nothing.
    _access_p.bind(ref, index, code=code, results=0, effects=(ReadEffect, WriteEffect), in_rows=False)


def fetch_add(ref, x: Int32[Array, "n"], live: Bool[Array, "n"]) -> Int32[Array, "n"]:
    """Atomically `ref[0] += x` in threads that are `live`; returns the value before to them."""
    return _fetch_add_p.bind(ref, x, live)


# Runs `code` in each thread. $0 is the first of `results` words, or a word that is not used; behind the results come the address
# and the other operands. The first operands say where: three of `Rows`, or an index.
_access_p, _fetch_add_p = Primitive("memjax_access"), Primitive("memjax_fetch_add")
_access_p.multiple_results = True


def _split(operands, in_rows):
    """The operands that say where, and the others."""
    count = 3 if in_rows else 1
    return operands[:count], operands[count:]


@_access_p.def_effectful_abstract_eval
def _(ref, *operands, code, results, effects, in_rows):
    shape = jnp.broadcast_shapes(*(x.shape for x in _split(operands, in_rows)[0]))
    return [ShapedArray(shape, jnp.dtype(jnp.uint32))] * results, {effect(0) for effect in effects}


@lowering.register_lowering(_access_p)
def _(ctx, ref, *operands, code, results, effects, in_rows):
    avals = ctx.avals_in[1:]
    values = [lowering._ensure_ir_value(x, aval) for x, aval in zip(operands, avals, strict=True)]
    place, others = _split(values, in_rows)
    base, shape = _base(ctx, ref), jnp.broadcast_shapes(*(aval.shape for aval in _split(avals, in_rows)[0]))
    if in_rows:
        start, row, distance = place
        pointers = _pointers(base, start, row, distance, shape, _words(ctx.avals_in[0]))
    else:
        pointers = lowering._add(lowering._bcast_to(base, shape), place[0])
    address = _integers(pointers)
    is_flag = [aval.dtype == jnp.bool_ for aval in _split(avals, in_rows)[1]]
    words = [_flags(x) if flag else x for x, flag in zip(others, is_flag, strict=True)]
    out_types = [ir.RankedTensorType.get(shape, ir.IntegerType.get_signless(32))] * max(results, 1)
    constraints = "=r," * len(out_types) + "l" + ",r" * len(words)
    is_pure, args = WriteEffect not in effects, [address, *words]
    out: Any = dialect.elementwise_inline_asm(
        out_types, code, constraints=constraints, pure=is_pure, packed_element=1, args=args
    )
    return [] if results == 0 else [out] if results == 1 else list(out)


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


def _wide(x, shape):
    """`x` as 64-bit integers, broadcast to `shape`."""
    wide = ir.RankedTensorType.get(shape, ir.IntegerType.get_signless(64))
    return arith.extsi(wide, _spread(x, shape))


def _spread(x, shape):
    while isinstance(x.type, ir.RankedTensorType) and len(ir.RankedTensorType(x.type).shape) < len(shape):
        x = lowering._expand_dims(x, 0)
    return lowering._bcast_to(x, shape)


def _integers(pointers):
    shape = ir.RankedTensorType(pointers.type).shape
    return dialect.ptr_to_int(ir.RankedTensorType.get(shape, ir.IntegerType.get_signless(64)), pointers)


def _flags(live):
    word = ir.IntegerType.get_signless(32)
    return arith.extui(ir.RankedTensorType.get(ir.RankedTensorType(live.type).shape, word), live)


@lowering.register_lowering(_fetch_add_p)
def _(ctx, ref, x, live):
    pointers = lowering._bcast_to(_base(ctx, ref), ir.RankedTensorType(x.type).shape)
    return lowering._atomic_rmw(dialect.RMWOp.ADD, pointers, x, live, semantic=dialect.MemSemantic.RELAXED)
