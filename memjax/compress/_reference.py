"""Encoding and decoding tiles in plain `jax.numpy`, which says what the kernels do.

Temporary memory is several times that of the array: every piece of a code is an element of one scatter.
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

    def at(self, slot: UInt32[Array, "slots tiles 32"]) -> tuple[Array, Array]:
        """The word, and the bit in it, where each group's part of a plane begins."""
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

    coded = (raw == 0)[..., None]
    groups = jnp.arange(GROUPS, dtype=jnp.uint32)
    raw_words = _raw_words(x)
    places = jnp.arange(raw_words.shape[-1], dtype=jnp.uint32)
    stream = _stream(mask, bitmap, start)
    p = _plane_numbers(x.dtype)
    plane = _group_words((((q - u32(1)) >> p[:, None, None, None, None]) & u32(1) != 0) & (q != 0))
    dense = compress(jnp.concatenate([sign[None], plane]), stream.moves)
    word, shift = stream.at(jnp.concatenate([jnp.zeros_like(signs)[None], signs + p[:, None, None]]))
    live = jnp.concatenate([(signs != 0)[None], planes > p[:, None, None]])[..., None] & coded
    pieces = [
        (start[..., None] + groups, mask, coded & (bitmap != 0)[..., None]),
        (start[..., None] + places, raw_words, ~coded),
        (word, shift_left(dense, shift), live & (stream.bits > 0)),
        (word + u32(1), shift_right(dense, u32(WORD) - shift), live & (shift + stream.bits > WORD)),
    ]
    index = jnp.concatenate([jnp.where(live, at, u32(capacity)).reshape(-1) for at, _, live in pieces])
    out = jnp.zeros(capacity, jnp.uint32)
    # Every bit is written once, so adding is merging.
    out = out.at[index].add(jnp.concatenate([word.reshape(-1) for _, word, _ in pieces]), mode="drop")
    return Packed(out, headers.astype(jnp.uint16), offsets, needed)


def decode(code: Packed, exponent: Int32[Array, "..."], dtype) -> Float[Array, "tiles 64 32 2"]:
    """Lanes whose words were dropped come out as anything."""
    lanes = read_headers(code)

    def get(index):
        return code.words.at[index].get(mode="fill", fill_value=0)

    full = jnp.where(lanes.words == 0, u32(0), ~u32(0))
    bitmap = get(lanes.start[..., None] + jnp.arange(GROUPS, dtype=jnp.uint32))
    mask = jnp.where((lanes.bitmap != 0)[..., None], bitmap, full[..., None])
    stream = _stream(mask, lanes.bitmap, lanes.start)
    p = _plane_numbers(dtype)
    word, shift = stream.at(jnp.concatenate([jnp.zeros_like(lanes.signs)[None], lanes.signs + p[:, None, None]]))
    live = jnp.concatenate([(lanes.signs != 0)[None], lanes.planes > p[:, None, None]])[..., None]
    dense = shift_right(get(word), shift) | shift_left(get(word + u32(1)), u32(WORD) - shift)
    planes = _group_bits(jnp.where(live, expand(dense, stream.moves, mask), u32(0)))
    negative = planes[0]
    higher = jnp.sum(u32(planes[1:]) << p[:, None, None, None, None], 0, dtype=jnp.uint32)
    q = u32(_group_bits(mask)) + higher
    value = _tiles.to_bits(dequantize(q, negative, exponent, dtype))
    raw = get(lanes.start[..., None] + jnp.arange(_tiles.raw_words(dtype), dtype=jnp.uint32))
    # Chosen as bits: backends may change the payload of a NaN that they choose as a number.
    return _tiles.from_bits(jnp.where((lanes.raw != 0)[:, None, :, None], _raw_bits(raw, dtype), value), dtype)


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


def _plane_numbers(dtype):
    return jnp.arange(_tiles.max_planes(dtype), dtype=jnp.uint32)


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
    bits = _tiles.to_bits(x).transpose(0, 2, 1, 3)  # tiles, lanes, rows, columns
    if x.dtype.itemsize == 4:
        return bits.reshape(len(x), LANES, 2 * ROWS)
    return bits[..., 0] | (bits[..., 1] << 16)


def _raw_bits(words, dtype):
    if jnp.dtype(dtype).itemsize == 4:
        bits = words.reshape(len(words), LANES, ROWS, 2)
    else:
        bits = jnp.stack([words & u32(0xFFFF), words >> 16], -1)
    return bits.transpose(0, 2, 1, 3)
