"""`Where`: locates the values and words of a tile in memory, for kernels to read and write."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from memjax.compress._codecs.bits import Words, u32
from memjax.compress._error_bounded import tiles
from memjax.compress._error_bounded.quantize import dither_bits, dither_planes
from memjax.compress._error_bounded.tiles import COLUMNS, GROUPS, LANES, ROWS, Grid
from memjax.compress._error_bounded.warp import Pair, Warp

RAW_ROWS = 16  # of raw lanes, copied at once


@dataclasses.dataclass(frozen=True)
class Layout:
    """The parameters that a kernel is compiled for. It reads sizes at run time (`sizes`), so that few kernels are compiled.

    Attributes:
      is_padded: whether the last tile has more values than the array.
      exponents: the exponents of steps: "one" for all, one for each "column", or one for each "value".
    """

    dtype: jnp.dtype
    is_padded: bool
    exponents: str

    @classmethod
    def of(cls, grid: Grid, dtype, exponents: int) -> "Layout":
        varying = "column" if grid.columns % exponents == 0 else "value"
        is_padded = grid.size != grid.tiles * tiles.TILE_VALUES
        return cls(jnp.dtype(dtype), is_padded, "one" if exponents == 1 else varying)


def sizes(grid: Grid, exponents: int, capacity: int) -> np.ndarray:
    """The sizes that a kernel reads at run time, as int32: matrix columns, array size, number of exponents, capacity in words."""
    return np.array([grid.columns, grid.size, exponents, capacity], np.int32)


@dataclasses.dataclass(frozen=True)
class Where:
    """A tile in memory. A lane reads pairs of values: those in its two columns of a row.

    Attributes:
      tile: the tile's number.
      first: for each lane, the index of its pair in the tile's first row.
      column: for each lane, the first of its columns in the matrix.
      row_pairs: number of pairs in a row of the matrix.
      sizes_ref: see `sizes`.
    """

    layout: Layout
    warp: Warp
    tile: Int32[Array, ""]
    first: Int32[Array, "32"]
    column: Int32[Array, "32"]
    row_pairs: Int32[Array, ""]
    sizes_ref: Any

    @classmethod
    def of(cls, layout: Layout, warp: Warp, tile: Int32[Array, ""], sizes_ref) -> "Where":
        row_pairs = lax.div(sizes_ref[0], jnp.int32(2))
        across = lax.div(row_pairs, jnp.int32(LANES))
        down, right = lax.div(tile, across), lax.rem(tile, across)
        lane = jnp.arange(LANES, dtype=jnp.int32)
        first = warp.opaque(down * (ROWS * row_pairs) + right * LANES)
        return cls(layout, warp, tile, first + lane, right * COLUMNS + 2 * lane, row_pairs, sizes_ref)

    @property
    def capacity(self) -> Int32[Array, ""]:
        return self.sizes_ref[3]

    def _values(self, row, later, live=None):
        """Yields, for each of the two columns, the indices of values and a mask of those that are in the array and live."""
        pair = self.first + (row + later) * self.row_pairs
        for index in (2 * pair, 2 * pair + 1):
            inside = index < self.sizes_ref[1] if self.layout.is_padded else None
            if live is not None:
                live = jnp.broadcast_to(live, index.shape)
                inside = live if inside is None else inside & live
            yield index, inside

    @property
    def _memory(self):
        """The module of GPU operations, imported late because it needs private parts of JAX."""
        from memjax.compress._error_bounded import kernel_memory

        return kernel_memory

    def _rows(self, row, later):
        return self._memory.Rows(self.first + later * self.row_pairs, row, self.row_pairs)

    def load(self, ref, row: Int32[Array, "..."], later: Int32[Array, ""]) -> list[Words]:
        """Loads the lanes' pairs in rows `row + later`: one word for both values, or one for each if they have 32 bits."""
        from jax.experimental.pallas import triton

        if self.warp.native and not self.layout.is_padded:
            return self._memory.load_pairs(ref, self._rows(row, later))
        first, second = (
            tiles.to_bits(triton.load(ref.at[index], mask=inside, other=None if inside is None else 0))
            for index, inside in self._values(row, later)
        )
        return [first, second] if self.layout.dtype.itemsize == 4 else [first | (second << 16)]

    def store(self, ref, row: Int32[Array, "..."], later: Int32[Array, ""], words: list[Words], live=None) -> None:
        """Stores words as `load` returns them, for the lanes that are `live`."""
        from jax.experimental.pallas import triton

        if self.warp.native and not self.layout.is_padded:
            return self._memory.store_pairs(ref, self._rows(row, later), words, live)
        both = words if len(words) == 2 else [words[0] & u32(0xFFFF), words[0] >> 16]
        for word, (index, inside) in zip(both, self._values(row, later, live), strict=True):
            triton.store(ref.at[index], tiles.from_bits(word, self.layout.dtype), mask=inside)

    def load_words(self, ref, index: Words, live) -> Words:
        """`ref[index]` where `live`, elsewhere zero."""
        from jax.experimental.pallas import triton

        index = index.astype(jnp.int32)
        if self.warp.native:
            return self._memory.load_words(ref, index, live)
        return triton.load(ref.at[index], mask=live, other=0)

    def prefetch(self, ref, index: Int32[Array, "32"]) -> None:
        """Prefetch the words around `ref[index]`, or the last ones."""
        if self.warp.native:
            self._memory.prefetch(ref, jnp.minimum(index, self.capacity - 1))

    def store_words(self, ref, index: Words, word: Words, live) -> None:
        """`ref[index] = word` where `live`."""
        from jax.experimental.pallas import triton

        index = index.astype(jnp.int32)
        if self.warp.native:
            return self._memory.store_words(ref, index, word, live)
        triton.store(ref.at[index], word, mask=live)

    def exponents(self, ref) -> Callable[..., Pair]:
        """A function from rows, `row` and `later`, to the exponents k of the steps of both values."""
        if self.layout.exponents == "value":
            return lambda *row: tuple(ref[lax.rem(index, self.sizes_ref[2])] for index, _ in self._values(*row))
        if self.layout.exponents == "column":
            first = lax.rem(self.column, self.sizes_ref[2])
            same = ref[first], ref[first + 1]
        else:
            same = (jnp.broadcast_to(ref[0], (LANES,)),) * 2
        return lambda *row: same

    def dither(self) -> list[Words]:
        """The planes of the tile's dither."""
        group = jnp.arange(GROUPS, dtype=jnp.int32)[:, None]
        count = dither_bits(self.layout.dtype)
        return dither_planes(count, self.tile, jnp.arange(LANES, dtype=jnp.int32), group)


