"""Arrays of optimizer state as small floats of 8 or 4 bits, with a power of two for each block of neighbours.

A block has a unit, a power of two, such that its largest magnitude is a little below the largest code. Codes count units, and
have gradual underflow as IEEE floats have: below one unit steps are equal.

with signs: 1 bit of sign, 3 of exponent, 4 of mantissa (of 4 bits: 1, 2, 1). The least is 2^-10.95 of the largest code (4 bits:
  2^-3.58). Zero is zero.
without, for what is never negative, and divided by: mantissas of 4 bits in the upper 10 octaves and of 3 in the 12 below (4
  bits: 1 in the upper 4, none in the 8 below). Zero is zero, but nothing else becomes zero: what is less than the least code,
  about 2^-24 of the largest (2^-10.6), becomes that.

The second's range is twice the first's on a logarithmic scale, as that of a square should be. So where the least code of a
momentum appears at random, it is not divided by the root of something much less than its own square. Numbers above 2.5e38 may
become infinite.

Rounding is at random between neighbours, by place and step, with probabilities that make it right on average. Codes that are
decoded and encoded again stay, whatever the new unit, as long as it is not larger: all grids of smaller units contain them.

The arithmetic (`block_levels`, `block_values`) is few integer operations a value, which bound its speed on GPUs. A level is what
is left of a float's bits: to round is to add random bits before the last ones are dropped. The kernel shares it.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt8, UInt32

from memjax.compress._codecs.bits import places, u32
from memjax.compress._state import noise

BLOCK = 32  # values with one unit, or a few more
_MANTISSA = {8: 4, 4: 1}
_FINER = {8: 96, 4: 8}  # the first level without sign that has a digit more
_NOT_FINITE = 0  # as an exponent
_INFINITY = 0x7F800000  # its bits
_LEAST_EXPONENT = 48  # of a block, biased: units of all codes are normal numbers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coded:
    """An array in codes. Blocks lie along the last axis with 32 values or more; the other axes are those of the array.

    Attributes:
      codes: of the array's shape; of 4 bits, two in a byte: the first half of a block in the lower bits.
      exponents: of the largest magnitude in each block, biased as float32's are; 0: not all of it is finite.
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


def encode(
    x: Float[Array, "..."], seed: UInt32[Array, ""], *, bits: int, signed: bool
) -> tuple[UInt8[Array, "..."], UInt8[Array, "..."]]:
    """The codes and exponents of an array with an axis of 32 values or more. `seed` chooses how values are rounded."""
    axis = block_axis(x.shape)
    assert axis is not None
    count, size = _blocks(x.shape[axis])
    wide = x.astype(jnp.float32)
    if count * size > x.shape[axis]:
        wide = jnp.pad(wide, [(0, count * size - n if i == axis else 0) for i, n in enumerate(x.shape)])
    wide = wide.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    # The halves of 4 bits are computed apart: of levels that were cut, the compiler would write all, 4 bytes each.
    halves = lambda array: jnp.split(array, 8 // bits, axis + 1)
    noises = [noise.at(place, seed, stream_of(signed)) for place in halves(places(wide.shape))]
    levels, exponents = block_levels(halves(wide), noises, bits, signed, axis + 1)
    codes = packed(levels).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])
    if bits == 8 and count * size > x.shape[axis]:
        codes = lax.slice_in_dim(codes, 0, x.shape[axis], axis=axis)
    return codes, jnp.squeeze(exponents, axis + 1)


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
        level = jnp.expand_dims(level, axis + 1) >> shifts
        level = level.reshape(*code.shape[:axis], count, size, *code.shape[axis + 1 :])
    [value] = block_values([level], jnp.expand_dims(code.exponents, axis + 1), bits, code.signed)
    value = value.reshape(*code.shape[:axis], count * size, *code.shape[axis + 1 :])
    return lax.slice_in_dim(value, 0, length, axis=axis).astype(code.dtype)


