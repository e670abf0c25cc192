"""Random bits that depend on a place in an array, a step and a purpose alone: no generator, reproducible on any mesh."""

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

from memjax.compress._codecs.bits import places, u32


def random_bits(shape: tuple[int, ...], step: Int32[Array, ""], salt: int) -> UInt32[Array, "..."]:
    """32 bits for each value of an array, others for each step and each salt."""
    seed = _mixed(_mixed(step.astype(jnp.uint32)) + u32(salt))
    return _mixed(places(shape) ^ seed)


def _mixed(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection under which each bit depends on all (lowbias32, by C. Wellons)."""
    x = (x ^ (x >> u32(16))) * u32(0x7FEB352D)
    x = (x ^ (x >> u32(15))) * u32(0x846CA68B)
    return x ^ (x >> u32(16))
