"""Levels of two neighbouring channels in one number, as a kernel writes them: 4 bits each in a byte, or 8 bits each in two bytes.

In memory they are what XLA has as an array of 4-bit or 8-bit numbers.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt

PAIR = {4: jnp.uint8, 8: jnp.uint16}


def paired(levels: Int[Array, "rows channels"], bits: int) -> Int[Array, "rows pairs"]:
    """Pairs of levels, the first in the lower bits; in a kernel. What `levels` have above the lowest bits does not matter."""
    pairs = (levels & (2**bits - 1)).reshape(levels.shape[0], -1, 2)
    return jnp.sum(pairs << (bits * lax.broadcasted_iota(jnp.int32, pairs.shape, 2)), axis=2)


def as_pairs(levels: UInt[Array, "... channels"], bits: int) -> UInt[Array, "... pairs"]:
    """The same of XLA's numbers of so many bits."""
    pairs = levels.reshape(*levels.shape[:-1], -1, 2)
    return lax.bitcast_convert_type(pairs, PAIR[bits])


def apart(levels: UInt[Array, "... numbers"], channels: int) -> UInt[Array, "... channels"]:
    """The levels, of what may be pairs of them."""
    if levels.shape[-1] == channels:
        return levels
    alone = jnp.uint8 if levels.dtype == jnp.uint16 else jnp.uint4
    return lax.bitcast_convert_type(levels, alone).reshape(*levels.shape[:-1], channels)


def unpaired(pairs: Int[Array, "rows pairs"], bits: int) -> Int[Array, "rows channels"]:
    """The levels of pairs; in a kernel."""
    places = bits * lax.broadcasted_iota(jnp.int32, (*pairs.shape, 2), 2)
    return ((pairs[:, :, None] >> places) & (2**bits - 1)).reshape(pairs.shape[0], -1)
