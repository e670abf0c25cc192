"""The operations of `_bits` that take many instructions, as loops: programs that compile in a fraction of the time.

For the reference implementation, which is compiled once for every array of a network. The kernels unroll theirs.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, UInt32

from memjax.compress._codecs.bits import Words, u32

_STEPS = 5  # by 1, 2, 4, 8 and 16 places


class Moves(NamedTuple):
    """Which bits move by 1, 2, 4, 8, 16 places: see `_bits.Moves`. Bits before they move down."""

    high: UInt32[Array, "5 ..."]
    dense: Words


def moves_of(mask: Words) -> Moves:
    """Those that `compress` a mask's bits: `_bits.moves_of`."""

    def step(i, carry):
        below, mask, high = carry
        odd = lax.fori_loop(0, _STEPS, lambda j, odd: odd ^ (odd << _places(j)), below)
        moved = odd & mask
        high = lax.dynamic_update_index_in_dim(high, moved, i, 0)
        return below & ~odd, mask ^ moved | (moved >> _places(i)), high

    high = jnp.broadcast_to(mask, (_STEPS, *mask.shape))
    _, dense, high = lax.fori_loop(0, _STEPS, step, (~mask << 1, mask, high))
    return Moves(high, dense)


def compress(x: Words, moves: Moves) -> Words:
    """The bits of `x` selected by the mask of `moves`, moved together to the low end."""

    def step(i, x):
        low = moves.high[i] >> _places(i)
        return (x & ~low) | ((x >> _places(i)) & low)

    return lax.fori_loop(0, _STEPS, step, x) & moves.dense


def expand(x: Words, moves: Moves, mask: Words) -> Words:
    """The inverse of `compress`. Bits of `x` beyond as many as `mask` has are ignored."""

    def step(i, x):
        i = _STEPS - 1 - i
        return x ^ ((x ^ (x << _places(i))) & moves.high[i])

    return lax.fori_loop(0, _STEPS, step, x) & mask


def running_sum(x: UInt32[Array, "... n"]) -> UInt32[Array, "... n"]:
    """Sums of the values up to each, along a short last axis: a sum of all pairs, which compiles faster than a tree of sums."""
    return jnp.sum(jnp.where(jnp.tri(x.shape[-1], dtype=bool), x[..., None, :], u32(0)), -1, dtype=jnp.uint32)


def _places(i: Int32[Array, ""]) -> UInt32[Array, ""]:
    return u32(1) << u32(i)
