"""Encoding and decoding in plain `jax.numpy`, which says what the kernels do: a loop over tiles.

The loop's body works on arrays of the size of a tile, whatever the size of the array. So temporary memory is small, and XLA
compiles what is the same for arrays of all shapes once in a program. Values are quantised a group at a time because XLA does
not fuse operations across the borders of loops: elsewhere it would quantise again for everything that reads the numbers.

The words of a tile are written and read in rows of one word for each lane, or for some lanes only, whose words then have no
gaps between them. See `tiles`.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt8, UInt32

from memjax.compress._codecs.bits import WORD, Words, bit_length, shift_left, shift_right, u32
from memjax.compress._error_bounded import tiles
from memjax.compress._error_bounded.quantize import dequantize, dither_of_group, quantize
from memjax.compress._error_bounded.tiles import GROUPS, LANES, Bitmaps, Grid
from memjax.compress._error_bounded.warp import Warp

_WARP = Warp(native=False)
_VALUE = np.arange(WORD, dtype=np.uint32)[:, None]  # of a group
_BELOW = (1 << np.arange(WORD, dtype=np.uint32)) - np.uint32(1)  # each bit of a word
_LANE = np.arange(LANES, dtype=np.uint32)
_RAW = np.uint32(2**32 - 1)
_NOWHERE = np.uint32(2**30)  # the place of a word that a lane does not have
_sum = functools.partial(jnp.sum, dtype=jnp.uint32)


class Packed(NamedTuple):
    """A code: `words` hold the lanes, `needed` words of them, or fewer if that is more than there are.

    What is in words beyond `needed` is unspecified.
    """

    words: UInt32[Array, " capacity"]
    headers: UInt8[Array, "tiles 32"]
    offsets: Int32[Array, " tiles"]
    needed: Int32[Array, ""]


class Lanes(NamedTuple):
    """Headers taken apart."""

    planes: UInt32[Array, "..."]
    signs: UInt32[Array, "..."]
    bitmaps: Bitmaps
    raw: UInt32[Array, "..."]


def read_headers(header: Words) -> Lanes:
    flag = lambda bit: (header & u32(bit)) != 0
    bitmaps = Bitmaps(flag(tiles.FIRST_BITMAP), flag(tiles.SECOND_BITMAP), flag(tiles.OTHERS_ZERO))
    signs, raw = flag(tiles.SIGNS), header == u32(tiles.RAW)
    return Lanes(header & u32(tiles.PLANES), u32(signs), bitmaps, u32(raw))


def columns_without(header: Words) -> Words:
    """What columns without a bitmap are in the masks of lanes. Of raw lanes, zero."""
    return jnp.where((header == 0) | ((header & u32(tiles.OTHERS_ZERO)) != 0), u32(0), u32(2**32 - 1))


def write_headers(lanes: Lanes) -> Words:
    """The inverse of `read_headers`."""
    flags = lanes.signs != 0, *lanes.bitmaps
    bits = tiles.SIGNS, tiles.FIRST_BITMAP, tiles.SECOND_BITMAP, tiles.OTHERS_ZERO
    coded = sum((u32(flag) * u32(bit) for flag, bit in zip(flags, bits, strict=True)), lanes.planes)
    return jnp.where(lanes.raw != 0, u32(tiles.RAW), coded)


def encode(x: Float[Array, "..."], exponent: Int32[Array, "..."], capacity: int) -> Packed:
    """`exponent` is a scalar, or one for each channel. Words past `capacity` are dropped, and counted in `needed`."""
    grid, dtype = Grid.of(x.shape), x.dtype
    if grid.tiles == 0:
        no_offsets = jnp.zeros((0,), jnp.int32)
        return Packed(jnp.zeros((capacity,), jnp.uint32), jnp.zeros((0, LANES), jnp.uint8), no_offsets, jnp.int32(0))
    matrix = grid.matrix(lax.bitcast_convert_type(x, tiles.unsigned(dtype)))  # floats might lose the payloads of NaNs

    most = LANES * tiles.raw_words(dtype)

    def put(words, index, values):
        """Into the words of a tile. Every bit is written once, so adding is merging."""
        return words.at[index.reshape(-1)].add(values.reshape(-1), mode="drop")

    def encode_tile(carry, tile):
        all_words, offset = carry
        raw_bits = tiles.lanes(lax.dynamic_slice(matrix, grid.corner(tile), (tiles.ROWS, tiles.COLUMNS)))
        of_groups = raw_bits, *_of_groups(grid, exponent, tile)
        numbers = lax.map(lambda group: _number(tile, group, dtype), of_groups)
        every = lax.reduce_or(numbers, (0, 1))
        raw = every == _RAW
        mask = jnp.where(raw, u32(0), jnp.sum((numbers & u32(1)) << _VALUE, 1, dtype=jnp.uint32))
        every = jnp.where(raw, u32(0), every >> 1)
        planes, signs = bit_length(every >> 1), every & u32(1)
        bitmaps = Bitmaps.of(list(mask), planes + signs)
        lanes = Lanes(planes, signs, bitmaps, u32(raw))
        ranks = _ranks(mask)

        place, following = _first_places(lanes)
        packed = jnp.stack(bitmaps.pack(list(mask), _WARP))
        words = put(jnp.zeros((most,), jnp.uint32), place[:GROUPS], packed)
        reader = Reader.of(lanes, mask, place[GROUPS], following)

        def put_slot(slot, carry):
            words, reader = carry
            place, reader = reader.advance(slot)
            dense = jnp.sum(((numbers >> u32(slot + 1)) & u32(1)) << ranks, 1, dtype=jnp.uint32)
            index = jnp.stack([place.latest, place.fresh])
            parts = jnp.stack([shift_left(dense, place.used), shift_right(dense, u32(WORD) - place.used)])
            return put(words, index, parts), reader

        words, reader = lax.fori_loop(0, reader.most_slots, put_slot, (words, reader))

        raw_lanes = _bits_of_lanes(raw)

        def put_raw(_, carry):
            words, following = carry
            rows = _raw_words(u32(raw_bits), dtype)
            place, following = _raw_places(raw_lanes, following, dtype)
            return put(words, place, rows), following

        words, count = lax.fori_loop(0, (raw_lanes != 0).astype(jnp.int32), put_raw, (words, reader.next))
        place, count = jnp.arange(most, dtype=jnp.int32), count.astype(jnp.int32)
        index = jnp.where(place < count, offset + place, capacity)
        all_words = all_words.at[index].add(words, mode="drop")
        return (all_words, offset + count), (write_headers(lanes).astype(jnp.uint8), offset)

    # Zero, which compilers do not see: they make constants of all arrays at the beginning of a program.
    zero = lax.clz(u32(matrix[0, 0])) >> 6
    start = jnp.broadcast_to(zero, (capacity,)), zero.astype(jnp.int32)
    (words, needed), (headers, offsets) = lax.scan(encode_tile, start, jnp.arange(grid.tiles, dtype=jnp.int32))
    return Packed(words, headers, offsets, needed)


def decode(
    code: Packed, exponent: Int32[Array, "..."], shape: tuple[int, ...], dtype, *, keeps_signs: bool = True
) -> Float[Array, "..."]:
    """NaN everywhere if words were dropped."""
    grid = Grid.of(shape)
    if grid.tiles == 0:
        return jnp.zeros(shape, dtype)
    lost = code.needed > code.words.size

    def decode_tile(tile, matrix):
        header = u32(code.headers[tile])
        lanes = read_headers(header)
        place = u32(code.offsets[tile]) + jnp.arange(LANES * tiles.raw_words(dtype), dtype=jnp.uint32)
        words = code.words.at[place].get(mode="fill", fill_value=0)

        def get(index):
            return words.at[index].get(mode="fill", fill_value=0)

        place, following = _first_places(lanes)
        packed = list(get(place[:GROUPS]))
        mask = jnp.stack(lanes.bitmaps.unpack(packed, columns_without(header), _WARP))
        ranks = _ranks(mask)
        reader = Reader.of(lanes, mask, place[GROUPS], following)

        def get_slot(slot, carry):
            numbers, reader = carry
            place, reader = reader.advance(slot)
            dense = shift_right(get(place.latest), place.used)
            dense |= shift_left(get(place.fresh), u32(WORD) - place.used)
            # The bits read for values that are zero are arbitrary; `dequantize` ignores them (`is_some`).
            return numbers | (((dense[:, None] >> ranks) & u32(1)) << u32(slot)), reader

        numbers, reader = lax.fori_loop(0, reader.most_slots, get_slot, (jnp.zeros_like(ranks), reader))
        of_groups = numbers, mask, *_of_groups(grid, exponent, tile)
        values = lax.map(lambda group: _value(tile, group, dtype, keeps_signs), of_groups)
        raw_lanes = _bits_of_lanes(lanes.raw != 0)

        def get_raw(_, values):
            rows = get(_raw_places(raw_lanes, reader.next, dtype)[0])
            return jnp.where(_is_in(raw_lanes), _raw_bits(rows, dtype), values)

        values = lax.fori_loop(0, (raw_lanes != 0).astype(jnp.int32), get_raw, values)
        # Chosen as bits: backends may change the payload of a NaN that they choose as a number.
        values = jnp.where(lost, tiles.to_bits(jnp.asarray(jnp.nan, dtype)), values)
        return lax.dynamic_update_slice(matrix, tiles.rows(values).astype(matrix.dtype), grid.corner(tile))

    # Zeros that depend on the data, as in `encode`.
    zero = (lax.clz(u32(code.headers[0, 0])) >> 6).astype(tiles.unsigned(dtype))
    matrix = lax.fori_loop(0, grid.tiles, decode_tile, jnp.broadcast_to(zero, (grid.rows, grid.columns)))
    return lax.bitcast_convert_type(matrix.reshape(-1)[: grid.size].reshape(shape), dtype)


class Reader(NamedTuple):
    """Where in its words each lane of a tile is.

    Attributes:
      slots: which slots the lane has, as bits: the lowest for its signs, the following ones for its planes.
      lengths: bits of a piece, that is of a group's signs or of a plane of them.
      used: bits of the latest word that are used.
      latest: the latest word that the lane has begun.
      next: the first word that no lane has begun.
    """

    slots: UInt32[Array, "32"]
    lengths: UInt32[Array, "4 32"]
    used: UInt32[Array, "32"]
    latest: UInt32[Array, "32"]
    next: UInt32[Array, ""]

    @classmethod
    def of(
        cls, lanes: Lanes, mask: UInt32[Array, "4 32"], first: UInt32[Array, "32"], following: UInt32[Array, ""]
    ) -> "Reader":
        """In the first words of lanes."""
        slots = lanes.signs | ((u32(2) << lanes.planes) - u32(2))
        return cls(slots, lax.population_count(mask), jnp.zeros_like(first), first, following)

    @property
    def most_slots(self) -> Int32[Array, ""]:
        """Slots of the lane that has most."""
        return bit_length(jnp.max(self.slots)).astype(jnp.int32)

    def advance(self, slot: Array) -> tuple["Place", "Reader"]:
        """By the signs, slot 0, or plane slot - 1: where the pieces of the groups are, and where the lanes are then."""
        live = ((self.slots >> u32(slot)) & u32(1)) != 0
        lengths = jnp.where(live, self.lengths, u32(0))
        begin = self.used + _before(lengths)[:-1]
        end = begin + lengths
        # How many words the lane begins before, if it begins one when a bit needs it.
        words = lambda bits: (jnp.maximum(bits, u32(1)) - u32(1)) // u32(WORD)
        begins = words(end) > words(begin)
        fresh, following = _places(begins, self.next)
        # Words that are begun later have larger places.
        latest = jnp.maximum(self.latest, _before(jnp.where(begins, fresh, u32(0)), jnp.max))
        behind = jnp.where(live, latest[:-1], _NOWHERE)
        place = Place(behind, begin - u32(WORD) * words(begin), fresh)
        used = end[-1] - u32(WORD) * words(end[-1])
        return place, self._replace(used=used, latest=latest[-1], next=following)


class Place(NamedTuple):
    """Where the pieces of a slot are: behind the `used` bits of words `latest`, and in words `fresh` if they begin some."""

    latest: UInt32[Array, "4 32"]
    used: UInt32[Array, "4 32"]
    fresh: UInt32[Array, "4 32"]


def _first_places(lanes: Lanes) -> tuple[UInt32[Array, "5 32"], UInt32[Array, ""]]:
    """Where the words are that come first of all, four of bitmaps and the first of each lane; and the word that follows them."""
    bitmaps, has_bits = lanes.bitmaps, lanes.planes + lanes.signs != 0
    live = jnp.stack([bitmaps.any, bitmaps.any, bitmaps.both, bitmaps.both, has_bits])
    return _places(live, u32(0))


def _places(live: Bool[Array, "rows 32"], following: UInt32[Array, ""]) -> tuple[UInt32[Array, "rows 32"], Array]:
    """Where the words of rows are, `_NOWHERE` for lanes that are not live; and the word that follows them."""
    rows = _bits_of_lanes(live)
    before = following + _before(lax.population_count(rows))
    return _of_live(rows[:, None], before[:-1, None]), before[-1]


def _raw_places(row: UInt32[Array, ""], following: UInt32[Array, ""], dtype) -> tuple[UInt32[Array, "rows 32"], Array]:
    """`_places` of the words of raw lanes, the bits of `row`, which are the same lanes in all rows."""
    rows = tiles.raw_words(dtype)
    count = lax.population_count(row)
    before = following + np.arange(rows, dtype=np.uint32)[:, None] * count
    return _of_live(row, before), following + u32(rows) * count


def _of_live(row: Array, first: Array) -> Array:
    """The places of a row whose live lanes are the bits of `row`, from `first` on.

    Which lanes are live is computed from the bits again, because XLA would compile the earlier computation once more
    for each reader.
    """
    return jnp.where(_is_in(row), first + lax.population_count(row & _BELOW), _NOWHERE)


def _bits_of_lanes(flags: Bool[Array, "... 32"]) -> UInt32[Array, "..."]:
    """A word of the flags of all lanes."""
    return jnp.sum(u32(flags) << _LANE, -1, dtype=jnp.uint32)


def _is_in(row: UInt32[Array, "..."]) -> Bool[Array, "... 32"]:
    """The flags of all lanes, from a word: the inverse of `_bits_of_lanes`. Words are scalars, or have an axis of 1 for lanes."""
    return ((row >> _LANE) & u32(1)) != 0


def _before(x: UInt32[Array, "rows ..."], reduce=_sum) -> UInt32[Array, "rows+1 ..."]:
    """Sums, or maxima, of the rows before each, and of all: from all pairs, which compiles faster than a tree of them."""
    is_before = np.tri(len(x) + 1, len(x), k=-1, dtype=bool).reshape(len(x) + 1, len(x), *[1] * (x.ndim - 1))
    return reduce(jnp.where(is_before, x, u32(0)), axis=1)


def _ranks(mask: UInt32[Array, "4 32"]) -> UInt32[Array, "4 32 32"]:
    """How many values of the mask come before each value of a group."""
    return lax.population_count(mask[:, None] & _BELOW[:, None])


def _of_groups(grid: Grid, exponent: Array, tile: Array) -> tuple[Array, Array]:
    """For each group of a tile the exponents of its values (those of padding as if channels went on), and its number."""
    exponents = exponent if exponent.ndim == 0 else tiles.lanes(exponent[grid.index(tile) % exponent.size])
    return jnp.broadcast_to(exponents, (GROUPS, *exponents.shape[1:])), jnp.arange(GROUPS)


def _number(tile: Array, group: tuple[Array, Array, Array], dtype) -> UInt32[Array, "32 32"]:
    """What is known of each value, from the lowest bit on: whether it is not zero, whether it is negative, and p; or `_RAW`."""
    bits, exponent, index = group
    p, is_some, negative, escapes = quantize(
        tiles.from_bits(bits, dtype), exponent, dither_of_group(tile, index, dtype)
    )
    return jnp.where(escapes, _RAW, u32(is_some) | (u32(negative) << 1) | (p << 2))


def _value(tile: Array, group: tuple[Array, Array, Array, Array], dtype, keeps_signs: bool) -> Array:
    """The bits of values, from the numbers above without their lowest bit, and the mask."""
    number, mask, exponent, index = group
    dither = dither_of_group(tile, index, dtype)
    is_some, negative = ((mask >> _VALUE) & u32(1)) != 0, number & u32(1) != 0
    return tiles.to_bits(dequantize(number >> 1, is_some, negative, exponent, dither, dtype, keeps_signs=keeps_signs))


def _raw_words(bits: UInt32[Array, "4 32 32"], dtype) -> UInt32[Array, "words 32"]:
    """The values of a lane, by their bits, as words."""
    columns = bits.reshape(GROUPS, 2, 16, LANES)
    if jnp.dtype(dtype).itemsize == 2:
        return (columns[:, 0] | (columns[:, 1] << 16)).reshape(-1, LANES)
    return columns.swapaxes(1, 2).reshape(-1, LANES)


def _raw_bits(words: UInt32[Array, "words 32"], dtype) -> UInt32[Array, "4 32 32"]:
    """The inverse of `_raw_words`."""
    if jnp.dtype(dtype).itemsize == 2:
        words = words.reshape(GROUPS, 16, LANES)
        return jnp.concatenate([words & u32(0xFFFF), words >> 16], 1)
    return words.reshape(GROUPS, 16, 2, LANES).swapaxes(1, 2).reshape(GROUPS, WORD, LANES)
