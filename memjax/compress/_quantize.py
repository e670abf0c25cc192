"""The error-bounded quantiser: multiples of a power of two, with dither, in integer arithmetic.

With step s = 2^k, the magnitude of a value x is c eighths of a step, rounded up: c - 1 < 8 |x| / s <= c. With e eighths of
dither, 0 to 7, x is coded as its sign and p = floor((c + e) / 8), and decoded to sign(x) (p + 3/8 - e / 8) s, half a step away at
most. Where that is not beyond zero, for p = 0, a little that is stands for it. So zeros are exact, and the decoded value has
the sign of x: of an activation after a ReLU it gives the exact mask.

Of bfloat16s (p + 3/8 - e / 8) s may have more bits than they: bits beyond are cut off. That never passes a bfloat16, so
from beyond |x| it does not pass |x|, and from before not |x| - s / 2, which is one too up to 128 steps. From there on x is a
multiple of s, and p stands for it. Where |x| is a whole number of eighths, as all bfloat16s of 16 steps and more are, errors
have a mean below zero: see `ErrorBounded`.

Integers, because the arithmetic of subnormal numbers differs between backends.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from memjax.compress import _tiles
from memjax.compress._bits import Words, u32

# What stands for values whose middle is not beyond zero, in steps. The next bfloat16 after an eighth is more than that away.
LEAST = 2.0**-11
# Steps 2^k: from where the least that is computed with, a quarter of `LEAST`, is a normal number, of float16s where `LEAST` is
# a number, to where all that codes can stand for is finite, with one to spare. For larger bounds, the last is the step; for
# smaller ones there is none.
_EXPONENTS = {
    jnp.dtype(jnp.bfloat16): (-112, 119),
    jnp.dtype(jnp.float16): (-13, 7),
    jnp.dtype(jnp.float32): (-112, 111),
}
# Stands for "store everything raw".
RAW_EXPONENT = -(2**30)

_MANTISSA = 23  # of a float32


def step_exponent(bound: Float[Array, "..."], dtype) -> Int32[Array, "..."]:
    """The k of the largest useful step 2^k not above 2 `bound`; `RAW_EXPONENT` for no positive, or too small, a bound."""
    least, most = _EXPONENTS[jnp.dtype(dtype)]
    bits = lax.bitcast_convert_type(jnp.asarray(bound, jnp.float32), jnp.int32)
    exponent = (bits >> _MANTISSA) - 126  # of 2 * bound; negative bounds give less than any that is valid
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    invalid = is_nan | (bits <= 0) | (exponent < least)
    return jnp.where(invalid, RAW_EXPONENT, jnp.minimum(exponent, most))


def inverse_step(exponent: Int32[Array, "..."]) -> Float[Array, "..."]:
    """2^-k in float32, exactly, for k from -127 to 126."""
    return lax.bitcast_convert_type((127 - exponent) << _MANTISSA, jnp.float32)


def quantize(
    x: Float[Array, "..."], exponent: Int32[Array, "..."], eighths: UInt32[Array, "..."]
) -> tuple[UInt32[Array, "..."], Bool[Array, "..."], Bool[Array, "..."], Bool[Array, "..."]]:
    """p, whether x is not zero, whether it is negative, and whether it must be stored as it is; `exponent` broadcasts."""
    wide = float32_bits(x)
    count, too_large = eighths_of_steps(wide & u32(0x7FFFFFFF), exponent)
    p = (count + eighths) >> 3
    too_large |= (p > u32(_tiles.max_code(x.dtype))) | (exponent == RAW_EXPONENT)
    return p, count != 0, (wide >> 31 != 0) & (count != 0), too_large


def eighths_of_steps(magnitude: Words, exponent: Int32[Array, "..."]) -> tuple[Words, Bool[Array, "..."]]:
    """c of float32s without sign, given as bits; and whether it is more than 2^23, or |x| not finite: then c is anything."""
    is_normal = magnitude >> _MANTISSA != 0
    significand = (magnitude & u32(0x7FFFFF)) | jnp.where(is_normal, u32(0x800000), u32(0))
    # |x| = significand * 2^(power - 150)
    power = jnp.maximum(lax.convert_element_type(magnitude >> _MANTISSA, jnp.int32), 1)
    right = exponent + (147 - power)  # the significand of 8 |x| / s is shifted by as much
    by = u32(jnp.clip(right, 0, 31))
    count = significand >> by
    count += u32(count << by != significand)
    too_large = ((right < 0) & (significand != 0)) | (count > u32(2**23)) | (magnitude >= u32(0x7F800000))
    return count, too_large


def step(exponent: Int32[Array, "..."]) -> Float[Array, "..."]:
    """2^k in float32, exactly, for k from -126 to 127; anything for `RAW_EXPONENT`."""
    return lax.bitcast_convert_type((jnp.maximum(exponent, -126) + 127) << _MANTISSA, jnp.float32)


def dequantize(
    p: UInt32[Array, "..."],
    is_some: Bool[Array, "..."],
    negative: Bool[Array, "..."],
    exponent: Int32[Array, "..."],
    eighths: UInt32[Array, "..."],
    dtype,
) -> Float[Array, "..."]:
    """The inverse, for `p` <= `max_code(dtype)`."""
    value = middle(p * u32(8) + (u32(7) - eighths), dtype) * step(exponent)
    bits = jnp.where(is_some, lax.bitcast_convert_type(value, jnp.uint32) | (u32(negative) << 31), u32(0))
    if jnp.dtype(dtype) == jnp.bfloat16:
        return _tiles.from_bits(bits >> 16, dtype)
    return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)


def middle(number: Words, dtype) -> Float[Array, "..."]:
    """In steps, what 8 p + 7 - e stands for; float32, perhaps with more bits than the dtype has."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        # From 128 steps on up to three eighths more than p: they will be cut off.
        number = jnp.where(number >= u32(8 * 128), number | u32(4), number)
    eighths = lax.convert_element_type(number.astype(jnp.int32), jnp.float32)
    return jnp.maximum((eighths - 4) * jnp.float32(0.125), jnp.float32(LEAST))


def float32_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Those of `x` as float32, the payloads of NaNs perhaps excepted."""
    if x.dtype == jnp.bfloat16:
        return _tiles.to_bits(x) << 16  # a conversion may flush subnormal numbers
    if x.dtype == jnp.float16:
        x = x.astype(jnp.float32)  # all of whose values are normal
    return _tiles.to_bits(x)
