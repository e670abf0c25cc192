"""Transposes the bits of a group's values, from a word per four values to a word per plane and back.

Word j of eight holds in byte i the value of row 8 i + j. So there are four 8 by 8 matrices of bits, which three rounds of
swaps transpose: plane p's word has in bit 8 i + j, that is for row 8 i + j, bit p of the value.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from memjax.compress._codecs.bits import Words
from memjax.compress._error_bounded.warp import Warp

_LOW = {4: 0x0F0F0F0F, 2: 0x33333333, 1: 0x55555555}


def transpose(words: Sequence[Words], warp: Warp) -> list[Words]:
    """The eight planes of eight words of bytes, and the inverse. Fewer words count as if the others were zero."""
    words = [*words, *[jnp.zeros_like(words[0])] * (8 - len(words))]
    for distance, low in _LOW.items():
        for j in range(8):
            if not j & distance:
                a, b = words[j], words[j + distance]
                words[j] = warp.choose(low, a, b << distance)
                words[j + distance] = warp.choose(low, a >> distance, b)
    return words


def increment(planes: Sequence[Words], carry: Words) -> list[Words]:
    """Planes of the numbers plus one where `carry` is set; the highest carry is lost."""
    out = []
    for plane in planes:
        out.append(plane ^ carry)
        carry = plane & carry
    return out


def carries(planes: Sequence[Words], others: Sequence[Words]) -> Words:
    """Where the sum of two numbers has one bit more than the numbers."""
    carry = planes[0] & others[0]
    for a, b in zip(planes[1:], others[1:], strict=True):
        carry = (a & b) | (carry & (a | b))
    return carry
