"""Bitmaps: which of a lane's values are zero.

A column has a bitmap, two words, only if some of its values are zero and some are not. Neighbouring channels of a ReLU are often
all zero, or nowhere zero, over 64 neighbouring places; the header tells which columns without a bitmap are zero. If both columns
have bitmaps, each of the four words is that of a group; the bitmap of one column has the halves of two groups in a word.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool

from memjax.compress._codecs.bits import Words, u32
from memjax.compress._error_bounded.warp import Warp


class Bitmaps(NamedTuple):
    """The bitmaps of lanes.

    Attributes:
      first, second: whether the lane's first and second column have a bitmap.
      others_zero: whether a column without a bitmap is zero, rather than without zeros. If neither column has a bitmap it is set
        for raw lanes only.
    """

    first: Bool[Array, "..."]
    second: Bool[Array, "..."]
    others_zero: Bool[Array, "..."]

    @property
    def any(self) -> Bool[Array, "..."]:
        return self.first | self.second

    @property
    def both(self) -> Bool[Array, "..."]:
        return self.first & self.second

    @property
    def words(self) -> Words:
        """The number of their words."""
        return u32(2) * (u32(self.first) + u32(self.second))

    @classmethod
    def of(cls, mask: Sequence[Words], bits: Words) -> "Bitmaps":
        """The bitmaps that lanes need.

        Args:
          mask: which values are not zero, a word for each group.
          bits: the number of other bits of each such value. If it is 0, a lane without zeros needs a bitmap, too, to be
            distinguished from a lane of zeros.
        """
        some, every = functools.reduce(jnp.bitwise_or, mask), functools.reduce(jnp.bitwise_and, mask)
        some_first, some_second = (some & u32(0xFFFF)) != 0, (some >> 16) != 0
        full_first, full_second = (every & u32(0xFFFF)) == 0xFFFF, (every >> 16) == 0xFFFF
        needed = (some != 0) & (~(full_first & full_second) | (bits == 0))
        return cls(
            needed & some_first & (~full_first | full_second | ~some_second),
            needed & some_second & (~full_second | ~some_first),
            needed & ~(some_first & some_second),
        )

    def pack(self, mask: Sequence[Words], warp: Warp) -> list[Words]:
        """Four words for each lane, of which the last two count only if the lane has both bitmaps."""
        packed = []
        for g, of_both in zip((0, 2), mask[:2], strict=True):
            pair = mask[g : g + 2]
            first, second = warp.bytes_of(pair, (0, 1, 4, 5)), warp.bytes_of(pair, (2, 3, 6, 7))
            packed.append(jnp.where(self.both, of_both, jnp.where(self.first, first, second)))
        return [*packed, *mask[2:]]

    def unpack(self, packed: Sequence[Words], others: Words, warp: Warp) -> list[Words]:
        """The inverse of `pack`; `others` is a word with the bits of columns without a bitmap."""
        mask = []
        for g, of_both in enumerate(packed):
            half = (2, 3) if g % 2 else (0, 1)  # bytes
            pair = packed[g // 2], others
            first, second = warp.bytes_of(pair, (*half, 4, 5)), warp.bytes_of(pair, (4, 5, *half))
            alone = jnp.where(self.first, first, jnp.where(self.second, second, others))
            mask.append(jnp.where(self.both, of_both, alone))
        return mask
