"""Encoding and decoding tiles in plain `jax.numpy`, which says what the kernels do.

Temporary memory is several times that of the array.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt8, UInt32

from memjax.compress._codecs.bits import WORD, Words, bit_length, pack, shift_left, shift_right, u32, unpack
from memjax.compress._error_bounded import dither as _dither
from memjax.compress._error_bounded import tiles
from memjax.compress._error_bounded.bitmaps import Bitmaps
from memjax.compress._error_bounded.bits_in_loops import compress, expand, moves_of, running_sum
from memjax.compress._error_bounded.quantize import dequantize, quantize
from memjax.compress._error_bounded.tiles import GROUPS, LANE_VALUES, LANES
from memjax.compress._error_bounded.warp import Warp

_WARP = Warp(native=False)


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


class Reader(NamedTuple):
    """Where in its words each lane is.

    Attributes:
      at: the word that the lane is in.
      left: its bits from here on.
      next: of the tile, the first word that no lane has begun.
    """

    at: UInt32[Array, "tiles 32"]
    left: UInt32[Array, "tiles 32"]
    next: UInt32[Array, " tiles"]

    @classmethod
    def of(cls, offsets: UInt32[Array, " tiles"], has_bits: Bool[Array, "tiles 32"]) -> "Reader":
        """In their first words, which come first of all."""
        begins = u32(has_bits)
        at = offsets[:, None] + running_sum(begins) - begins
        return cls(at, u32(WORD) * begins, offsets + begins.sum(-1))

    def advance(self, bits: UInt32[Array, "tiles 4 32"]) -> tuple["Place", "Reader"]:
        """By a piece for each group, of up to 32 bits: where they are, and where the lanes are then."""

        def one_group(reader, bits):
            at, left, following = reader
            begins = u32(bits > left)
            fresh = following[:, None] + running_sum(begins) - begins
            reader = Reader(
                jnp.where(begins != 0, fresh, at),
                left + u32(WORD) * begins - bits,
                following + jnp.sum(begins, -1, dtype=jnp.uint32),
            )
            return reader, Place(at, left, begins, fresh)

        reader, places = jax.lax.scan(one_group, self, bits.swapaxes(0, 1))
        return Place(*(array.swapaxes(0, 1) for array in places)), reader


class Place(NamedTuple):
    """Where pieces are: the last `left` bits of words `at`, and, if they are longer, the first of words `fresh`."""

    at: UInt32[Array, "tiles 4 32"]
    left: UInt32[Array, "tiles 4 32"]
    begins: UInt32[Array, "tiles 4 32"]
    fresh: UInt32[Array, "tiles 4 32"]


def encode(x: Float[Array, "tiles 128 32"], exponent: Int32[Array, "..."], capacity: int) -> Packed:
    """`exponent` broadcasts against `x`. Words past `capacity` are dropped, and counted in `needed`."""
    p, is_some, negative, escape = quantize(x, exponent, _dither.of_values(len(x), x.dtype))
    raw = u32(escape.any(1))
    coded = raw == 0
    mask = jnp.where(coded[:, None], _group_words(is_some), u32(0))
    sign = _group_words(negative) & mask
    planes = jnp.where(coded, bit_length(jnp.where(is_some, p, u32(0)).max(1)), u32(0))
    bits = jax.lax.population_count(mask)
    total = bits.sum(1)
    signs = u32((sign != 0).any(1))
    bitmaps = Bitmaps.of([mask[:, g] for g in range(GROUPS)], planes + signs)
    words = (total * (planes + signs) + u32(WORD - 1)) // u32(WORD) + bitmaps.words
    coded_words = words.sum(-1)
    tile_words = coded_words + raw.sum(-1) * u32(tiles.raw_words(x.dtype))
    ends = jnp.cumsum(tile_words, dtype=jnp.uint32)
    offsets = ends - tile_words
    needed = tile_words.sum().astype(jnp.int32)

    # In loops, for the sake of memory and of the time to compile. Every bit is written once, so adding is merging. The zeros
    # to begin with depend on the data, or compilers make those of all arrays at the beginning of a program.
    out = jnp.broadcast_to(u32(needed < 0), (capacity,))

    def put(out, index, words, live):
        return out.at[jnp.where(live, index, u32(capacity)).reshape(-1)].add(words.reshape(-1), mode="drop")

    def put_slot(slot, carry):
        """The signs, slot 0, or plane slot - 1."""
        out, reader = carry
        plane = _group_words((p >> u32(jnp.maximum(slot - 1, 0))) & u32(1) != 0) & mask
        live = jnp.where(slot == 0, signs != 0, u32(slot) <= planes)[:, None]
        dense = compress(jnp.where(live, jnp.where(slot == 0, sign, plane), u32(0)), moves)
        lengths = jnp.where(live, bits, u32(0))
        place, reader = reader.advance(lengths)
        out = put(out, place.at, shift_left(dense, u32(WORD) - place.left), (lengths > 0) & (place.left > 0))
        return put(out, place.fresh, shift_right(dense, place.left), place.begins != 0), reader

    def put_row(row, out):
        index = first_raw + u32(row) * raw.sum(-1)[:, None]
        return put(out, index, jax.lax.dynamic_index_in_dim(rows, row, 1, keepdims=False), ~coded)

    moves = moves_of(mask)
    rows = _raw_words(x)
    first_raw = (offsets + coded_words)[:, None] + running_sum(raw) - raw
    index, live, following = _bitmap_places(offsets, bitmaps)
    out = put(out, index, jnp.stack(bitmaps.pack([mask[:, g] for g in range(GROUPS)], _WARP), 1), live)
    most = jnp.max(planes, initial=0).astype(jnp.int32)
    reader = Reader.of(following, total * (planes + signs) != 0)
    out, _ = jax.lax.fori_loop(0, most + 1, put_slot, (out, reader))
    out = jax.lax.fori_loop(0, jnp.max(raw, initial=0).astype(jnp.int32) * rows.shape[1], put_row, out)
    headers = write_headers(Lanes(planes, signs, bitmaps, raw)).astype(jnp.uint8)
    return Packed(out, headers, offsets.astype(jnp.int32), needed)


def decode(
    code: Packed, exponent: Int32[Array, "..."], dtype, *, keeps_signs: bool = True
) -> Float[Array, "tiles 128 32"]:
    """NaN everywhere if words were dropped."""
    headers = u32(code.headers)
    lanes = read_headers(headers)
    lost = code.needed > code.words.size

    def get(index):
        return code.words.at[index].get(mode="fill", fill_value=0)

    def get_slot(slot, carry):
        """The signs, slot 0, or plane slot - 1."""
        p, negative, reader = carry
        live = jnp.where(slot == 0, lanes.signs != 0, u32(slot) <= lanes.planes)[:, None]
        place, reader = reader.advance(jnp.where(live, bits, u32(0)))
        dense = shift_right(get(place.at), u32(WORD) - place.left) | shift_left(get(place.fresh), place.left)
        piece = jnp.where(live, expand(dense, moves, mask), u32(0))
        plane = u32(_group_bits(jnp.where(slot == 0, u32(0), piece))) << u32(jnp.maximum(slot - 1, 0))
        return p + plane, jnp.where(slot == 0, piece, negative), reader

    index, live, following = _bitmap_places(u32(code.offsets), lanes.bitmaps)
    words = jnp.where(live, get(index), u32(0))
    words_of_groups = [words[:, g] for g in range(GROUPS)]
    mask = jnp.stack(lanes.bitmaps.unpack(words_of_groups, columns_without(headers), _WARP), 1)
    bits = jax.lax.population_count(mask)
    moves = moves_of(mask)
    most = jnp.max(lanes.planes, initial=0).astype(jnp.int32)
    # Zeros that depend on the data, as in `encode`.
    none = jnp.broadcast_to(u32(code.needed < 0), mask.shape)
    has_bits = bits.sum(1) * (lanes.planes + lanes.signs) != 0
    start = u32(_group_bits(none)), none, Reader.of(following, has_bits)
    p, negative, reader = jax.lax.fori_loop(0, most + 1, get_slot, start)
    dither = _dither.of_values(len(p), dtype)
    value = dequantize(p, _group_bits(mask), _group_bits(negative), exponent, dither, dtype, keeps_signs=keeps_signs)
    value = tiles.to_bits(jnp.where(lost, jnp.asarray(jnp.nan, dtype), value))

    before = running_sum(lanes.raw) - lanes.raw
    row = jnp.arange(tiles.raw_words(dtype), dtype=jnp.uint32)[:, None]
    index = (reader.next[:, None] + before)[:, None] + row * lanes.raw.sum(-1)[:, None, None]
    is_raw = (lanes.raw != 0)[:, None]
    # Chosen as bits: backends may change the payload of a NaN that they choose as a number.
    return tiles.from_bits(jnp.where(is_raw & ~lost, _raw_bits(get(index), dtype), value), dtype)


def _bitmap_places(offsets, bitmaps: Bitmaps):
    """(tiles, 4, 32): the words that hold bitmaps, and whether they do. And the first ones of tiles behind them."""
    live = jnp.stack([bitmaps.any, bitmaps.any, bitmaps.both, bitmaps.both], 1)
    one = u32(live).reshape(len(live), GROUPS * LANES)
    ends = offsets[:, None] + running_sum(one)
    return (ends - one).reshape(live.shape), live, ends[:, -1]


def _group_words(bits: Bool[Array, "tiles 128 32"]) -> UInt32[Array, "tiles 4 32"]:
    """A bit per row of a group, the first in the lowest."""
    return pack(bits.reshape(-1, GROUPS, WORD, LANES).swapaxes(2, 3))[..., 0]


def _group_bits(words: UInt32[Array, "tiles 4 32"]) -> Bool[Array, "tiles 128 32"]:
    """The inverse."""
    return unpack(words[..., None]).swapaxes(2, 3).reshape(-1, LANE_VALUES, LANES)


def _raw_words(x: Float[Array, "tiles 128 32"]) -> UInt32[Array, "tiles words 32"]:
    """The values of a lane as words."""
    columns = tiles.to_bits(x).reshape(-1, GROUPS, 2, 16, LANES).swapaxes(2, 3)
    if x.dtype.itemsize == 2:
        columns = columns[..., 0, :] | (columns[..., 1, :] << 16)
    return columns.reshape(-1, tiles.raw_words(x.dtype), LANES)


def _raw_bits(words: UInt32[Array, "tiles words 32"], dtype) -> UInt32[Array, "tiles 128 32"]:
    """The inverse."""
    if jnp.dtype(dtype).itemsize == 2:
        words = jnp.stack([words & u32(0xFFFF), words >> 16], 2)
    return words.reshape(-1, GROUPS, 16, 2, LANES).swapaxes(2, 3).reshape(-1, LANE_VALUES, LANES)