def rows_of_bytes(words: int, groups: int = GROUPS) -> Int32[Array, "rows groups 1"]:
    """For words one after another, group by group, first the row whose two values' codes are bytes 0 and 2 of the word,
    then that of bytes 1 and 3: see `tiles`.
    """
    row = jnp.arange(2 * words, dtype=jnp.int32)[:, None, None]
    return jnp.arange(groups, dtype=jnp.int32)[:, None] * 16 + 8 * (row % 2) + row // 2


def take(x: Array, index: int) -> Array:
    """`x[index]`, which kernels have no indexing for."""
    chosen = jnp.arange(x.shape[0], dtype=jnp.int32).reshape(-1, *[1] * (x.ndim - 1)) == index
    return jnp.sum(jnp.where(chosen, x, jnp.zeros_like(x)), 0, dtype=x.dtype)


def stack(parts: Sequence[Array]) -> Array:
    """`jnp.stack`."""
    out = jnp.broadcast_to(parts[0][None], (len(parts), *parts[0].shape))
    place = jnp.arange(len(parts), dtype=jnp.int32).reshape(-1, *[1] * parts[0].ndim)
    for i, part in enumerate(parts):
        out = jnp.where(place == i, part[None], out)
    return out


def any_of(x: Words):
    """Whether the word of any group of a lane is not zero."""
    some = take(x, 0)
    for g in range(1, x.shape[0]):
        some = some | take(x, g)
    return some != 0


def any_lane(flags: Words) -> Array:
    return jnp.max(flags.astype(jnp.int32)) > 0


def when(condition: Array, f) -> None:
    """`f()` for its effects."""

    def branch():
        f()

    lax.cond(condition, branch, lambda: None)


# Transposes the bits of a group's values, from a word per four values to a word per plane and back.
#
# Word j of eight holds in byte i the value of row 8 i + j. So there are four 8 by 8 matrices of bits, which three
# rounds of swaps transpose: plane p's word has in bit 8 i + j, that is for row 8 i + j, bit p of the value.

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
