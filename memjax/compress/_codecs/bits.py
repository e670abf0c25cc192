"""Operations on 32-bit words, elementwise: what the codecs pack with."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, UInt32

WORD = 32
Words = UInt32[Array, "..."]


def u32(x) -> Words:
    """`x` as unsigned 32-bit integers; negative numbers wrap."""
    return lax.convert_element_type(x, jnp.uint32)


def shift_left(x: Words, by: Words) -> Words:
    """`x << by`, which is zero for `by` >= 32 on every backend."""
    return jnp.where(by < WORD, x << (by & u32(WORD - 1)), u32(0))


def shift_right(x: Words, by: Words) -> Words:
    """`x >> by`, which is zero for `by` >= 32 on every backend."""
    return jnp.where(by < WORD, x >> (by & u32(WORD - 1)), u32(0))


def bit_length(x: Words) -> Words:
    """Bits needed to write x: 0 for 0, 1 for 1, 2 for 2 and 3."""
    return u32(WORD) - lax.clz(x)


def pack(bits: Bool[Array, "... n"]) -> UInt32[Array, "... m"]:
    """32 booleans a word, the first in the lowest bit; n must be a multiple of 32."""
    bits = bits.reshape(*bits.shape[:-1], bits.shape[-1] // WORD, WORD)
    # Distinct bits: their sum is their union.
    return jnp.sum(u32(bits) << jnp.arange(WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def unpack(words: UInt32[Array, "... m"]) -> Bool[Array, "... n"]:
    """The inverse of `pack`."""
    bits = (words[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & u32(1)
    return (bits != 0).reshape(*words.shape[:-1], words.shape[-1] * WORD)


class Moves(NamedTuple):
    """Which bits move by 1, 2, 4, 8 and 16 places: down in `compress`, and up in `expand`.

    Attributes:
      high, low: masks of these bits before and after moving down, for each distance.
      dense: the mask of all bits when they are together at the low end.
    """

    high: list[Words]
    low: list[Words]
    dense: Words


def moves_of(mask: Words) -> Moves:
    """The moves that `compress` a mask's bits.

    Warren, "Hacker's Delight", section 7-4: the distance of a bit is the number of zeros of the mask below it; its
    binary digits are found by parallel prefixes of exclusive ors.
    """
    high, low = [], []
    below = ~mask << 1
    for i in range(5):
        odd = below
        for j in range(5):
            odd = odd ^ (odd << (1 << j))
        high.append(odd & mask)
        low.append(high[i] >> (1 << i))
        mask = mask ^ high[i] | low[i]
        below = below & ~odd
    return Moves(high, low, mask)


def compress(x: Words, moves: Moves) -> Words:
    """The bits of `x` selected by the mask of `moves`, moved together to the low end."""
    for i, low in enumerate(moves.low):
        x = (x & ~low) | ((x >> (1 << i)) & low)  # bits that moved away also stay, where nothing reads them
    return x & moves.dense


def expand(x: Words, moves: Moves, mask: Words) -> Words:
    """The inverse of `compress`. It reads as many bits of `x` as `mask` has."""
    for i in reversed(range(5)):
        x = x ^ ((x ^ (x << (1 << i))) & moves.high[i])
    return x & mask
