"""The error-bounded quantiser: multiples of a power of two, with dither, in integer arithmetic.

A step s = 2^k has n parts, sixteenths for float32 and eighths for 16-bit floats. The magnitude of a value x is c parts,
rounded up: c - 1 < n |x| / s <= c. With e parts of dither, 0 to n - 1, x is coded as its sign and p = floor((c + e) / n), and
decoded to sign(x) m s with the middle m = p + 1/2 - (e + 1) / n, which is at most half a step away. For p = 0, m may be zero or
negative. Then

    if signs are kept, m is a small positive number: the decoded value has the sign of x
    if signs are not kept, m stays, so that errors have no mean over a part; but m = 0 becomes 1/n

So zeros are exact both ways, and nothing else decodes to zero: either gives the exact mask of a ReLU's output.

For bfloat16, (p + 3/8 - e / 8) s may have more bits than a bfloat16, and the lower ones are cut off. Cutting never passes a
bfloat16. So from above |x| it does not pass |x|, and from below it does not pass |x| - s / 2, which is a bfloat16, too, up to
128 steps. From there on x is a multiple of s, and p stands for it. Where |x| is a whole number of eighths of a step, as all
bfloat16s of 16 steps and more are, errors have a mean below zero: see `ErrorBounded`.

The arithmetic is that of integers, because that of subnormal numbers differs between backends.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from memjax.compress._codecs.bits import WORD, Words, u32
from memjax.compress._error_bounded import tiles
from memjax.compress._error_bounded.tiles import GROUPS, LANES

# The least middle, in steps, if signs are kept: less than a part.
LEAST = 2.0**-11
# The least and the largest k of steps 2^k. From the least on, an eighth of `LEAST` steps is a normal number (float16: `LEAST`
# steps are not zero); up to the largest, all decoded values are finite, with one power to spare. Larger bounds have the largest
# step; smaller bounds store everything raw.
_EXPONENTS = {
    jnp.dtype(jnp.bfloat16): (-112, 119),
    jnp.dtype(jnp.float16): (-13, 7),
    jnp.dtype(jnp.float32): (-112, 111),
}
# Means that everything is stored raw.
RAW_EXPONENT = -(2**30)

_MANTISSA = 23  # of a float32


@functools.partial(jax.jit, static_argnums=1)
def step_exponent(bound: Float[Array, "..."], dtype) -> Int32[Array, "..."]:
    """The k of the largest useful step 2^k not above 2 `bound`; `RAW_EXPONENT` if the bound is too small, or not positive."""
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
    x: Float[Array, "..."], exponent: Int32[Array, "..."], dither: UInt32[Array, "..."]
) -> tuple[UInt32[Array, "..."], Bool[Array, "..."], Bool[Array, "..."], Bool[Array, "..."]]:
    """p, whether x is not zero, whether it is negative, and whether it must be stored raw; `exponent` broadcasts."""
    wide, planes = float32_bits(x), dither_bits(x.dtype)
    count, too_large = parts_of_steps(wide & u32(0x7FFFFFFF), exponent - planes)
    p = (count + dither) >> planes
    too_large |= (p > u32(2 ** tiles.max_planes(x.dtype) - 1)) | (exponent == RAW_EXPONENT)
    return p, count != 0, (wide >> 31 != 0) & (count != 0), too_large


def parts_of_steps(magnitude: Words, exponent: Int32[Array, "..."]) -> tuple[Words, Bool[Array, "..."]]:
    """|x| / 2^`exponent`, rounded up, for float32s given by the bits of their magnitude. And whether that is more than 2^23, or
    x is not finite; then the number means nothing.
    """
    is_normal = magnitude >> _MANTISSA != 0
    significand = (magnitude & u32(0x7FFFFF)) | jnp.where(is_normal, u32(0x800000), u32(0))
    # |x| = significand * 2^(power - 150)
    power = jnp.maximum(lax.convert_element_type(magnitude >> _MANTISSA, jnp.int32), 1)
    right = exponent + (150 - power)  # what the significand is shifted by
    by = u32(jnp.clip(right, 0, 31))
    count = significand >> by
    count += u32(count << by != significand)
    too_large = ((right < 0) & (significand != 0)) | (count > u32(2**23)) | (magnitude >= u32(0x7F800000))
    return count, too_large


def step(exponent: Int32[Array, "..."]) -> Float[Array, "..."]:
    """2^k in float32, exactly, for k from -126 to 127; for `RAW_EXPONENT` it means nothing."""
    return lax.bitcast_convert_type((jnp.maximum(exponent, -126) + 127) << _MANTISSA, jnp.float32)


def dequantize(
    p: UInt32[Array, "..."],
    is_some: Bool[Array, "..."],
    negative: Bool[Array, "..."],
    exponent: Int32[Array, "..."],
    dither: UInt32[Array, "..."],
    dtype,
    *,
    keeps_signs: bool,
) -> Float[Array, "..."]:
    """The decoded values: the inverse of `quantize`, for `p` below 2^`max_planes(dtype)`."""
    parts = 1 << dither_bits(dtype)
    number = p * u32(parts) + (u32(parts - 1) - dither)
    if not keeps_signs:
        number = jnp.where(number == u32(parts // 2), number + u32(1), number)
    value = middle(number, dtype, keeps_signs=keeps_signs) * step(exponent)
    bits = jnp.where(is_some, lax.bitcast_convert_type(value, jnp.uint32) ^ (u32(negative) << 31), u32(0))
    if jnp.dtype(dtype) == jnp.bfloat16:
        return tiles.from_bits(bits >> 16, dtype)
    return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)


def middle(number: Words, dtype, *, keeps_signs: bool) -> Float[Array, "..."]:
    """The middle m, in steps, from `number` = n p + n - 1 - e; float32, perhaps with more bits than the dtype has."""
    half = 1 << (dither_bits(dtype) - 1)
    if jnp.dtype(dtype) == jnp.bfloat16:
        # From 128 steps on m is up to three eighths more than p, which will be cut off.
        number = jnp.where(number >= u32(8 * 128), number | u32(4), number)
    parts = lax.convert_element_type(number.astype(jnp.int32), jnp.float32)
    value = (parts - half) * jnp.float32(0.5 / half)
    return jnp.maximum(value, jnp.float32(LEAST)) if keeps_signs else value


def float32_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """The bits of `x` as float32; NaNs may lose their payloads."""
    if x.dtype == jnp.bfloat16:
        return tiles.to_bits(x) << 16  # a conversion may flush subnormal numbers
    if x.dtype == jnp.float16:
        x = x.astype(jnp.float32)  # all of whose values are normal
    return tiles.to_bits(x)


# Dither: by how many parts of a step each value is moved before it is rounded, and moved back afterwards.
#
# Without dither errors are a function of values. Where neighbours are nearly equal, as in large images and behind max-
# pooling, so are their errors, and these add up in the gradient of a convolution, a sum over all positions: to more
# than fifty times the sum of independent errors, on ResNet-50 at 224x224. With a random part of a step added before
# rounding and subtracted afterwards (subtractive dither: Schuchman 1964, "Dither signals and their effect on
# quantization noise") errors are independent of values, and predictions of their sums hold. The cost are quantised
# magnitudes that are larger by one now and then.
#
# The number of parts depends on a value's place. Like a code it consists of planes of bits (tiles.py), which are hashes
# of tile, lane and group. Parts are sixteenths for float32, and eighths for 16-bit floats, which have no bits for more.
# Errors of equal values have a mean of up to half a part: the fewer the parts, the larger it is.

_FACTORS = (0x9E3779B1, 0x7FEB352D, 0xB5297A4D)


def dither_bits(dtype) -> int:
    """The number p of planes of bits; a step has 2^p parts."""
    return 4 if jnp.dtype(dtype).itemsize == 4 else 3


def dither_planes(
    count: int, tile: Int32[Array, "..."], lane: Int32[Array, "..."], group: Int32[Array, "..."]
) -> list[Words]:
    """The planes of a group's 32 values, the lowest first: bit i of a word belongs to value i."""
    x = ((u32(tile) * u32(LANES) + u32(lane)) * u32(GROUPS) + u32(group)) * u32(0x85EBCA6B)
    x = (x ^ (x >> 15)) * u32(0xC2B2AE35)
    first = x ^ (x >> 16)
    others = (first * u32(factor) for factor in _FACTORS[: count - 1])
    return [first, *(word ^ (word >> 15) for word in others)]


def dither_of_group(tile: Int32[Array, ""], group: Int32[Array, ""], dtype) -> UInt32[Array, "32 32"]:
    """The number of parts for every value of a group of a tile, 0 to 7 or 15: see `tiles.lanes`."""
    words = dither_planes(dither_bits(dtype), tile, jnp.arange(LANES), group)
    value = jnp.arange(WORD, dtype=jnp.uint32)[:, None]
    bits = [((word >> value) & u32(1)) << p for p, word in enumerate(words)]
    return sum(bits[1:], bits[0])
