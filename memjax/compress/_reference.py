"""Encoding and decoding tiles in plain `jax.numpy`, which says what the kernels do.

Temporary memory is several times that of the array.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt16, UInt32

from memjax.compress import _tiles
from memjax.compress._bits import (
    WORD,
    bit_length,
    compress,
    compress_moves,
    expand,
    pack,
    shift_left,
    shift_right,
    u32,
    unpack,
)
from memjax.compress._quantize import dequantize, quantize
from memjax.compress._tiles import BITMAP_WORDS, GROUPS, LANES, ROWS


class Packed(NamedTuple):
    """A code: `words` hold the lanes, `needed` words of them, or fewer if that is more than there are."""

    words: UInt32[Array, " capacity"]
    headers: UInt16[Array, "tiles 32"]
    offsets: Int32[Array, " tiles"]
    needed: Int32[Array, ""]


class Stream(NamedTuple):
    """Where the bits of the planes of lanes are: those of the groups follow each other, and the planes do."""

    moves: list[UInt32[Array, "tiles 32 4"]]
    bits: UInt32[Array, "tiles 32 4"]
    before: UInt32[Array, "tiles 32 4"]
    start: UInt32[Array, "tiles 32"]

    def at(self, slot: UInt32[Array, "..."]) -> tuple[Array, Array]:
        """The word, and the bit in it, where each group's part of a plane begins; planes are counted from the signs."""
        bit = (slot * self.bits.sum(-1))[..., None] + self.before
        return self.start[..., None] + bit // u32(WORD), bit % u32(WORD)


class Lanes(NamedTuple):
    """The headers of lanes, and where their words begin."""

    words: UInt32[Array, "tiles 32"]
    planes: UInt32[Array, "tiles 32"]
    signs: UInt32[Array, "tiles 32"]
    bitmap: UInt32[Array, "tiles 32"]
    raw: UInt32[Array, "tiles 32"]
    start: UInt32[Array, "tiles 32"]


def encode(x: Float[Array, "tiles 64 32 2"], exponent: Int32[Array, "..."], capacity: int) -> Packed:
    """`exponent` broadcasts against `x`. Words past `capacity` are dropped, and counted in `needed`."""
    q, negative, escape = quantize(x, exponent)
    raw = u32(escape.any((1, 3)))
    mask, sign = _group_words(q != 0), _group_words(negative)
    largest = jnp.maximum(q.max((1, 3)), u32(1))
    # A value of 16 has five planes, so that four mean that q fits in four bits: kernels count on it.
    planes = bit_length(largest - u32(1)) + u32(largest == 16)
    total = jax.lax.population_count(mask).sum(-1)
    signs = u32((sign != 0).any(-1))
    bitmap = u32((total > 0) & ((total < _tiles.LANE_VALUES) | (planes + signs == 0)))
    words = (total * (planes + signs) + u32(WORD - 1)) // u32(WORD) + bitmap * u32(BITMAP_WORDS)
    count = jnp.where(raw != 0, u32(_tiles.raw_words(x.dtype)), words)
    offsets, start, needed = _places(count)
    headers = count | (planes << _tiles.PLANES_SHIFT) | (signs << _tiles.SIGNS_SHIFT) | (bitmap << _tiles.BITMAP_SHIFT)
    headers = jnp.where(raw != 0, count | u32(1 << _tiles.RAW_SHIFT), headers)

    coded = raw == 0
    # In loops, for the sake of memory. Every bit is written once, so adding is merging. The zeros to begin with depend on
    # the data, or compilers make those of all arrays at the beginning of a program.
    out = jnp.broadcast_to(u32(needed < 0), (capacity,))

    def put(out, index, words, live):
        return out.at[jnp.where(live, index, u32(capacity)).reshape(-1)].add(words.reshape(-1), mode="drop")

    def put_row(row, out):
        index = start[..., None] + u32(row * words_per_row) + jnp.arange(words_per_row, dtype=jnp.uint32)
        return put(out, index, jax.lax.dynamic_index_in_dim(rows, row, 1, keepdims=False), ~coded[..., None])

    def put_plane(slot, out):
        p = u32(slot) - signs[:, None, :, None]
        plane = (((q - u32(1)) >> (p & u32(31))) & u32(1) != 0) & (q != 0)
        is_sign = u32(slot) < signs
        dense = compress(jnp.where(is_sign[..., None], sign, _group_words(plane)), stream.moves)
        word, shift = stream.at(u32(slot))
        live = (coded & (u32(slot) < planes + signs))[..., None]
        out = put(out, word, shift_left(dense, shift), live & (stream.bits > 0))
        spill = live & (shift + stream.bits > WORD)
        return put(out, word + u32(1), shift_right(dense, u32(WORD) - shift), spill)

    rows = _raw_words(x)
    words_per_row = rows.shape[-1]
    stream = _stream(mask, bitmap, start)
    bitmap_at = start[..., None] + jnp.arange(GROUPS, dtype=jnp.uint32)
    out = put(out, bitmap_at, mask, (coded & (bitmap != 0))[..., None])
    out = jax.lax.fori_loop(0, jnp.max(planes + signs, initial=0).astype(jnp.int32), put_plane, out)
    out = jax.lax.fori_loop(0, jnp.max(raw, initial=0).astype(jnp.int32) * ROWS, put_row, out)
    return Packed(out, headers.astype(jnp.uint16), offsets, needed)


