"""Which of a lane's values are zero.

A column has a bitmap of its own, two words, only where some of its values are zero and some are not: neighbouring channels of a
ReLU are often all zero, or none of them, over 64 neighbouring places. Of columns without one a header says which they are.
Words of both columns are those of groups; a column alone has the halves of two groups in a word.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool

from memjax.compress._codecs.bits import Words, u32
from memjax.compress._error_bounded.warp import Warp


class Bitmaps(NamedTuple):
    """Of lanes.

    Attributes:
      first, second: whether the column has a bitmap.
      others_zero: whether a column without is zero, rather than without zeros; where neither has one it is set of raw lanes only.
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
        """How many."""
        return u32(2) * (u32(self.first) + u32(self.second))

    @classmethod
    def of(cls, mask: Sequence[Words], bits: Words) -> "Bitmaps":
        """Those that lanes need.

        Args:
          mask: of the values that are not zero, a word for each group.
          bits: that each of them has besides. Without any, a lane without zeros needs a bitmap, to be told from one of zeros.
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
        """Four words; the last two only of lanes that have both bitmaps."""
        packed = []
        for g, of_both in zip((0, 2), mask[:2], strict=True):
            pair = mask[g : g + 2]
            first, second = warp.bytes_of(pair, (0, 1, 4, 5)), warp.bytes_of(pair, (2, 3, 6, 7))
            packed.append(jnp.where(self.both, of_both, jnp.where(self.first, first, second)))
        return [*packed, *mask[2:]]

    def unpack(self, packed: Sequence[Words], others: Words, warp: Warp) -> list[Words]:
        """The inverse; `others` are columns without a bitmap."""
        mask = []
        for g, of_both in enumerate(packed):
            own = (2, 3) if g % 2 else (0, 1)  # bytes
            pair = packed[g // 2], others
            first, second = warp.bytes_of(pair, (*own, 4, 5)), warp.bytes_of(pair, (4, 5, *own))
            alone = jnp.where(self.first, first, jnp.where(self.second, second, others))
            mask.append(jnp.where(self.both, of_both, alone))
        return mask
