"""Where a table of moves keeps states and residuals: preallocated rows that are written in place.

`Separate` has rows for states and rows for residuals. `Shared` has rows of one state's size, and puts residuals into
as many of them as they need: memory that serves either, as the schedules of both kinds of states count it.

All buffers are lists of arrays with the row as the first axis. Values are lists of arrays: a state, or the residuals
of one block, each with the steps as its first axis.

After the rows that the slots take there is room for one more state, or the residuals of one more block: of what is
never read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memjax._jaxpr import nbytes
from memjax.remat._blocks import at, put, zeros
from memjax.remat._step import Arrays


class Separate:
    """Rows for `rows` states and one more, and `residuals` rows for residuals, the last for what is never read."""

    def __init__(self, carry: Sequence[Any], kept: Sequence[Any], block: int, rows: int, residuals: int):
        self.carry, self.kept_types, self.block = list(carry), list(kept), block
        self.rows, self.residuals = rows, residuals

    def new(self, init: Arrays) -> Arrays:
        """Buffers, with `init` for every state."""
        states = [jnp.broadcast_to(leaf, (self.rows + 1, *leaf.shape)) for leaf in init]
        if not self.residuals:
            return states
        return states + [zeros(aval, (self.residuals, self.block)) for aval in self.kept_types]

    def put_state(self, buffers: Arrays, row: Any, state: Arrays) -> Arrays:
        n = len(self.carry)
        return [*map(put, buffers[:n], state, [row] * n), *buffers[n:]]

    def state(self, buffers: Arrays, row: Any) -> Arrays:
        return [at(buffer, row) for buffer in buffers[: len(self.carry)]]

    def put_kept(self, buffers: Arrays, row: Any, kept: Arrays) -> Arrays:
        n = len(self.carry)
        return [*buffers[:n], *map(put, buffers[n:], kept, [row] * len(kept))]

    def kept(self, buffers: Arrays, row: Any) -> Arrays:
        return [at(buffer, row) for buffer in buffers[len(self.carry) :]]


class Shared:
    """Rows that hold one state each, or a part of a block's residuals.

    Where every residual is made of pieces that look like a leaf of the carry (the sum going into the gates of an LSTM:
    four hidden states side by side), the rows keep the carry's types, and with them its sharding. Otherwise they hold
    words of 32 bits.
    """

    def __init__(self, carry: Sequence[Any], kept: Sequence[Any], block: int, rows: int):
        self.rows, self.block = rows, block
        self.layout: _Pieces | _Words = _Words(carry, kept, block)
        pieces = _Pieces.fit(carry, kept, block)
        if pieces is not None and pieces.rows <= self.layout.rows:
            self.layout = pieces

    @property
    def rows_of_kept(self) -> int:
        """Rows that the residuals of one block take."""
        return self.layout.rows

    @property
    def keeps_types(self) -> bool:
        """Whether rows look like the carry."""
        return isinstance(self.layout, _Pieces)

    def new(self, init: Arrays) -> Arrays:
        rows = self.rows + self.rows_of_kept
        return [jnp.broadcast_to(cell, (rows, *cell.shape)) for cell in self.layout.cells(init)]

    def put_state(self, buffers: Arrays, row: Any, state: Arrays) -> Arrays:
        return [put(buffer, cell, row) for buffer, cell in zip(buffers, self.layout.cells(state), strict=True)]

    def state(self, buffers: Arrays, row: Any) -> Arrays:
        return self.layout.state([at(buffer, row) for buffer in buffers])

    def put_kept(self, buffers: Arrays, row: Any, kept: Arrays) -> Arrays:
        return self.layout.put_kept(buffers, row, kept)

    def kept(self, buffers: Arrays, row: Any) -> Arrays:
        return self.layout.kept([lax.dynamic_slice_in_dim(buffer, row, self.layout.rows, 0) for buffer in buffers])


class _Place(NamedTuple):
    """A residual as `pieces` pieces side by side along the last axis of each step, from `first` on in its group."""

    group: int
    first: int
    pieces: int


class _Pieces:
    """A buffer for every leaf of the carry; leaves that look the same form a group, whose pieces go to any of them."""

    def __init__(self, groups: list[list[int]], places: list[_Place], block: int):
        self.groups, self.places, self.block = groups, places, block
        totals = [sum(block * place.pieces for place in places if place.group == i) for i in range(len(groups))]
        self.rows = max([1, *(-(-total // len(leaves)) for total, leaves in zip(totals, groups, strict=True))])

    @classmethod
    def fit(cls, carry: Sequence[Any], kept: Sequence[Any], block: int) -> _Pieces | None:
        """The layout, or None where some residual is not made of pieces like the carry's leaves."""
        looks = [_looks(aval) for aval in carry]
        kinds = list(dict.fromkeys(looks))
        totals = [0] * len(kinds)
        places = []
        for aval in kept:
            found = ((group, _pieces(_looks(aval), kind)) for group, kind in enumerate(kinds))
            group, pieces = next((pair for pair in found if pair[1]), (0, 0))
            if not pieces:
                return None
            places.append(_Place(group, totals[group], pieces))
            totals[group] += block * pieces
        groups = [[i for i, look in enumerate(looks) if look == kind] for kind in kinds]
        return cls(groups, places, block)

    def cells(self, state: Arrays) -> Arrays:
        return state

    def state(self, cells: Arrays) -> Arrays:
        return cells

    def put_kept(self, buffers: Arrays, row: Any, kept: Arrays) -> Arrays:
        """Each piece by itself: laid together first, they would be copied once more."""
        buffers = list(buffers)
        for place, leaf in zip(self.places, kept, strict=True):
            parts = jnp.split(leaf, place.pieces, axis=-1) if place.pieces > 1 else [leaf]
            for turn, part in enumerate(parts):
                done = 0
                for buffer, first, stop in self._rows(place, turn):
                    here = part[done : done + stop - first]
                    buffers[buffer] = lax.dynamic_update_slice_in_dim(buffers[buffer], here, row + first, 0)
                    done += stop - first
        return buffers

    def kept(self, cells: Arrays) -> Arrays:
        kept = []
        for place in self.places:
            parts = []
            for turn in range(place.pieces):
                found = [cells[buffer][first:stop] for buffer, first, stop in self._rows(place, turn)]
                parts.append(jnp.concatenate(found) if len(found) > 1 else found[0])
            kept.append(jnp.concatenate(parts, -1) if len(parts) > 1 else parts[0])
        return kept

    def _rows(self, place: _Place, turn: int) -> Iterator[tuple[int, int, int]]:
        """(leaf of the carry, first row, row after the last) for the steps of one piece, the group's rows end to end."""
        start = place.first + turn * self.block
        for i, leaf in enumerate(self.groups[place.group]):
            low = max(start - i * self.rows, 0)
            high = min(start + self.block - i * self.rows, self.rows)
            if low < high:
                yield leaf, low, high


