"""Evenly spaced levels between a least and a largest value, for floats of any size: counted from the least, or from the middle.

From the least value, a range beyond float32's largest value, as from -3e38 to 3e38, is kept at half its size. Its distance of
levels is negative, which tells it from others.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

_LARGEST = float(jnp.finfo(jnp.float32).max)
LEAST_DISTANCE = 2.0**-125
"""Distances below this have no inverse in float32: levels are no closer."""
# Those above this have one that counts as zero, of 2 bits the largest: they are divided first.
_LARGE_DISTANCE, _DIVISOR = 2.0**100, 2.0**26


def levels_between(low: Float[Array, "..."], high: Float[Array, "..."], bits: int) -> tuple[Array, Array]:
    """The lowest of 2^bits levels from `low` to `high` and their distance, float32, for `to_levels` and `from_levels`.

    The distance is NaN if `low` or `high` is not finite, and 2^-125 at least where they differ.
    """
    fits = jnp.isfinite(high - low)
    scale = jnp.where(fits, 1.0, 0.5)
    low, high = low * scale, high * scale
    distance = (high - low) / (2**bits - 1)
    distance = jnp.where(high - low > 0, jnp.maximum(distance, LEAST_DISTANCE), 0) * jnp.where(fits, 1.0, -1.0)
    return low, jnp.where(jnp.isfinite(low) & jnp.isfinite(high), distance, jnp.nan)


def to_levels(
    x: Float[Array, "..."], low: Float[Array, "..."], distance: Float[Array, "..."], bits: int, offset: Array | float
) -> Float[Array, "..."]:
    """floor((x - low) / distance + offset), between 0 and 2^bits - 1, as float32; zero where the distance is zero."""
    size = jnp.abs(distance)
    part = jnp.where(size > _LARGE_DISTANCE, 1 / _DIVISOR, 1.0)
    inverse = jnp.where(size >= LEAST_DISTANCE, 1 / (size * part), 0)
    scale = jnp.where(distance < 0, 0.5, 1.0) * part
    level = jnp.floor((x.astype(jnp.float32) * scale - low * part) * inverse + offset)
    return jnp.clip(level, 0, 2**bits - 1)


def from_levels(
    levels: UInt[Array, "..."], low: Float[Array, "..."], distance: Float[Array, "..."]
) -> Float[Array, "..."]:
    """low + level * distance, float32; NaN where the distance is NaN."""
    x = (low + levels.astype(jnp.float32) * jnp.abs(distance)) * jnp.where(distance < 0, 2.0, 1.0)
    return jnp.clip(x, -_LARGEST, _LARGEST)


# From the middle, a level is decoded to `middle + (level - centre) * distance`. So no step overflows, even of ranges
# beyond float32's largest value, and decoding takes three operations on a value.


def _centre(bits: int) -> float:
    """The mean of the levels."""
    return (2**bits - 1) / 2


def centred_between(low: Float[Array, "..."], high: Float[Array, "..."], bits: int) -> tuple[Array, Array]:
    """The middle of 2^bits levels from `low` to `high` and their distance, float32; NaN where an end is not finite.

    Where the ends differ the distance is 2^-125 at least.
    """
    half = high * 0.5 - low * 0.5
    half = jnp.where(half <= _LARGEST, half, jnp.nan)
    return low + half, _widened(half, bits) / _centre(bits)


def _widened(half: Float[Array, "..."], bits: int) -> Float[Array, "..."]:
    """Half a range, or of a narrower one that is not empty half of what levels at their least distance reach over."""
    return jnp.where(
        half > 0, jnp.where(half < _centre(bits) * LEAST_DISTANCE, _centre(bits) * LEAST_DISTANCE, half), half
    )


def to_centred(x: Float[Array, "..."], middle: Float[Array, "..."], distance: Float[Array, "..."], bits: int) -> Array:
    """The nearest level of each value, float32; any where the distance is zero."""
    part = jnp.where(distance > _LARGE_DISTANCE, 1 / _DIVISOR, 1.0)
    inverse = jnp.where(distance >= LEAST_DISTANCE, 1 / (distance * part), 0)
    level = jnp.floor((x.astype(jnp.float32) * part - middle * part) * inverse + (_centre(bits) + 0.5))
    return jnp.clip(level, 0, 2**bits - 1)


def levels_of_16_bits(
    low: Float[Array, "..."], high: Float[Array, "..."], bits: int, reciprocal: Callable[[Array], Array]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """What `centred_between` gives, but for last digits; a factor and a shift: `x * factor + shift` is x's level, not rounded.

    That is off by 1 / 32 at most for values of 16 bits, for different ones are no closer than 2^-11 of their size. All of it
    takes few instructions.

    Args:
      reciprocal: of positive numbers between 2^-126 and 2^126.
    """
    half = high * 0.5 - low * 0.5
    half = jnp.where(half <= _LARGEST, half, jnp.nan)
    middle, half = low + half, _widened(half, bits)
    distance = half * (1 / _centre(bits))
    small = 2.0**-2  # so that the inverse of the largest range is no subnormal number
    factor = jnp.where(half > 0, reciprocal(half * small) * (_centre(bits) * small), 0)
    return (middle, distance), (factor, _centre(bits) - middle * factor)


def from_centred(
    levels: UInt[Array, "..."], middle: Float[Array, "..."], distance: Float[Array, "..."], bits: int, dtype: jnp.dtype
) -> Float[Array, "..."]:
    """middle + (level - centre) * distance; NaN where the distance is NaN."""
    x = middle + (levels.astype(jnp.float32) - _centre(bits)) * distance
    if dtype == jnp.float32:  # the largest numbers of 16 bits are too far from float32's to be rounded to infinity
        x = jnp.where(x > _LARGEST, _LARGEST, jnp.where(x < -_LARGEST, -_LARGEST, x))  # a kernel's maximum loses a NaN
    return x.astype(dtype)
