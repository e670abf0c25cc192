"""Where the values of a tile are, seen from a kernel."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from memjax.compress import _tiles
from memjax.compress._bits import Words
from memjax.compress._tiles import GROUPS, LANES, ROWS, Grid
from memjax.compress._warp import Warp


@dataclasses.dataclass(frozen=True)
class Layout:
    """Of an array, flat, and of its code. Frozen and hashable: kernels are compiled for one.

    Attributes:
      capacity: words of the code.
      exponents: how many steps' exponents there are: one, or as many as channels.
    """

    grid: Grid
    dtype: jnp.dtype
    capacity: int
    exponents: int

    @property
    def tiles(self) -> int:
        return self.grid.tiles

    def at(self, tile: Int32[Array, ""], warp: Warp) -> "Where":
        across = self.grid.columns // LANES
        down, right = lax.div(tile, jnp.int32(across)), lax.rem(tile, jnp.int32(across))
        first = warp.opaque(down * (ROWS * self.grid.columns) + right * LANES)
        if self.grid.rows * self.grid.columns <= 2**30:
            first &= 2**30 - 1  # so compilers know that no sum overflows, and put distances of rows into instructions
        lane = jnp.arange(LANES, dtype=jnp.int32)
        return Where(self, first + lane, right * LANES + lane)


@dataclasses.dataclass(frozen=True)
class Where:
    """Of one tile.

    Attributes:
      first: indices of the values of its first row.
      column: of the matrix.
    """

    layout: Layout
    first: Int32[Array, "32"]
    column: Int32[Array, "32"]

    def _index(self, row: Int32[Array, "..."]):
        """Of rows' values, and which of them the array has."""
        index = self.first + row * self.layout.grid.columns
        is_padded = self.layout.grid.size != self.layout.tiles * _tiles.TILE_VALUES
        return index, index < self.layout.grid.size if is_padded else None

    def load(self, ref, row: Int32[Array, "..."]) -> Array:
        from jax.experimental.pallas import triton

        index, inside = self._index(row)
        return triton.load(ref.at[index], mask=inside, other=None if inside is None else 0)

    def store(self, ref, row: Int32[Array, "..."], x: Array, live: Array | None = None) -> None:
        from jax.experimental.pallas import triton

        index, inside = self._index(row)
        if live is not None:
            live = jnp.broadcast_to(live, index.shape)
            inside = live if inside is None else inside & live
        triton.store(ref.at[index], x, mask=inside)

    @property
    def exponent_varies(self) -> bool:
        """Whether within a lane: channels that are not columns."""
        return self.layout.exponents > 1 and not self.layout.grid.by_channel

    def exponents(self, ref) -> Callable[[Array], Int32[Array, "..."]]:
        """Of the steps 2^k, by rows."""
        if self.exponent_varies:
            return lambda row: ref[lax.rem(self._index(row)[0], jnp.int32(self.layout.exponents))]
        same = ref[self.column] if self.layout.exponents > 1 else jnp.broadcast_to(ref[0], (LANES,))
        return lambda row: same

    def load_words(self, ref, row: Int32[Array, "..."]) -> Words:
        """Values of rows as words, or each of two rows of 16-bit values."""
        if self.layout.dtype.itemsize == 4:
            return _tiles.to_bits(self.load(ref, row))
        low, high = (_tiles.to_bits(self.load(ref, 2 * row + i)) for i in range(2))
        return low | (high << 16)


def rows_of_bytes(word: int) -> Int32[Array, "4 4 1"]:
    """Group by group, the rows whose values are the bytes of a word: see `_lane_bits`."""
    group, byte = (jnp.arange(4, dtype=jnp.int32) for _ in range(2))
    return group[:, None, None] * 32 + byte[None, :, None] * 8 + word


def is_group(group: int) -> Bool[Array, "4 1"]:
    return jnp.arange(GROUPS, dtype=jnp.int32)[:, None] == group


def of_group(x: Array, group: int) -> Array:
    """`x[group]`, which kernels have no indexing for."""
    return jnp.sum(jnp.where(is_group(group), x, jnp.zeros_like(x)), 0, dtype=x.dtype)


def any_lane(flags: Words) -> Array:
    return jnp.max(flags.astype(jnp.int32)) > 0


def when(condition: Array, f) -> None:
    """`f()` for its effects."""

    def branch():
        f()

    lax.cond(condition, branch, lambda: None)
