"""Random bits that depend on a place in an array, a step and a purpose alone: no generator, reproducible on any mesh."""

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

from memjax.compress._codecs.bits import u32

SIGNED, SQUARE, WEIGHT = range(3)
"""What is rounded: moments of both kinds and a weight have numbers of their own at one place, of a hash that they share."""

_LAST = (0xC2B2AE35, 0x9E3779B1, 0x85EBCA77)  # multipliers, for each


def seed(step: Int32[Array, ""], salt: int) -> UInt32[Array, ""]:
    """The seed of an array's random bits in a step. `salt` tells arrays apart that are rounded for the same purpose."""
    return _mixed(_mixed(step.astype(jnp.uint32)) + u32(salt))


def at(place: UInt32[Array, "..."], seed: UInt32[Array, ""], purpose: int) -> UInt32[Array, "..."]:
    """32 bits for each place, of which the upper ones are good: each depends on all of the place and the seed.

    Seven operations for the three purposes, instead of ten for each: integer operations are what bounds the kernel.
    """
    x = place * u32(0x7FEB352D) + seed
    return (x ^ (x >> u32(15))) * u32(_LAST[purpose])


def _mixed(x: UInt32[Array, ""]) -> UInt32[Array, ""]:
    """A bijection under which each bit depends on all (lowbias32, by C. Wellons)."""
    x = (x ^ (x >> u32(16))) * u32(0x7FEB352D)
    x = (x ^ (x >> u32(15))) * u32(0x846CA68B)
    return x ^ (x >> u32(16))
