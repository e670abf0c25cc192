"""The bits of a group's values, from a word per four values to a word per plane and back.

Word j of eight holds in byte i the value of row 8 i + j. So there are four 8 by 8 matrices of bits, which three rounds of
swaps transpose: plane p's word has in bit 8 i + j, that is for row 8 i + j, bit p of the value.
"""

from collections.abc import Sequence

from memjax.compress._bits import Words, u32

_LOW = {4: 0x0F0F0F0F, 2: 0x33333333, 1: 0x55555555}


def transpose(words: Sequence[Words], used: int = 8) -> list[Words]:
    """Planes of eight words of bytes, and the inverse.

    Args:
      used: 4 if the upper half of every byte is zero: then four planes.
    """
    if used == 4:
        return _rounds([words[j] | (words[j + 4] << 4) for j in range(4)], (2, 1))
    return _rounds(list(words), (4, 2, 1))


def _rounds(words: list[Words], distances: Sequence[int]) -> list[Words]:
    for distance in distances:
        low, high = u32(_LOW[distance]), u32(0xFFFFFFFF ^ _LOW[distance])
        for j in range(len(words)):
            if not j & distance:
                a, b = words[j], words[j + distance]
                words[j] = (a & low) | ((b & low) << distance)
                words[j + distance] = ((a >> distance) & low) | (b & high)
    return words


def decrement(planes: Sequence[Words]) -> list[Words]:
    """Planes of q - 1 from those of q, where q is not zero."""
    borrow, out = u32(0xFFFFFFFF), []
    for plane in planes:
        out.append(plane ^ borrow)
        borrow = borrow & (plane ^ u32(0xFFFFFFFF))
    return out


def increment(planes: Sequence[Words], mask: Words) -> list[Words]:
    """Planes of q from those of q - 1 where `mask` is set; elsewhere they stay."""
    carry, out = mask, []
    for plane in planes:
        out.append(plane ^ carry)
        carry = plane & carry
    return out
