"""The format of `ErrorBounded`: how an array is cut into tiles, and how a tile is coded.

An array is seen as a matrix of `columns` columns. If its last axis has a multiple of 64 channels and a multiple of 64
values per channel, the columns are the channels, so that values coded together belong to two neighbouring channels; if
not, it is taken flat, 64 values a row, and padded with zeros. A tile is 64 rows by 64 columns; tiles go by columns first,
and so do their words, without gaps; where those of a tile begin is its `offset`.

Two neighbouring columns of a tile, which one load reads, are a lane: 128 values in four groups of 16 rows. Value 8 i + j
of a group is in its row 8 (i mod 2) + j and in column i div 2 of the two, so that the code of row j is in the bytes of a
word as its values are in pairs. A lane is coded as one of

    nothing           all values are zero
    raw               its values as they are
    bitmaps, planes   pieces of bits, from low to high bits of words of 32, the last one filled up with zeros: bitmaps of
                      values that are not zero, of one column or both (`Bitmaps`), left out if none is zero and something
                      follows; then, over those values, in order: a bit each for the sign, left out if all are
                      positive, and for every one of `planes` planes a bit of the quantised magnitude, the lowest first

The 8-bit header of a lane:

    bits 0 to 3 planes   4 signs   5, 6 bitmaps of the first and the second column   7 a column without bitmap is zero

A raw lane's is bit 7 alone.

The words of the lanes of a tile are interleaved in the order in which a decoder needs them that decodes all lanes side by
side, a piece (a word of the bitmaps, or a group of the signs or of a plane) at a time. After the bitmaps come the first words of
lanes, by lane, then the words that lanes begin in the first piece, by lane, then those that they begin in the second, and so on.
So neighbouring lanes read and write neighbouring words. The words of the raw lanes follow, row by row: both values of a row in
one word, or a word for each.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Shaped, UInt, UInt32

from memjax.compress._codecs.bits import Words, u32

ROWS, COLUMNS = 64, 64  # of a tile
TILE_VALUES = ROWS * COLUMNS
LANES = 32
LANE_VALUES = 128
GROUPS = 4

PLANES, SIGNS, FIRST_BITMAP, SECOND_BITMAP, OTHERS_ZERO = 15, 16, 32, 64, 128
RAW = 128


def raw_words(dtype) -> int:
    """Words of a raw lane."""
    return LANE_VALUES * jnp.dtype(dtype).itemsize // 4


def max_planes(dtype) -> int:
    """Planes beyond which a lane is stored raw. Past 2^8 a 16-bit float is so near its own step that raw is as short."""
    return 15 if jnp.dtype(dtype).itemsize == 4 else 8


@dataclasses.dataclass(frozen=True)
class Grid:
    """The matrix that an array is seen as.

    Attributes:
      columns: a multiple of 64.
      by_channel: whether columns are the array's last axis.
    """

    size: int
    columns: int
    by_channel: bool

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> "Grid":
        size = math.prod(shape)
        channels = shape[-1] if shape else 1
        by_channel = size > 0 and channels % COLUMNS == 0 and (size // channels) % ROWS == 0
        return cls(size, channels if by_channel else COLUMNS, by_channel)

    @property
    def rows(self) -> int:
        """Rows, padding included: a multiple of 64."""
        return -(-self.size // (self.columns * ROWS)) * ROWS

    @property
    def tiles(self) -> int:
        return self.rows * self.columns // TILE_VALUES

    def matrix(self, x: Array) -> Array:
        """(rows, columns): `x`, and zeros."""
        flat = x.reshape(-1)
        if padding := self.rows * self.columns - self.size:
            flat = jnp.concatenate([flat, jnp.zeros(padding, x.dtype)])
        return flat.reshape(self.rows, self.columns)

    def corner(self, tile: Int32[Array, ""]) -> tuple[Array, Array]:
        """The row and the column of a tile's first value."""
        across = jnp.int32(self.columns // COLUMNS)
        return lax.div(tile, across) * ROWS, lax.rem(tile, across) * COLUMNS

    def index(self, tile: Int32[Array, ""]) -> Int32[Array, "64 64"]:
        """The index in memory of each value of a tile."""
        row, column = self.corner(tile)
        down, right = (jnp.arange(length, dtype=jnp.int32) for length in (ROWS, COLUMNS))
        return (row + down[:, None]) * self.columns + column + right


def lanes(tile: Shaped[Array, "64 64"]) -> Shaped[Array, "4 32 32"]:
    """Rearranges a tile as (groups, values of a group, lanes)."""
    return tile.reshape(GROUPS, 16, LANES, 2).transpose(0, 3, 1, 2).reshape(GROUPS, LANES, LANES)


def rows(values: Shaped[Array, "4 32 32"]) -> Shaped[Array, "64 64"]:
    """The inverse of `lanes`."""
    return values.reshape(GROUPS, 2, 16, LANES).transpose(0, 2, 3, 1).reshape(ROWS, COLUMNS)


def unsigned(dtype) -> Any:
    """The unsigned integer dtype of the same width as a float dtype."""
    return jnp.uint32 if jnp.dtype(dtype).itemsize == 4 else jnp.uint16


def to_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """The bits of `x`, as the low bits of a word."""
    return u32(lax.bitcast_convert_type(x, unsigned(x.dtype)))


def from_bits(bits: UInt[Array, "..."], dtype) -> Float[Array, "..."]:
    """The inverse of `to_bits`."""
    return lax.bitcast_convert_type(bits.astype(unsigned(dtype)), dtype)


# Bitmaps: which of a lane's values are zero.
#
# A column has a bitmap, two words, only if some of its values are zero and some are not. Neighbouring channels of a
# ReLU are often all zero, or nowhere zero, over 64 neighbouring places; the header tells which columns without a bitmap
# are zero. If both columns have bitmaps, each of the four words is that of a group; the bitmap of one column has the
# halves of two groups in a word.


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
        """The number of words that the bitmaps take."""
        return u32(2) * (u32(self.first) + u32(self.second))

    @classmethod
    def of(cls, mask: Sequence[Words], bits: Words) -> "Bitmaps":
        """Decides which bitmaps each lane needs.

        Args:
          mask: which values are nonzero, one word per group.
          bits: for each lane, bits stored per nonzero value besides the bitmap (planes and sign). If this is 0, a lane without
            zeros also gets a bitmap; without one it could not be told from an all-zero lane.
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

    def pack(self, mask: Sequence[Words], warp: Any) -> list[Words]:
        """Packs the bitmaps into four words per lane; the last two are valid only if the lane has both bitmaps."""
        packed = []
        for g, of_both in zip((0, 2), mask[:2], strict=True):
            pair = mask[g : g + 2]
            first, second = warp.bytes_of(pair, (0, 1, 4, 5)), warp.bytes_of(pair, (2, 3, 6, 7))
            packed.append(jnp.where(self.both, of_both, jnp.where(self.first, first, second)))
        return [*packed, *mask[2:]]

    def unpack(self, packed: Sequence[Words], others: Words, warp: Any) -> list[Words]:
        """The inverse of `pack`; `others` is a word with the bits of columns without a bitmap."""
        mask = []
        for g, of_both in enumerate(packed):
            half = (2, 3) if g % 2 else (0, 1)  # bytes
            pair = packed[g // 2], others
            first, second = warp.bytes_of(pair, (*half, 4, 5)), warp.bytes_of(pair, (4, 5, *half))
            alone = jnp.where(self.first, first, jnp.where(self.second, second, others))
            mask.append(jnp.where(self.both, of_both, alone))
        return mask
