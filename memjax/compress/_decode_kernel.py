"""The kernel that decodes a tile, the encoder's steps in reverse: one warp, a lane to a thread, every word read once."""

import functools

import jax.numpy as jnp
from jax import lax

from memjax.compress import _lane_bits, _tiles
from memjax.compress._bits import WORD, compress_moves, expand, u32
from memjax.compress._pallas_tile import any_lane, is_group, of_group, rows_of_bytes, when
from memjax.compress._quantize import half_step, last_with_half, step
from memjax.compress._reference import read_headers
from memjax.compress._tiles import GROUPS, LANES
from memjax.compress._warp import INTEGER

_LIKELY_WORDS = 384  # of a tile: three bits a value


def decode_kernel(words_ref, headers_ref, offsets_ref, needed_ref, exponent_ref, x_ref, *, layout, warp):
    from jax.experimental.pallas import program_id

    tile = program_id(0)
    where = layout.at(tile, warp)
    is_complete = needed_ref[0] <= layout.capacity

    def lose():
        for word in range(8):
            where.store(x_ref, rows_of_bytes(word), jnp.full((4, 4, LANES), jnp.nan, layout.dtype))

    when(is_complete, lambda: _decode(words_ref, headers_ref, offsets_ref, exponent_ref, x_ref, tile, where, warp))
    when(~is_complete, lose)


def _decode(words_ref, headers_ref, offsets_ref, exponent_ref, x_ref, tile, where, warp):
    from jax.experimental.pallas import triton

    layout = where.layout
    zero = jnp.zeros((LANES,), jnp.uint32)
    header = u32(headers_ref[tile * LANES + jnp.arange(LANES, dtype=jnp.int32)])
    lanes = read_headers(header)
    is_raw = lanes.raw != 0

    def get(index, live):
        return triton.load(words_ref.at[index.astype(jnp.int32)], mask=live, other=0)

    offset = offsets_ref[tile]
    following = jnp.broadcast_to(u32(offset + _into_cache(words_ref, offset, layout, warp)), (LANES,))
    has_bitmap = lanes.bitmap != 0
    before, count = warp.before(has_bitmap)
    full = jnp.where((header == 0) | is_raw, zero, u32(2**32 - 1))
    mask = jnp.zeros((GROUPS, LANES), jnp.uint32)
    for g in range(GROUPS):
        word = jnp.where(has_bitmap, get(following + before + u32(g) * count, has_bitmap), full)
        mask = jnp.where(is_group(g), word, mask)
    bits = warp.ones(mask)
    moves = compress_moves(mask)
    start = zero, zero, following + u32(GROUPS) * count
    has_signs = any_lane(lanes.signs)
    most = jnp.max(lanes.planes.astype(jnp.int32))

    def get_slot(slot, state):
        """The signs, slot 0, or a plane: see `_reference.Reader`."""
        rest, left, following = state
        live = jnp.where(slot == 0, lanes.signs, u32(u32(slot) <= lanes.planes)) != 0
        lengths = jnp.where(live, bits, u32(0))
        pieces = jnp.zeros((GROUPS, LANES), jnp.uint32)
        for g in range(GROUPS):
            length = of_group(lengths, g)
            begins = length > left
            before, count = warp.before(begins)
            fresh = get(following + before, begins)
            pieces = jnp.where(is_group(g), rest | (fresh << left), pieces)
            # Of a new word, length - left bits are used: 1 to 32 of them. Of an old one at most `left`, below 32.
            used = (fresh >> ((length - left - u32(1)) & u32(WORD - 1))) >> 1
            rest = jnp.where(begins, used, rest >> (length & u32(WORD - 1)))
            left = jnp.where(begins, left + u32(WORD), left) - length
            following = following + count
        return jnp.where(live, expand(pieces, moves, mask), u32(0)), (rest, left, following)

    exponents = where.exponents(exponent_ref)
    in_pairs = warp.native and layout.dtype == jnp.bfloat16 and not where.exponent_varies

    def finish(count):
        def add_slot(slot, carry):
            state, slots = carry
            pieces, state = get_slot(slot, state)
            return state, tuple(jnp.where(slot == p, pieces, old) for p, old in enumerate(slots))

        none = jnp.zeros((GROUPS, LANES), jnp.uint32)
        first = 1 - has_signs.astype(jnp.int32)
        state, (sign, *planes) = lax.fori_loop(first, most + 1, add_slot, (start, (none,) * (count + 1)))

        def bytes_of(planes):
            planes = _lane_bits.increment(planes, mask) + [none] * (8 - len(planes))
            return _lane_bits.transpose(planes)

        if count == 8:
            codes = [lax.cond(most <= 4, lambda: bytes_of(planes[:4]), lambda: bytes_of(planes))]
        else:
            planes = _lane_bits.increment(planes, mask)
            codes = [_lane_bits.transpose(planes[:8]), _lane_bits.transpose(planes[8:])]

        def write(is_simple):
            def quarter(step, carry):
                """Of two words: what is computed at a time has to fit into registers, those of many warps."""
                for word in range(2):
                    rows = rows_of_bytes(word) + 2 * step
                    exponent = exponents(rows)
                    if is_simple and in_pairs:
                        where.store(x_ref, rows, _pairs(carry[0][word], exponent, warp))
                    else:
                        q = functools.reduce(jnp.add, (_bytes(code[word]) << (8 * i) for i, code in enumerate(carry)))
                        x = _value(q, exponent, layout.dtype, 7 if is_simple else count)
                        if not is_simple:
                            x |= _spread(sign, u32(WORD - 1 - word) - u32(2 * step)) & u32(1 << 31)
                        where.store(x_ref, rows, _narrow(x, layout.dtype))
                return tuple((*code[2:], *code[:2]) for code in carry)

            lax.fori_loop(0, 4, quarter, tuple(map(tuple, codes)))

        # Two versions, for what a ReLU gives and for everything.
        is_simple = ~has_signs & (most <= (6 if in_pairs else 7))
        when(is_simple, lambda: write(True))
        when(~is_simple, lambda: write(False))
        return state[2]

    is_long = _tiles.max_code(layout.dtype) > 255
    following = lax.cond(most <= 8, lambda: finish(8), lambda: finish(16)) if is_long else finish(8)

    raw_before, raw_lanes = warp.before(is_raw)

    def get_raw(row, carry):
        word = get(following + raw_before + u32(row) * raw_lanes, is_raw)
        if layout.dtype.itemsize == 4:
            where.store(x_ref, row, _tiles.from_bits(word, layout.dtype), is_raw)
        else:
            for i in range(2):
                half = (word >> (16 * i)) & u32(0xFFFF)
                where.store(x_ref, 2 * row + i, _tiles.from_bits(half, layout.dtype), is_raw)
        return carry

    raw_rows = any_lane(lanes.raw).astype(jnp.int32) * _tiles.raw_words(layout.dtype)
    lax.fori_loop(0, raw_rows, get_raw, 0)