def _looks(aval: Any) -> tuple[Any, ...]:
    return aval.shape, aval.dtype, aval.manual_axis_type.varying


def _pieces(whole: tuple[Any, ...], piece: tuple[Any, ...]) -> int:
    """How many of `piece` side by side look like `whole`; 0 if it cannot be cut so."""
    if whole == piece:
        return 1
    (shape, *rest), (part, *other) = whole, piece
    if rest != other or len(shape) != len(part) or shape[:-1] != part[:-1] or 0 in (*shape, *part):
        return 0
    return 0 if shape[-1] % part[-1] else shape[-1] // part[-1]


class _Words:
    """One buffer of 32-bit words: a state in a row, residuals laid end to end."""

    def __init__(self, carry: Sequence[Any], kept: Sequence[Any], block: int):
        self.carry = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in carry]
        self.kept_types = [jax.ShapeDtypeStruct((block, *aval.shape), aval.dtype) for aval in kept]
        self.width = max(sum(map(_count, self.carry)), 1)
        self.rows = max(-(-sum(map(_count, self.kept_types)) // self.width), 1)

    def cells(self, state: Arrays) -> Arrays:
        return [_to_words(state, self.width)]

    def state(self, cells: Arrays) -> Arrays:
        return _from_words(cells[0], self.carry)

    def put_kept(self, buffers: Arrays, row: Any, kept: Arrays) -> Arrays:
        words = _to_words(kept, self.rows * self.width).reshape(self.rows, self.width)
        return [lax.dynamic_update_slice_in_dim(buffers[0], words, row, 0)]

    def kept(self, cells: Arrays) -> Arrays:
        return _from_words(cells[0].reshape(-1), self.kept_types)


def _count(aval: Any) -> int:
    """Words of an array, the last one padded."""
    return -(-nbytes(aval) // 4)


def _to_words(leaves: Arrays, total: int) -> Any:
    words = [_leaf_to_words(leaf) for leaf in leaves]
    room = total - sum(len(w) for w in words)
    return jnp.concatenate([*words, jnp.zeros(room, jnp.uint32)])


def _from_words(words: Any, avals: Sequence[Any]) -> Arrays:
    ends = np.cumsum([_count(aval) for aval in avals])
    return [_leaf_from_words(words[end - _count(aval) : end], aval) for aval, end in zip(avals, ends, strict=True)]


def _leaf_to_words(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf).reshape(-1)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if jnp.issubdtype(leaf.dtype, bool):
        leaf = leaf.astype(jnp.uint8)
    flat, size = leaf.reshape(-1), leaf.dtype.itemsize
    if size < 4:
        per_word = 4 // size
        flat = jnp.pad(flat, (0, -flat.size % per_word)).reshape(-1, per_word)
    return lax.bitcast_convert_type(flat, jnp.uint32).reshape(-1)


def _leaf_from_words(words: Any, aval: Any) -> Any:
    shape, dtype = aval.shape, aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        found = []

        def ask(key):  # what kind of key it is can only be asked of an array
            found.append(jax.random.key_impl(key))
            return jax.random.key_data(key)

        data = jax.eval_shape(ask, aval)
        return jax.random.wrap_key_data(words.reshape(data.shape), impl=found[0])
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jax.ShapeDtypeStruct((2, *shape), jnp.finfo(dtype).dtype)
        return lax.complex(*_leaf_from_words(words, part))
    stored = np.dtype(np.uint8) if jnp.issubdtype(dtype, bool) else dtype
    if stored.itemsize == 8:
        words = words.reshape(-1, 2)
    flat = lax.bitcast_convert_type(words, stored).reshape(-1)
    return flat[: math.prod(shape)].reshape(shape).astype(dtype)
