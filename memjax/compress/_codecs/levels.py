"""Evenly spaced levels between a least and a largest value, for floats of any size.

A range beyond float32's largest value, from -3e38 to 3e38, is kept at half its size. Its distance of levels is negative, which
tells it from others.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

_LARGEST = float(jnp.finfo(jnp.float32).max)
# Distances below this have no inverse in float32: levels are no closer.
_LEAST_DISTANCE = 2.0**-125
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
    distance = jnp.where(high - low > 0, jnp.maximum(distance, _LEAST_DISTANCE), 0) * jnp.where(fits, 1.0, -1.0)
    return low, jnp.where(jnp.isfinite(low) & jnp.isfinite(high), distance, jnp.nan)


def to_levels(
    x: Float[Array, "..."], low: Float[Array, "..."], distance: Float[Array, "..."], bits: int, offset: Array | float
) -> Float[Array, "..."]:
    """floor((x - low) / distance + offset), between 0 and 2^bits - 1, as float32; zero where the distance is zero."""
    size = jnp.abs(distance)
    part = jnp.where(size > _LARGE_DISTANCE, 1 / _DIVISOR, 1.0)
    inverse = jnp.where(size >= _LEAST_DISTANCE, 1 / (size * part), 0)
    scale = jnp.where(distance < 0, 0.5, 1.0) * part
    level = jnp.floor((x.astype(jnp.float32) * scale - low * part) * inverse + offset)
    return jnp.clip(level, 0, 2**bits - 1)


def from_levels(
    levels: UInt[Array, "..."], low: Float[Array, "..."], distance: Float[Array, "..."]
) -> Float[Array, "..."]:
    """low + level * distance, float32; NaN where the distance is NaN."""
    x = (low + levels.astype(jnp.float32) * jnp.abs(distance)) * jnp.where(distance < 0, 2.0, 1.0)
    return jnp.clip(x, -_LARGEST, _LARGEST)
