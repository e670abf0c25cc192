"""How an array is cut into tiles, and what a code of a tile looks like. All that encodes and decodes agrees on this.

An array is seen as a matrix of `columns` columns. If its last axis has a multiple of 64 channels and a multiple of 64
values per channel, the columns are the channels, so that values coded together belong to two channels; if not, it
is taken flat, 64 values a row, and padded with zeros. A tile is 64 rows by 64 columns; tiles go by columns first. It has
32 lanes of two neighbouring columns: 128 values, in four groups of 32 rows of a column: (rows 0 to 31, first column),
(rows 0 to 31, second), (rows 32 to 63, first), (rows 32 to 63, second).

A lane is coded by itself, into `count` words of 32 bits, from low to high bits, as one of

    nothing           all values are zero
    raw               its values as they are, row by row: 64 words of 16-bit values, or 128 of 32-bit ones
    bitmap, planes    the bitmap of values that are not zero (a word per group), left out if none is zero and something
                      follows; then, over those values, in the order of groups and rows: a bit each for the sign,
                      left out if all are positive, and for every plane p < `planes` bit p of `q - 1`

where q >= 1 is the quantised magnitude. The 16-bit header of a lane:

    bits 0 to 7 count   8 to 12 planes   13 signs   14 bitmap   15 raw

The lanes of a tile follow each other; where a tile begins is its `offset`. Tiles lie in any order, without gaps.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt32

from memjax.compress._bits import u32

ROWS = COLUMNS = 64
LANES = 32
GROUPS = 4
LANE_VALUES = 128
TILE_VALUES = ROWS * COLUMNS
BITMAP_WORDS = 4

PLANES_SHIFT, SIGNS_SHIFT, BITMAP_SHIFT, RAW_SHIFT = 8, 13, 14, 15

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def raw_words(dtype) -> int:
    """Words of a raw lane."""
    return LANE_VALUES * jnp.dtype(dtype).itemsize // 4


def max_planes(dtype) -> int:
    """Planes beyond which a lane is stored raw. Past 2^8 a 16-bit float is so near its own step that raw is as short."""
    return 16 if jnp.dtype(dtype).itemsize == 4 else 8


def max_code(dtype) -> int:
    """The largest quantised magnitude of a lane that is not raw."""
    return 2 ** max_planes(dtype) - 1


@dataclasses.dataclass(frozen=True)
class Grid:
    """The matrix that an array is seen as.

    Attributes:
      size: values of the array.
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

    def split(self, x: Array) -> Array:
        """(tiles, 64, 32, 2): row, lane, and the lane's column; for any dtype."""
        flat = x.reshape(-1)
        padding = self.rows * self.columns - self.size
        if padding:
            flat = jnp.concatenate([flat, jnp.zeros(padding, x.dtype)])
        split = flat.reshape(self.rows // ROWS, ROWS, self.columns // COLUMNS, LANES, 2)
        return split.transpose(0, 2, 1, 3, 4).reshape(self.tiles, ROWS, LANES, 2)

    def join(self, tiles: Array, shape: tuple[int, ...]) -> Array:
        """The inverse of `split`."""
        split = tiles.reshape(self.rows // ROWS, self.columns // COLUMNS, ROWS, LANES, 2)
        return split.transpose(0, 2, 1, 3, 4).reshape(-1)[: self.size].reshape(shape)


def to_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """The bits of `x`, as the low bits of a word."""
    unsigned = jnp.uint32 if x.dtype.itemsize == 4 else jnp.uint16
    return u32(lax.bitcast_convert_type(x, unsigned))


def from_bits(bits: UInt32[Array, "..."], dtype) -> Float[Array, "..."]:
    """The inverse of `to_bits`."""
    unsigned = jnp.uint32 if jnp.dtype(dtype).itemsize == 4 else jnp.uint16
    return lax.bitcast_convert_type(bits.astype(unsigned), dtype)
