"""The error-bounded quantiser: multiples of a power of two, rounded away from zero, in integer arithmetic.

With step s = 2^k, a value x that is not zero has c whole eighths of a step: c <= 8 |x| / s <= c + 1, of two such c that
which is even, or for bfloat16s the larger one if it is a multiple of four. With d eighths of dither, 0 to 7, its magnitude is
q = 1 + floor((c + d) / 8), and it decodes to sign(x) (q - 1/2 - d / 8) s, half a step away at most. Where that is not beyond
zero, for q = 1, a little that is stands for it. So zeros are exact, and the decoded value has the sign of x: of an activation
after a ReLU it gives the exact mask.

Of bfloat16s (q - 1/2 - d / 8) s may have more bits than they: bits beyond are cut off. That never passes a bfloat16, so
from beyond |x| it does not pass |x|, and from before not |x| - s / 2, which is one too. Where even q - 1/2 has, past
128 steps of a bfloat16, the dtype is so coarse that x is a multiple of s, or half of one below 128, and q - 1 stands for it.

Integers, because the arithmetic of subnormal numbers differs between backends.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from memjax.compress import _dither, _tiles
from memjax.compress._bits import Words, u32

# Steps 2^k for k from here on; of smaller ones not all that kernels multiply with is a normal number. The largest:
# half of it, of a bfloat16 sixteen times it, is a float, and hardly any float is beyond it.
MIN_EXPONENT = -119
_MAX_EXPONENT = {jnp.dtype(jnp.bfloat16): 123, jnp.dtype(jnp.float16): 16, jnp.dtype(jnp.float32): 127}
# Stands for "store everything raw".
RAW_EXPONENT = -(2**30)

_MANTISSA = 23  # of a float32
_SIGNIFICANT = {jnp.dtype(jnp.bfloat16): 8, jnp.dtype(jnp.float16): 11, jnp.dtype(jnp.float32): 24}
_F16_LEAST = -24  # exponent of the least float16


def step_exponent(bound: Float[Array, "..."], dtype) -> Int32[Array, "..."]:
    """The k of the largest useful step 2^k not above 2 `bound`; `RAW_EXPONENT` for no positive, or too small, a bound."""
    bits = lax.bitcast_convert_type(jnp.asarray(bound, jnp.float32), jnp.int32)
    exponent = (bits >> _MANTISSA) - 126  # of 2 * bound; negative bounds give less than any that is valid
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    invalid = is_nan | (bits <= 0) | (exponent < MIN_EXPONENT)
    return jnp.where(invalid, RAW_EXPONENT, jnp.minimum(exponent, _MAX_EXPONENT[jnp.dtype(dtype)]))


def inverse_step(exponent: Int32[Array, "..."]) -> Float[Array, "..."]:
    """2^-k in float32, exactly, for k from -127 to 127."""
    smallest = jnp.int32(1 << (_MANTISSA - 1))  # 2^-127 has no normal representation
    return lax.bitcast_convert_type(jnp.where(exponent == 127, smallest, (127 - exponent) << _MANTISSA), jnp.float32)


def quantize(
    x: Float[Array, "..."], exponent: Int32[Array, "..."], eighths: UInt32[Array, "..."]
) -> tuple[UInt32[Array, "..."], Bool[Array, "..."], Bool[Array, "..."]]:
    """q (0 for zeros), whether x is negative, and whether x must be stored as it is; `exponent` broadcasts."""
    wide = float32_bits(x)
    magnitude = wide & u32(0x7FFFFFFF)
    count, too_large = whole_eighths(magnitude, exponent, x.dtype)
    q = jnp.where(magnitude == 0, u32(0), ((count + _dither.allowed(eighths, exponent, x.dtype)) >> 3) + u32(1))
    too_large |= (q > u32(_tiles.max_code(x.dtype))) | (exponent == RAW_EXPONENT)
    return q, (wide >> 31 != 0) & (q != 0), too_large


def whole_eighths(magnitude: Words, exponent: Int32[Array, "..."], dtype) -> tuple[Words, Bool[Array, "..."]]:
    """c of float32s without sign, given as bits; and whether it is 2^23 or more, or |x| not finite: then c is anything."""
    is_normal = magnitude >> _MANTISSA != 0
    significand = (magnitude & u32(0x7FFFFF)) | jnp.where(is_normal, u32(0x800000), u32(0))
    # |x| = significand * 2^(power - 150)
    power = jnp.maximum(lax.convert_element_type(magnitude >> _MANTISSA, jnp.int32), 1)
    right = exponent + (147 - power)  # the significand of 8 |x| / s is shifted by as much
    by = u32(jnp.clip(right, 0, 31))
    count = significand >> by
    step = u32(4 if jnp.dtype(dtype) == jnp.bfloat16 else 2)
    count -= u32((count << by == significand) & (count & (step - u32(1)) != 0))
    too_large = ((right < 0) & (significand != 0)) | (count >= u32(2**23)) | (magnitude >= u32(0x7F800000))
    return count, too_large


def step(exponent: Int32[Array, "..."]) -> Float[Array, "..."]:
    """2^k in float32, exactly, for k from -126 to 127; anything for `RAW_EXPONENT`."""
    return lax.bitcast_convert_type((jnp.maximum(exponent, -126) + 127) << _MANTISSA, jnp.float32)


def dequantize(
    q: UInt32[Array, "..."],
    negative: Bool[Array, "..."],
    exponent: Int32[Array, "..."],
    eighths: UInt32[Array, "..."],
    dtype,
) -> Float[Array, "..."]:
    """The inverse, for `q` <= `max_code(dtype)`."""
    value = middle(q, exponent, _dither.allowed(eighths, exponent, dtype), dtype) * step(exponent)
    bits = lax.bitcast_convert_type(value, jnp.uint32) | (u32(negative) << 31)
    if jnp.dtype(dtype) == jnp.bfloat16:
        return _tiles.from_bits(bits >> 16, dtype)
    return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)


def middle(q: Words, exponent: Int32[Array, "..."], eighths: Words, dtype, *, most: int = 2**31) -> Float[Array, "..."]:
    """In steps, what q, which is at most `most`, stands for; float32, perhaps with more bits than the dtype has."""
    steps, moved = (lax.convert_element_type(x.astype(jnp.int32), jnp.float32) for x in (q, eighths))
    moved = moved * jnp.float32(0.125)
    # Half a step is a number of the dtype.
    is_fine = exponent > (_F16_LEAST if jnp.dtype(dtype) == jnp.float16 else RAW_EXPONENT)
    last = 2 ** (_SIGNIFICANT[jnp.dtype(dtype)] - 1)
    if last < most:  # past it not even q - 1/2 is as short as significands
        is_fine &= q <= u32(last)
    before = jnp.where(is_fine, jnp.float32(0.5) + moved, jnp.float32(1))
    return jnp.maximum(jnp.maximum(steps - before, (steps - moved) * jnp.float32(_dither.LEAST)), jnp.float32(0))


def float32_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Those of `x` as float32, the payloads of NaNs perhaps excepted."""
    if x.dtype == jnp.bfloat16:
        return _tiles.to_bits(x) << 16  # a conversion may flush subnormal numbers
    if x.dtype == jnp.float16:
        x = x.astype(jnp.float32)  # all of whose values are normal
    return _tiles.to_bits(x)
