"""Where a table of moves keeps states and residuals: preallocated rows that are written in place.

`Separate` has rows for states and rows for residuals. `Shared` has rows of one state's size, and puts residuals into
as many of them as they need: that is how the schedules of both kinds of states count memory.

Buffers are pytrees of arrays whose first axis is the row. Values are lists of arrays: a state, or the residuals of one block,
whose first axis is the step. Residuals that are never read go to a row after those of the slots. A state that is never read
is not written: it can be large (a layer's input over a long sequence), so there is no row for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memjax._core.arrays import is_float, vary, zeros
from memjax._core.compat import varying
from memjax._core.lists import Arrays
from memjax._core.program.jaxpr import nbytes


class ArrayType(NamedTuple):
    """What two arrays have in common that can stand in for each other."""

    shape: tuple[int, ...]
    dtype: Any
    varying: frozenset[str]  # the mesh axes of a surrounding `shard_map` that values differ along

    @classmethod
    def of(cls, aval: Any, leading: tuple[int, ...] = ()) -> ArrayType:
        return cls((*leading, *aval.shape), aval.dtype, varying(aval))


class StateCodec(Protocol):
    """What makes states smaller, such as a `memjax.compress.Codec`."""

    def encode(self, x: Any) -> Any:
        """A pytree of arrays, smaller than `x`."""

    def decode(self, code: Any) -> Any:
        """About `x`."""


class Separate:
    """`rows` rows for states, and `residuals` rows for residuals, of which nobody reads the last.

    With a codec, rows hold the codes of a state's floats. Who takes a state from a row gets it decoded.
    """

    def __init__(
        self,
        carry: Sequence[Any],
        kept: Sequence[Any],
        block: int,
        rows: int,
        residuals: int,
        codec: StateCodec | None = None,
    ):
        self.carry, self.kept_types, self.block = list(carry), list(kept), block
        self.rows, self.residuals, self.codec = rows, residuals, codec

    def _coded(self, state: Arrays) -> Arrays:
        if self.codec is None:
            return state
        return [self.codec.encode(leaf) if is_float(jax.typeof(leaf)) else leaf for leaf in state]

    def new(self, init: Arrays) -> Any:
        """Buffers for states, with `init` for every one, and for residuals."""
        states = jax.tree.map(lambda cell: jnp.broadcast_to(cell, (self.rows, *cell.shape)), self._coded(init))
        return states, [zeros(aval, (self.residuals, self.block)) for aval in self.kept_types if self.residuals]

    def put_state(self, buffers: Any, row: Any, state: Arrays) -> Any:
        states, residuals = buffers
        put_one = lambda buffer, cell: self._put(buffer, cell, row)
        return jax.tree.map(put_one, states, self._coded(state)), residuals

    def _put(self, buffer: Any, cell: Any, row: Any) -> Any:
        """The buffer with the cell in that row. Past the last row: as it is, by writing what is in a row there once more,
        since a branch would copy the buffer.
        """
        exists = row < self.rows
        row = jnp.where(exists, row, 0)
        return put(buffer, jnp.where(exists, cell, at(buffer, row)), row)

    def state(self, buffers: Any, row: Any) -> Arrays:
        state = jax.tree.map(lambda buffer: at(buffer, row), buffers[0])
        if self.codec is None:
            return state
        floats = map(is_float, self.carry)
        return [self.codec.decode(cell) if coded else cell for cell, coded in zip(state, floats, strict=True)]

    def put_kept(self, buffers: Any, row: Any, kept: Arrays) -> Any:
        states, residuals = buffers
        return states, [put(buffer, leaf, row) for buffer, leaf in zip(residuals, kept, strict=True)]

    def kept(self, buffers: Any, row: Any) -> Arrays:
        return [at(buffer, row) for buffer in buffers[1]]


class Shared:
    """Rows that hold one state each, or a part of a block's residuals.

    Where every residual is made of pieces that look like a leaf of the carry (the sum going into the gates of an LSTM:
    four hidden states side by side), the rows keep the carry's types, and with them its sharding. Otherwise they hold
    words of 32 bits, residuals of 2 and 4 bits packed.

    Attributes:
      rows_of_kept: rows that the residuals of one block take.
      keeps_types: whether rows look like the carry.
    """

    def __init__(self, carry: Sequence[Any], kept: Sequence[Any], block: int, rows: int):
        words, pieces = _Words(carry, kept, block), _Pieces.fit(carry, kept, block)
        self.layout = words if pieces is None or pieces.rows > words.rows else pieces
        self.rows, self.rows_of_kept, self.keeps_types = rows, self.layout.rows, self.layout is pieces

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

    def __init__(self, groups: list[list[int]], places: list[_Place], block: int, rows: int):
        self.groups, self.places, self.block, self.rows = groups, places, block, rows

    @classmethod
    def fit(cls, carry: Sequence[Any], kept: Sequence[Any], block: int) -> _Pieces | None:
        """The layout, or None where some residual is not made of pieces like the carry's leaves."""
        types = [ArrayType.of(aval) for aval in carry]
        kinds = list(dict.fromkeys(types))
        totals = [0] * len(kinds)
        places = []
        for aval in kept:
            counts = [_pieces(ArrayType.of(aval), kind) for kind in kinds]
            if not any(counts):
                return None
            group, pieces = next((i, count) for i, count in enumerate(counts) if count)
            places.append(_Place(group, totals[group], pieces))
            totals[group] += block * pieces
        groups = [[i for i, type_ in enumerate(types) if type_ == kind] for kind in kinds]
        rows = max([1, *(-(-total // len(leaves)) for total, leaves in zip(totals, groups, strict=True))])
        return cls(groups, places, block, rows)

    def cells(self, state: Arrays) -> Arrays:
        return state

    def state(self, cells: Arrays) -> Arrays:
        return cells

    def put_kept(self, buffers: Arrays, row: Any, kept: Arrays) -> Arrays:
        """Writes each piece by itself: laid together first, they would be copied once more."""
        buffers = list(buffers)
        for place, leaf in zip(self.places, kept, strict=True):
            parts = jnp.split(leaf, place.pieces, axis=-1) if place.pieces > 1 else [leaf]
            for index, part in enumerate(parts):
                written = 0
                for buffer, first, stop in self._rows(place, index):
                    steps = part[written : written + stop - first]
                    buffers[buffer] = lax.dynamic_update_slice_in_dim(buffers[buffer], steps, row + first, 0)
                    written += stop - first
        return buffers

    def kept(self, cells: Arrays) -> Arrays:
        def piece(place: _Place, index: int) -> Any:
            return _joined([cells[buffer][first:stop] for buffer, first, stop in self._rows(place, index)], 0)

        return [_joined([piece(place, index) for index in range(place.pieces)], -1) for place in self.places]

    def _rows(self, place: _Place, index: int) -> Iterator[tuple[int, int, int]]:
        """(leaf of the carry, first row, row after the last) for the steps of one piece, the group's rows end to end."""
        start = place.first + index * self.block
        for i, leaf in enumerate(self.groups[place.group]):
            low = max(start - i * self.rows, 0)
            high = min(start + self.block - i * self.rows, self.rows)
            if low < high:
                yield leaf, low, high


def _joined(parts: list[Any], axis: int) -> Any:
    return jnp.concatenate(parts, axis) if len(parts) > 1 else parts[0]


def _pieces(whole: ArrayType, piece: ArrayType) -> int:
    """How many of `piece` side by side look like `whole`; 0 if it cannot be cut so."""
    if whole == piece:
        return 1
    (shape, *kind), (part, *part_kind) = whole, piece
    if kind != part_kind or len(shape) != len(part) or shape[:-1] != part[:-1] or 0 in (*shape, *part):
        return 0
    return 0 if shape[-1] % part[-1] else shape[-1] // part[-1]


class _Words:
    """Buffers of 32-bit words: a state in a row, residuals laid end to end.

    Inside `shard_map` each set of mesh axes that values vary over has its own buffer, as a value cannot be made to
    vary over fewer axes. Where no leaf of the carry varies so, the buffer is as wide as residuals need it, beyond the slots.
    """

    def __init__(self, carry: Sequence[Any], kept: Sequence[Any], block: int):
        self.carry = [ArrayType.of(aval) for aval in carry]
        self.kept_types = [ArrayType.of(aval, (block,)) for aval in kept]
        kinds = sorted({leaf.varying for leaf in (*self.carry, *self.kept_types)}, key=sorted)
        self.kinds = kinds or [frozenset[str]()]
        states = [self._words(self.carry, kind) for kind in self.kinds]
        residuals = [self._words(self.kept_types, kind) for kind in self.kinds]
        self.rows = max(-(-sum(residuals) // max(sum(states), 1)), 1)
        needed = [-(-words // self.rows) for words in residuals]
        self.widths = [max(pair) for pair in zip(states, needed, strict=True)]

    @staticmethod
    def _words(leaves: Sequence[ArrayType], kind: frozenset[str]) -> int:
        return sum(_count(leaf) for leaf in leaves if leaf.varying == kind)

    def cells(self, state: Arrays) -> Arrays:
        return self._to_words(state, self.carry, 1)

    def state(self, cells: Arrays) -> Arrays:
        return self._from_words(cells, self.carry)

    def put_kept(self, buffers: Arrays, row: Any, kept: Arrays) -> Arrays:
        words = self._to_words(kept, self.kept_types, self.rows)
        words = [flat.reshape(self.rows, width) for flat, width in zip(words, self.widths, strict=True)]
        return [
            lax.dynamic_update_slice_in_dim(buffer, new, row, 0) for buffer, new in zip(buffers, words, strict=True)
        ]

    def kept(self, cells: Arrays) -> Arrays:
        return self._from_words([cell.reshape(-1) for cell in cells], self.kept_types)

    def _to_words(self, leaves: Arrays, types: Sequence[ArrayType], rows: int) -> Arrays:
        """One array of words for each kind."""
        by_kind = []
        for kind, width in zip(self.kinds, self.widths, strict=True):
            words = [_leaf_to_words(leaf) for leaf, type_ in zip(leaves, types, strict=True) if type_.varying == kind]
            padding = jnp.zeros(rows * width - sum(map(len, words)), jnp.uint32)
            by_kind.append(jnp.concatenate([*words, vary(padding, kind)]))
        return by_kind

    def _from_words(self, words: Arrays, types: Sequence[ArrayType]) -> Arrays:
        start = [0] * len(self.kinds)
        leaves = []
        for leaf in types:
            kind = self.kinds.index(leaf.varying)
            stop = start[kind] + _count(leaf)
            leaves.append(_leaf_from_words(words[kind][start[kind] : stop], leaf.shape, leaf.dtype))
            start[kind] = stop
        return leaves


def _count(aval: Any) -> int:
    """Words of an array, the last one padded."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return -(-nbytes(aval) // 4)
    return -(-math.prod(aval.shape) * jax.dtypes.itemsize_bits(_stored(aval.dtype)) // 32)


def _stored(dtype: Any) -> Any:
    """The type whose bits are kept."""
    return np.dtype(np.uint8) if jnp.issubdtype(dtype, bool) else dtype


def _leaf_to_words(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf).reshape(-1)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    leaf = leaf.astype(_stored(leaf.dtype))
    flat, bits = leaf.reshape(-1), jax.dtypes.itemsize_bits(leaf.dtype)
    if bits < 32:
        per_word = 32 // bits
        flat = jnp.pad(flat, (0, -flat.size % per_word)).reshape(-1, per_word)
    return lax.bitcast_convert_type(flat, jnp.uint32).reshape(-1)


def _leaf_from_words(words: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        kinds = []

        def ask(key):  # the kind of a key can only be asked of an array
            kinds.append(jax.random.key_impl(key))
            return jax.random.key_data(key)

        data = jax.eval_shape(ask, jax.ShapeDtypeStruct(shape, dtype))
        return jax.random.wrap_key_data(words.reshape(data.shape), impl=kinds[0])
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.complex(*_leaf_from_words(words, (2, *shape), jnp.finfo(dtype).dtype))
    stored = _stored(dtype)
    if jax.dtypes.itemsize_bits(stored) == 64:
        words = words.reshape(-1, 2)
    flat = lax.bitcast_convert_type(words, stored).reshape(-1)
    return flat[: math.prod(shape)].reshape(shape).astype(dtype)


def at(stack: Any, i: Any) -> Any:
    """One row of a stack."""
    return lax.dynamic_index_in_dim(stack, i, 0, keepdims=False)


def put(stack: Any, row: Any, i: Any) -> Any:
    """The stack with one row replaced."""
    return lax.dynamic_update_index_in_dim(stack, row, i, 0)