def _into_cache(words_ref, offset, layout, warp):
    """Reads what is likely to be the tile's, all at once: later reads wait for each other. Returns 0."""
    from jax.experimental.pallas import triton

    index = offset + jnp.arange(LANES, dtype=jnp.int32)
    seen = jnp.zeros((LANES,), jnp.uint32)
    for first in range(0, _LIKELY_WORDS, LANES):
        at = index + first
        seen = seen | triton.load(words_ref.at[at], mask=at < layout.capacity, other=0)
    return jnp.max(warp.nothing(seen).astype(jnp.int32))


def _places():
    return u32(8) * jnp.arange(4, dtype=jnp.uint32)[None, :, None]


def _bytes(word):
    return (word[:, None] >> _places()) & u32(0xFF)


def _spread(word, shift):
    """`word` shifted to the left by `shift`, 8 less for every byte."""
    return word[:, None] << (shift - _places())


def _value(q, exponent, dtype, planes):
    """The bits of what q, of so many planes, stands for as a float32: `_quantize.dequantize`."""
    half = half_step(exponent, dtype)
    if last_with_half(dtype) < 2**planes:
        half = jnp.where(q <= u32(last_with_half(dtype)), half, jnp.float32(0))
    steps = (lax.bitcast_convert_type(q | u32(INTEGER), jnp.float32) - jnp.float32(2.0**23)) - half
    return lax.bitcast_convert_type(jnp.maximum(steps, jnp.float32(0)) * step(exponent), jnp.uint32)


def _pairs(word, exponent, warp):
    """What `_value` gives for the bytes of a word, for bfloat16, two at a time; q is at most 64."""
    twice = lambda x: (lambda bits: (bits >> 16) | (bits & u32(0xFFFF0000)))(lax.bitcast_convert_type(x, jnp.uint32))
    size = step(exponent)
    low, high = warp.bfloat16_pairs(word, twice(size), twice(size * jnp.float32(-0.5)))
    byte = jnp.arange(4, dtype=jnp.int32)[None, :, None]
    both = jnp.where(byte < 2, low[:, None], high[:, None]) >> u32(16 * (byte % 2))
    return _tiles.from_bits(both & u32(0xFFFF), jnp.bfloat16)


def _narrow(bits, dtype):
    """A float32 that is a value of `dtype`."""
    if dtype == jnp.bfloat16:
        return _tiles.from_bits(bits >> 16, dtype)
    return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)
