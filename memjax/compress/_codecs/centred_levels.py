"""Evenly spaced levels on both sides of a middle, for floats of any size.

A level is decoded to `middle + (level - centre) * distance`. So no step overflows, even of ranges beyond float32's largest value,
as from -3e38 to 3e38, and decoding takes three operations on a value.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

_LARGEST = float(jnp.finfo(jnp.float32).max)
# Distances below this have no inverse in float32: levels are no closer.
_LEAST_DISTANCE = 2.0**-125
# Those above this have one that counts as zero, of 2 bits the largest: they are divided first.
_LARGE_DISTANCE, _DIVISOR = 2.0**100, 2.0**26


def centre(bits: int) -> float:
    """The mean of the levels."""
    return (2**bits - 1) / 2


def levels_between(low: Float[Array, "..."], high: Float[Array, "..."], bits: int) -> tuple[Array, Array]:
    """The middle of 2^bits levels from `low` to `high` and their distance, float32; NaN where an end is not finite.

    Where the ends differ the distance is 2^-125 at least.
    """
    half = high * 0.5 - low * 0.5
    half = jnp.where(half <= _LARGEST, half, jnp.nan)
    return low + half, _widened(half, bits) / centre(bits)


def _widened(half: Float[Array, "..."], bits: int) -> Float[Array, "..."]:
    """Half a range, or of a narrower one that is not empty half of what levels at their least distance reach over."""
    return jnp.where(
        half > 0, jnp.where(half < centre(bits) * _LEAST_DISTANCE, centre(bits) * _LEAST_DISTANCE, half), half
    )


def to_levels(x: Float[Array, "..."], middle: Float[Array, "..."], distance: Float[Array, "..."], bits: int) -> Array:
    """The nearest level of each value, float32; any where the distance is zero."""
    part = jnp.where(distance > _LARGE_DISTANCE, 1 / _DIVISOR, 1.0)
    inverse = jnp.where(distance >= _LEAST_DISTANCE, 1 / (distance * part), 0)
    level = jnp.floor((x.astype(jnp.float32) * part - middle * part) * inverse + (centre(bits) + 0.5))
    return jnp.clip(level, 0, 2**bits - 1)


def levels_of_16_bits(
    low: Float[Array, "..."], high: Float[Array, "..."], bits: int, reciprocal: Callable[[Array], Array]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """What `levels_between` gives, but for last digits, and a factor and a shift: `x * factor + shift` is x's level, not rounded.

    That is off by 1 / 32 at most for values of 16 bits, for different ones are no closer than 2^-11 of their size. All of it
    takes few instructions.

    Args:
      reciprocal: of positive numbers between 2^-126 and 2^126.
    """
    half = high * 0.5 - low * 0.5
    half = jnp.where(half <= _LARGEST, half, jnp.nan)
    middle, half = low + half, _widened(half, bits)
    distance = half * (1 / centre(bits))
    small = 2.0**-2  # so that the inverse of the largest range is no subnormal number
    factor = jnp.where(half > 0, reciprocal(half * small) * (centre(bits) * small), 0)
    return (middle, distance), (factor, centre(bits) - middle * factor)


def from_levels(
    levels: UInt[Array, "..."], middle: Float[Array, "..."], distance: Float[Array, "..."], bits: int, dtype: jnp.dtype
) -> Float[Array, "..."]:
    """middle + (level - centre) * distance; NaN where the distance is NaN."""
    x = middle + (levels.astype(jnp.float32) - centre(bits)) * distance
    if dtype == jnp.float32:  # the largest numbers of 16 bits are too far from float32's to be rounded to infinity
        x = jnp.where(x > _LARGEST, _LARGEST, jnp.where(x < -_LARGEST, -_LARGEST, x))  # a kernel's maximum loses a NaN
    return x.astype(dtype)