def decode(code: Packed, exponent: Int32[Array, "..."], dtype) -> Float[Array, "tiles 64 32 2"]:
    """NaN everywhere if words were dropped."""
    lanes = read_headers(code)
    lost = code.needed > code.words.size

    def get(index):
        return code.words.at[index].get(mode="fill", fill_value=0)

    full = jnp.where(lanes.words == 0, u32(0), ~u32(0))
    bitmap = get(lanes.start[..., None] + jnp.arange(GROUPS, dtype=jnp.uint32))
    mask = jnp.where((lanes.bitmap != 0)[..., None], bitmap, full[..., None])
    stream = _stream(mask, lanes.bitmap, lanes.start)

    def plane(slot):
        word, shift = stream.at(slot)
        dense = shift_right(get(word), shift) | shift_left(get(word + u32(1)), u32(WORD) - shift)
        return expand(dense, stream.moves, mask)

    def add_plane(p, q):
        live = (u32(p) < lanes.planes)[..., None]
        return q + (u32(_group_bits(jnp.where(live, plane(lanes.signs + u32(p)), u32(0)))) << u32(p))

    negative = _group_bits(jnp.where((lanes.signs != 0)[..., None], plane(u32(0)), u32(0)))
    most = jnp.where(lanes.raw != 0, u32(0), lanes.planes)
    q = jax.lax.fori_loop(0, jnp.max(most, initial=0).astype(jnp.int32), add_plane, u32(_group_bits(mask)))
    value = _tiles.to_bits(jnp.where(lost, jnp.asarray(jnp.nan, dtype), dequantize(q, negative, exponent, dtype)))
    raw = get(lanes.start[..., None] + jnp.arange(_tiles.raw_words(dtype), dtype=jnp.uint32))
    is_raw = (lanes.raw != 0)[:, None, :, None]
    # Chosen as bits: backends may change the payload of a NaN that they choose as a number.
    return _tiles.from_bits(jnp.where(is_raw & ~lost, _raw_bits(raw, dtype), value), dtype)


def read_headers(code: Packed) -> Lanes:
    """The headers taken apart."""
    header = u32(code.headers)
    count = header & u32(0xFF)
    start = u32(code.offsets)[:, None] + jnp.cumsum(count, -1, dtype=jnp.uint32) - count
    return Lanes(
        count,
        (header >> _tiles.PLANES_SHIFT) & u32(31),
        (header >> _tiles.SIGNS_SHIFT) & u32(1),
        (header >> _tiles.BITMAP_SHIFT) & u32(1),
        header >> _tiles.RAW_SHIFT,
        start,
    )


def _stream(mask, bitmap, start) -> Stream:
    bits = jax.lax.population_count(mask)
    before = jnp.cumsum(bits, -1, dtype=jnp.uint32) - bits
    return Stream(compress_moves(mask), bits, before, start + bitmap * u32(BITMAP_WORDS))


def _places(count):
    per_tile = count.sum(-1)
    ends = jnp.cumsum(per_tile, dtype=jnp.uint32)
    offsets = ends - per_tile
    start = offsets[:, None] + jnp.cumsum(count, -1, dtype=jnp.uint32) - count
    return offsets.astype(jnp.int32), start, per_tile.sum().astype(jnp.int32)


def _group_words(bits):
    """(..., 64, 32, 2) booleans as (..., 32, 4) words."""
    *lead, _, _, _ = bits.shape
    split = bits.reshape(*lead, ROWS // WORD, WORD, LANES, 2)
    words = pack(jnp.moveaxis(split, -3, -1))[..., 0]  # (..., 2, 32, 2): half of the rows, lane, column
    return jnp.moveaxis(words, -3, -2).reshape(*lead, LANES, GROUPS)


def _group_bits(words):
    """The inverse."""
    *lead, _, _ = words.shape
    split = jnp.moveaxis(words.reshape(*lead, LANES, ROWS // WORD, 2), -2, -3)
    return jnp.moveaxis(unpack(split[..., None]), -1, -3).reshape(*lead, ROWS, LANES, 2)


def _raw_words(x):
    """(tiles, 64, 32, words): the values of a row of a lane as words."""
    bits = _tiles.to_bits(x)
    return bits if x.dtype.itemsize == 4 else bits[..., :1] | (bits[..., 1:] << 16)


def _raw_bits(words, dtype):
    if jnp.dtype(dtype).itemsize == 4:
        bits = words.reshape(len(words), LANES, ROWS, 2)
    else:
        bits = jnp.stack([words & u32(0xFFFF), words >> 16], -1)
    return bits.transpose(0, 2, 1, 3)
