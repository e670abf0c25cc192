"""Arrays of optimizer state as small floats of 8 or 4 bits, with a power of two for each block of neighbours.

A block has a unit, a power of two, such that its largest magnitude is a little below the largest code. Codes count units:

with signs: 1 bit of sign, 3 of exponent, 4 of mantissa (of 4 bits: 1, 2, 1), and gradual underflow as of IEEE floats: below one
  unit steps are equal, and the least is 2^-10.95 of the largest code (4 bits: 2^-3.58). Zero is zero.
without, for what is never negative, and divided by: mantissas of 4 bits in the upper 8 octaves and of 3 in the 16 below (4
  bits: 1 in the upper 4, none in the 7 below). Zero is zero, but nothing else becomes zero: what is less than the least code,
  about 2^-24 of the largest (2^-10.6), becomes that.

The second's range is twice the first's on a logarithmic scale, as that of a square should be. So where the least code of a
momentum appears at random, it is not divided by the root of something much less than its own square.

Rounding is at random between neighbours, by place and step, with probabilities that make it right on average. Codes that are
decoded and encoded again stay, whatever the new unit, as long as it is not larger: all grids of smaller units contain them.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt8, UInt32

from memjax.compress._codecs.bits import u32
from memjax.compress._state.noise import random_bits

BLOCK = 32  # values with one unit, or a few more
_MANTISSA = {8: 4, 4: 1}
_NOT_FINITE = 255  # as an exponent
_INFINITY = 0x7F800000  # its bits
_LEAST_EXPONENT = 48  # of a block, biased: units of all codes are normal numbers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coded:
    """An array in codes. Blocks lie along the last axis with 32 values or more; the other axes are those of the array.

    Attributes:
      codes: of the array's shape; of 4 bits, two in a byte: the first half of a block in the lower bits.
      exponents: of the largest magnitude in each block, biased as float32's are; 255: not all of it is finite.
      shape: of the array.
      dtype: of the array.
      bits: 8 or 4.
      signed: which of the two codes.
    """

    codes: UInt8[Array, "..."]
    exponents: UInt8[Array, "..."]
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    bits: int = dataclasses.field(metadata={"static": True})
    signed: bool = dataclasses.field(metadata={"static": True})


def block_axis(shape: tuple[int, ...]) -> int | None:
    """The axis along which blocks lie; None: no axis is long enough."""
    return next((axis for axis in reversed(range(len(shape))) if shape[axis] >= BLOCK), None)


def encode(x: Float[Array, "..."], step: Int32[Array, ""], *, bits: int, signed: bool, salt: int = 0) -> Coded:
    """The code of an array with an axis of 32 values or more. `step` and `salt` choose how values are rounded."""
    axis = block_axis(x.shape)
    assert axis is not None
    count, size = _blocks(x.shape[axis])
    wide = x.astype(jnp.float32)
    if count * size > x.shape[axis]:
        wide = jnp.pad(wide, [(0, count * size - n if i == axis else 0) for i, n in enumerate(x.shape)])
    wide = wide.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    # The largest of the bits as integers: a maximum of floats may lose a NaN, whose bits are larger than infinity's.
    largest = jnp.max(_as_bits(jnp.abs(wide)), axis + 1, keepdims=True)
    mantissa = _MANTISSA[bits]
    # Rounded up where the mantissa is more than that of the largest code.
    exponent = (largest + u32(2 ** (23 - mantissa) - 1)) >> u32(23)
    exponent = jnp.clip(exponent, u32(_LEAST_EXPONENT), u32(254))
    to_units = _as_float((u32(254 + _top(bits, signed)) - exponent) << u32(23))
    # The halves of 4 bits are computed apart: of levels that were cut, the compiler would write all, 4 bytes each.
    parts = jnp.split(wide, 8 // bits, axis + 1)
    level = u32(0)
    for i, part in enumerate(parts):
        noise = random_bits(part.shape, step, 2 * salt + i)
        in_units = jnp.abs(part) * to_units
        if signed:
            levels = _with_underflow(in_units, noise, bits) | (u32(part < 0) << u32(bits - 1))
        else:
            levels = jnp.where(part > 0, _tapered(in_units, noise, bits), u32(0))
        level = level | (levels << u32(4 * i))
    codes = level.astype(jnp.uint8).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])
    if bits == 8 and count * size > x.shape[axis]:
        codes = lax.slice_in_dim(codes, 0, x.shape[axis], axis=axis)
    exponents = jnp.squeeze(jnp.where(largest < _INFINITY, exponent, u32(_NOT_FINITE)).astype(jnp.uint8), axis + 1)
    return Coded(codes, exponents, x.shape, jnp.dtype(x.dtype), bits, signed)


def decode(code: Coded) -> Float[Array, "..."]:
    """The array, in its dtype. Blocks in which something was not finite are NaN."""
    axis, bits = block_axis(code.shape), code.bits
    assert axis is not None
    length = code.shape[axis]
    count, size = _blocks(length)
    codes = code.codes
    if bits == 8 and count * size > length:
        codes = jnp.pad(codes, [(0, count * size - n if i == axis else 0) for i, n in enumerate(code.shape)])
    level = u32(codes.reshape(*code.shape[:axis], count, -1, *code.shape[axis + 1 :]))
    if bits == 4:
        shifts = jnp.expand_dims(u32(jnp.array([0, 4])), tuple(range(1, level.ndim - axis)))
        level = (jnp.expand_dims(level, axis + 1) >> shifts) & u32(15)
        level = level.reshape(*code.shape[:axis], count, size, *code.shape[axis + 1 :])
    exponent = jnp.expand_dims(u32(code.exponents), axis + 1)
    unit = _as_float((exponent - u32(_top(bits, code.signed))) << u32(23))
    unit = jnp.where(exponent == _NOT_FINITE, jnp.nan, unit)
    value = (_of_underflow if code.signed else _of_tapered)(level, bits) * unit
    value = value.reshape(*code.shape[:axis], count * size, *code.shape[axis + 1 :])
    return lax.slice_in_dim(value, 0, length, axis=axis).astype(code.dtype)


def _blocks(length: int) -> tuple[int, int]:
    """How many blocks an axis has, and their size: 32, or a little more if that does not divide, and even."""
    size = math.ceil(length / max(1, length // BLOCK))
    size += size % 2
    return math.ceil(length / size), size


def _top(bits: int, signed: bool) -> int:
    """The exponent of the largest code, in units."""
    if signed:
        return (2 ** (bits - 1) >> _MANTISSA[bits]) - 2
    return _low_octaves(bits) + (2 ** (bits - 1) >> _MANTISSA[bits]) - 1


def _low_octaves(bits: int) -> int:
    """How many octaves have the shorter mantissas."""
    return 2 ** (bits - 1) >> (_MANTISSA[bits] - 1)


# Codes count the numbers of a grid. Between powers of two these are floats with fewer digits, so that a code is what is left of
# a float's bits, and rounding at random is to add random digits before the last ones are dropped.


def _with_underflow(x: Float32[Array, "..."], noise: UInt32[Array, "..."], bits: int) -> UInt32[Array, "..."]:
    """Levels with steps of 2^-mantissa below 1. Adding 1 there makes floats of equal steps."""
    mantissa = _MANTISSA[bits]
    small = x < 1
    level = _rounded(jnp.where(small, x + 1, x), noise, mantissa) - u32(127 << mantissa)
    return jnp.minimum(level + jnp.where(small, u32(0), u32(1 << mantissa)), u32(2 ** (bits - 1) - 1))


def _of_underflow(level: UInt32[Array, "..."], bits: int) -> Float32[Array, "..."]:
    mantissa, magnitude = _MANTISSA[bits], level & u32(2 ** (bits - 1) - 1)
    small = magnitude < (1 << mantissa)
    digits = magnitude + u32(127 << mantissa) - jnp.where(small, u32(0), u32(1 << mantissa))
    value = _as_float(digits << u32(23 - mantissa)) - jnp.where(small, jnp.float32(1), jnp.float32(0))
    return jnp.where(level >> u32(bits - 1) == 1, -value, value)


def _tapered(x: Float32[Array, "..."], noise: UInt32[Array, "..."], bits: int) -> UInt32[Array, "..."]:
    """Levels from 1 on, with a digit more from half of the levels on."""
    mantissa, octaves, half = _MANTISSA[bits], _low_octaves(bits), 2 ** (bits - 1)
    least = 1 + 2.0 ** (1 - mantissa)
    x = jnp.maximum(x, least)
    low = _rounded(x, noise, mantissa - 1) - u32(127 << (mantissa - 1))
    high = _rounded(x, noise, mantissa) - u32((127 + octaves) << mantissa) + u32(half)
    return jnp.minimum(jnp.where(x < 2.0**octaves, low, high), u32(2 * half - 1))


def _of_tapered(level: UInt32[Array, "..."], bits: int) -> Float32[Array, "..."]:
    mantissa, octaves, half = _MANTISSA[bits], _low_octaves(bits), 2 ** (bits - 1)
    low = (level + u32(127 << (mantissa - 1))) << u32(24 - mantissa)
    high = (level - u32(half) + u32((127 + octaves) << mantissa)) << u32(23 - mantissa)
    return jnp.where(level == 0, jnp.float32(0), _as_float(jnp.where(level < half, low, high)))


def _rounded(x: Float32[Array, "..."], noise: UInt32[Array, "..."], mantissa: int) -> UInt32[Array, "..."]:
    """The bits of positive floats down to a mantissa of so many digits, up or down with the probabilities of their distances."""
    return (_as_bits(x) + (noise >> u32(9 + mantissa))) >> u32(23 - mantissa)


def _as_bits(x: Float32[Array, "..."]) -> UInt32[Array, "..."]:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _as_float(bits: UInt32[Array, "..."]) -> Float32[Array, "..."]:
    return lax.bitcast_convert_type(bits, jnp.float32)