def _blocks(length: int) -> tuple[int, int]:
    """How many blocks an axis has, and their size: 32, or a little more if that does not divide, and even."""
    size = math.ceil(length / max(1, length // BLOCK))
    size += size % 2
    return math.ceil(length / size), size


def stream_of(signed: bool) -> int:
    """Which of the random numbers at a place rounds there."""
    return noise.SIGNED if signed else noise.SQUARE


def packed(levels: Sequence[UInt32[Array, "..."]]) -> UInt8[Array, "..."]:
    """Levels of 8 bits, or two halves of levels of 4 bits, in bytes."""
    one, *other = levels
    return (one | (other[0] << u32(4)) if other else one).astype(jnp.uint8)


def block_levels(
    parts: Sequence[Float32[Array, "..."]],
    noises: Sequence[UInt32[Array, "..."]],
    bits: int,
    signed: bool,
    axis: int,
    *,
    subnormals: bool = False,
) -> tuple[list[UInt32[Array, "..."]], UInt8[Array, "..."]]:
    """The levels of blocks, and their exponents.

    Args:
      parts: blocks along `axis`, perhaps in several parts.
      noises: 32 random bits for each value.
      subnormals: whether arithmetic with float32 numbers below 2^-126 is exact, and fast, as on NVIDIA GPUs. XLA:CPU makes them
        zero. Levels are the same.
    """
    mantissa = _MANTISSA[bits]
    # The largest of the bits as integers: a maximum of floats may lose a NaN, whose bits are larger than infinity's.
    magnitudes = [_as_unsigned(_as_bits(part)) << u32(1) for part in parts]
    largest = lax.bitcast_convert_type(
        jnp.max(functools.reduce(jnp.maximum, magnitudes), axis, keepdims=True) >> u32(1), jnp.int32
    )
    # Rounded up where the mantissa is more than that of the largest code.
    exponent = (largest + _i32(2 ** (23 - mantissa) - 1)) >> _i32(23)
    exponent = jnp.maximum(exponent, _i32(_LEAST_EXPONENT))
    to_units = _as_float((_i32(254 + _top(bits, signed)) - exponent) << _i32(23))
    stored = jnp.where(largest < _INFINITY, exponent, _i32(_NOT_FINITE)).astype(jnp.uint8)
    level = _signed_level if signed else _square_level
    return [level(part, to_units, random, bits, subnormals) for part, random in zip(parts, noises, strict=True)], stored


def block_values(
    levels: Sequence[UInt32[Array, "..."]],
    exponents: UInt8[Array, "..."],
    bits: int,
    signed: bool,
    *,
    subnormals: bool = False,
) -> list[Float32[Array, "..."]]:
    """The values of levels, the inverse of `block_levels`. Bits above a level's do not matter with signs."""
    exponent = exponents.astype(jnp.int32)
    unit = _as_float((exponent - _i32(_top(bits, signed))) << _i32(23))
    unit = jnp.where(exponent == _NOT_FINITE, jnp.float32(jnp.nan), unit)
    value = _signed_value if signed else _square_value
    return [value(lax.bitcast_convert_type(level, jnp.int32), bits, subnormals) * unit for level in levels]


def _top(bits: int, signed: bool) -> int:
    """The exponent of the largest code, in units."""
    largest = 2 ** (bits - 1) - 1 if signed else 2**bits - 1 + _FINER[bits]
    return (largest >> _MANTISSA[bits]) - 1


def _signed_level(x: Any, to_units: Any, noise: Any, bits: int, subnormals: bool) -> UInt32[Array, "..."]:
    drop = 23 - _MANTISSA[bits]
    digits = _as_unsigned(_digits(jnp.abs(x) * to_units, subnormals) + _noise(noise, drop))
    # Both move to the highest bits: the largest digits end below the sign.
    sign = _as_unsigned(_as_bits(x)) & u32(1 << 31)
    return ((digits << u32(32 - bits - drop)) | sign) >> u32(32 - bits)


def _signed_value(level: Any, bits: int, subnormals: bool) -> Float32[Array, "..."]:
    # With the sign in the bits above, the magnitude moves to where a float's digits begin.
    place = 23 - _MANTISSA[bits]
    digits = ((level << _i32(32 - bits)) >> _i32(32 - bits)) << _i32(place)
    magnitude = (2 ** (bits - 1) - 1) << place
    if subnormals:
        return _value(digits & _i32(magnitude - 2**31), True)
    value = _as_bits(_value(digits & _i32(magnitude), False))
    return _as_float(value | digits & _i32(-(2**31)))


def _square_level(x: Any, to_units: Any, noise: Any, bits: int, subnormals: bool) -> UInt32[Array, "..."]:
    """The level of a value that is never negative: the larger of its levels on two grids, one of which has a digit more."""
    drop, positive = 23 - _MANTISSA[bits], jnp.maximum(x, jnp.float32(0))
    digits = _digits(positive * to_units, subnormals)
    coarse = (digits + _noise(noise, drop + 1)) >> _i32(drop + 1)
    fine = ((digits + _noise(noise, drop)) >> _i32(drop)) - _i32(_FINER[bits])
    least = jnp.minimum(_as_bits(positive), _i32(1))
    return _as_unsigned(jnp.maximum(jnp.maximum(coarse, fine), least))


def _square_value(level: Any, bits: int, subnormals: bool) -> Float32[Array, "..."]:
    place = 23 - _MANTISSA[bits]
    if bits == 4:
        level = level & _i32(15)
    fine = (level << _i32(place)) + _i32(_FINER[bits] << place)
    return _value(jnp.minimum(level << _i32(place + 1), fine), subnormals)


# Numbers of units as float32's bits with another bias: 1 unit has the exponent 1, and less is a subnormal number.


def _digits(x: Float32[Array, "..."], subnormals: bool) -> Int32[Array, "..."]:
    if subnormals:
        return _as_bits(x * jnp.float32(2.0**-126))
    small = x < 1  # adding 1 there makes floats of equal steps
    return _as_bits(jnp.where(small, x + 1, x)) - jnp.where(small, _i32(127 << 23), _i32(126 << 23))


def _value(digits: Int32[Array, "..."], subnormals: bool) -> Float32[Array, "..."]:
    if subnormals:
        return _as_float(digits) * jnp.float32(2.0**126)
    small = digits < (1 << 23)
    bits = digits + jnp.where(small, _i32(127 << 23), _i32(126 << 23))
    return _as_float(bits) - jnp.where(small, jnp.float32(1), jnp.float32(0))


def _noise(noise: UInt32[Array, "..."], drop: int) -> Int32[Array, "..."]:
    """A random number of so many bits."""
    return lax.bitcast_convert_type(noise >> u32(32 - drop), jnp.int32)


def _i32(x: int) -> Any:
    return jnp.int32(x)


def _as_bits(x: Float32[Array, "..."]) -> Int32[Array, "..."]:
    return lax.bitcast_convert_type(x, jnp.int32)


def _as_unsigned(x: Int32[Array, "..."]) -> UInt32[Array, "..."]:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _as_float(bits: Int32[Array, "..."]) -> Float32[Array, "..."]:
    return lax.bitcast_convert_type(bits, jnp.float32)
