"""Evenly spaced levels between a least and a largest value, for floats of any size.

A range beyond float32's largest value, from -3e38 to 3e38, is kept at half its size. Its distance of levels is negative, which
tells it from others.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

_LARGEST = float(jnp.finfo(jnp.float32).max)
# Distances below this have no inverse in float32.
_LEAST_DISTANCE = 2.0**-125
# Those above this have one that counts as zero, of 2 bits the largest: they are divided first.
_LARGE_DISTANCE, _DIVISOR = 2.0**100, 2.0**26


def levels_between(low: Float[Array, "..."], high: Float[Array, "..."], bits: int) -> tuple[Array, Array]:
    """The lowest of 2^bits levels from `low` to `high` and their distance, float32, for `to_levels` and `from_levels`.

    The distance is NaN if `low` or `high` is not finite.
    """
    fits = jnp.isfinite(high - low)
    scale = jnp.where(fits, 1.0, 0.5)
    low, high = low * scale, high * scale
    distance = (high - low) / (2**bits - 1) * jnp.where(fits, 1.0, -1.0)
    return low, jnp.where(jnp.isfinite(low) & jnp.isfinite(high), distance, jnp.nan)


def to_levels(
    x: Float[Array, "..."], low: Float[Array, "..."], distance: Float[Array, "..."], bits: int, offset: Array | float
) -> Float[Array, "..."]:
    """floor((x - low) / distance + offset), between 0 and 2^bits - 1, as float32; zero where the distance is (nearly) zero."""
    size = jnp.abs(distance)
    part = jnp.where(size > _LARGE_DISTANCE, 1 / _DIVISOR, 1.0)
    inverse = jnp.where(size >= _LEAST_DISTANCE, 1 / (size * part), 0)
    scale = jnp.where(distance < 0, 0.5, 1.0) * part
    level = jnp.floor((x.astype(jnp.float32) * scale - low * part) * inverse + offset)
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
    fits = half <= _LARGEST / 2
    distance = half * (jnp.where(fits, 2.0, -1.0) / (2**bits - 1))
    distance = jnp.where(half <= _LARGEST, distance, jnp.nan)
    small = 2.0**-2  # so that the inverse of the largest range is no subnormal number
    least = (2**bits - 1) * 2.0**-126
    factor = jnp.where(half >= least, reciprocal(half * small) * ((2**bits - 1) / 2 * small), 0)
    return (jnp.where(fits, low, low * 0.5), distance), (factor, -low * factor)


def from_levels(
    levels: UInt[Array, "..."], low: Float[Array, "..."], distance: Float[Array, "..."]
) -> Float[Array, "..."]:
    """low + level * distance, float32; NaN where the distance is NaN."""
    x = (low + levels.astype(jnp.float32) * jnp.abs(distance)) * jnp.where(distance < 0, 2.0, 1.0)
    return jnp.clip(x, -_LARGEST, _LARGEST)
