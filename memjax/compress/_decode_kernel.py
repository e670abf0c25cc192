"""The kernel that decodes a tile, the encoder's steps in reverse: one warp, a lane to a thread, every word read once."""

import functools

import jax.numpy as jnp
from jax import lax

from memjax.compress import _dither, _lane_bits, _tiles
from memjax.compress._bits import WORD, Words, compress_moves, expand, u32
from memjax.compress._pallas_tile import Where, any_lane, rows_of_bytes, stack, take, when
from memjax.compress._quantize import middle, step
from memjax.compress._reference import read_headers
from memjax.compress._tiles import GROUPS, LANES
from memjax.compress._warp import two_bfloat16s


def decode_tile(where: Where, words_ref, headers_ref, offsets_ref, needed_ref, exponent_ref, x_ref):
    is_complete = needed_ref[0] <= where.capacity

    def lose():
        nan = _narrow(jnp.full((_tiles.ROWS, LANES), 0x7FC00000, jnp.uint32), where.layout.dtype)
        rows = jnp.arange(_tiles.ROWS, dtype=jnp.int32)[:, None]
        where.store(x_ref, rows, jnp.int32(0), _pair(nan, nan))

    when(is_complete, lambda: _decode(where, words_ref, headers_ref, offsets_ref, exponent_ref, x_ref))
    when(~is_complete, lose)


def _decode(where, words_ref, headers_ref, offsets_ref, exponent_ref, x_ref):
    from jax.experimental.pallas import triton

    tile, layout, warp = where.tile, where.layout, where.warp
    zero = jnp.zeros((LANES,), jnp.uint32)
    header = u32(headers_ref[tile * LANES + jnp.arange(LANES, dtype=jnp.int32)])
    lanes = read_headers(header)
    is_raw = lanes.raw != 0

    def get(index, live):
        return triton.load(words_ref.at[index.astype(jnp.int32)], mask=live, other=0)

    offset = offsets_ref[tile]
    following = jnp.broadcast_to(u32(offset + _into_cache(words_ref, offset, where)), (LANES,))
    has_bitmap = lanes.bitmap != 0
    before, count = warp.before(has_bitmap)
    full = jnp.where((header == 0) | is_raw, zero, u32(2**32 - 1))
    words = [get(following + before + u32(g) * count, has_bitmap) for g in range(GROUPS)]
    mask = stack([jnp.where(has_bitmap, word, full) for word in words])
    bits = warp.ones(mask)
    moves = compress_moves(mask)
    following = following + u32(GROUPS) * count
    has_bits = (jnp.sum(bits, 0, dtype=jnp.uint32) != 0) & (lanes.planes + lanes.signs != 0)
    before, count = warp.before(has_bits)
    start = get(following + before, has_bits), jnp.full((LANES,), WORD, jnp.uint32), following + count
    has_signs = any_lane(lanes.signs)
    most = jnp.max(lanes.planes.astype(jnp.int32))

    def get_slot(slot, state):
        """The signs, slot 0, or a plane: see `_reference.Reader`."""
        rest, left, following = state
        live = jnp.where(slot == 0, lanes.signs, u32(u32(slot) <= lanes.planes)) != 0
        lengths = jnp.where(live, bits, u32(0))
        pieces = []
        for g in range(GROUPS):
            length = take(lengths, g)
            begins = length > left
            before, count = warp.before(begins)
            fresh = get(following + before, begins)
            pieces.append(rest | warp.shift_left(fresh, left))
            left = jnp.where(begins, left + u32(WORD), left) - length
            # Of a new word, as many bits are left as of the lane; what was left of an old one loses as many as are used.
            rest = jnp.where(begins, warp.shift_right(fresh, u32(WORD) - left), warp.shift_right(rest, length))
            following = following + count
        return jnp.where(live, expand(stack(pieces), moves, mask), u32(0)), (rest, left, following)

    exponents = where.exponents(exponent_ref)
    in_pairs = warp.native and layout.dtype == jnp.bfloat16
    none = jnp.zeros((GROUPS, LANES), jnp.uint32)
    second = jnp.arange(2, dtype=jnp.uint32)[:, None, None]

    def get_planes(count):
        """Of signs, and that many of q; and where the tile's other words are."""

        def add_slot(slot, carry):
            slots, state = carry
            pieces, state = get_slot(slot, state)
            return tuple(jnp.where(slot == p, pieces, old) for p, old in enumerate(slots)), state

        first = 1 - has_signs.astype(jnp.int32)
        (signs, *planes), state = lax.fori_loop(first, most + 1, add_slot, ((none,) * (count + 1), start))
        return signs, _lane_bits.increment(planes, mask), state[2]

    def numbers_of(planes):
        """Of 8 q + 7 - d: q - 1/2 - d / 8 steps, or, if these are not positive, a little of q - d / 8."""
        return *(~plane for plane in where.dither(exponent_ref)), *planes

    def finish_shortest():
        """Of q below 16 without signs: what most ReLUs give. Written out: loops take longer."""
        planes, state = [], start
        for slot in range(1, 5):
            get = functools.partial(get_slot, jnp.int32(slot), state)
            plane, state = lax.cond(slot <= most, get, lambda state=state: (none, state))
            planes.append(plane)
        numbers = numbers_of(_lane_bits.increment(planes, mask))
        words, values = of_short_pairs(numbers) if in_pairs else of_floats((*numbers, none))
        for i, word in enumerate(words):
            where.store(x_ref, rows_of_bytes(1) + i % 2, jnp.int32(i - i % 2), values(word, i))
        return state[2]

    def finish_short():
        """Of q below 32."""
        signs, planes, following = get_planes(5)
        numbers = numbers_of(planes)
        words, values = of_pairs(numbers) if in_pairs else of_floats(numbers)

        def write_word(i, carry):
            pair, (word, *others) = values(carry[0], i), carry
            # To bit 15 the signs of the first column, to bit 31 those of the second, which are 16 places higher.
            of_both = signs << (u32(15 - i) - 8 * second)
            bits = [(of_both << 16) & u32(1 << 31), of_both & u32(1 << 31)]
            bits = bits if len(pair) == 2 else [of_both & u32(0x80008000)]
            where.store(x_ref, rows_of_bytes(1), i, [x | sign for x, sign in zip(pair, bits, strict=True)])
            return *others, word

        lax.fori_loop(0, 8, write_word, tuple(words))
        return following

    def of_floats(numbers):
        size = [step(exponent) for exponent in exponents()]

        def value(word, column):
            x = warp.float_of_byte(word, u32(2 * column) + second)
            x, low = (x - (2.0**20 + 1.375)) * size[column], (x - (2.0**20 + 0.875)) * (size[column] * _dither.LEAST)
            return _narrow(lax.bitcast_convert_type(jnp.maximum(jnp.maximum(x, low), 0.0), jnp.uint32), layout.dtype)

        return _lane_bits.transpose(numbers, warp), lambda word, _: _pair(*(value(word, column) for column in range(2)))

    def scales_of(*factors):
        return tuple(two_bfloat16s(*(step(k) * jnp.float32(factor) for k in exponents())) for factor in factors)

    def of_short_pairs(numbers):
        """Below 128: bytes of 128 more are 16 more as numbers."""
        scales = scales_of(1.0, _dither.LEAST, -17.375, -16.875 * _dither.LEAST)
        words = _lane_bits.transpose([*numbers[:7], ~none], warp)
        return words, lambda word, _: [warp.bfloat16_values(word, second, *scales)]

    def of_pairs(numbers):
        """The last bit apart."""
        scales = scales_of(*(factor * scale for scale in (1.0, _dither.LEAST) for factor in (2.0, 0.125)))
        scales = *scales[:2], *scales_of(-1.375), *scales[2:], *scales_of(-0.875 * _dither.LEAST)
        words = _lane_bits.transpose([*numbers[1:], ~none], warp)

        def values(word, i):
            odd = (numbers[0] >> u32(i)) & u32(0x01010101)
            return [warp.bfloat16_values_of_two(word, odd, second, scales)]

        return words, values

    def finish(count):
        signs, planes, following = get_planes(count)

        def finish_group(group, carry):
            """One at a time: all that is computed has to fit into registers, those of many warps."""
            own_signs, *bits = (take(x, group) for x in (signs, *planes))
            eighths = [take(x, group) for x in where.dither(exponent_ref)]
            parts = eighths, *(bits[i : i + 8] for i in range(0, count, 8))
            words = tuple(tuple(_lane_bits.transpose(part, warp)) for part in parts)

            def finish_word(word, carry):
                rows = jnp.arange(2, dtype=jnp.int32)[:, None] * 8, 16 * group + word
                exponent = exponents(*rows)

                def value(column, exponent):
                    place = u32(8) * (u32(2 * column) + jnp.arange(2, dtype=jnp.uint32)[:, None])
                    d, *bytes_of_q = ((words[0] >> place) & u32(0xFF) for words in carry)
                    q = functools.reduce(jnp.add, (byte << (8 * i) for i, byte in enumerate(bytes_of_q)))
                    if layout.exponents == "value":
                        d = _dither.allowed(d, exponent, layout.dtype)
                    x = _value(q, exponent, d, layout.dtype, count)
                    sign = (own_signs << (u32(WORD - 1) - u32(word) - place)) & u32(1 << 31)
                    return _narrow(x | sign, layout.dtype)

                where.store(x_ref, *rows, _pair(*(value(column, exponent[column]) for column in (0, 1))))
                return tuple((*words[1:], words[0]) for words in carry)

            lax.fori_loop(0, 8, finish_word, words)
            return carry

        lax.fori_loop(0, GROUPS, finish_group, 0)
        return following

    def finish_any():
        if _tiles.max_planes(layout.dtype) == 8:
            return finish(8)
        return lax.cond(most <= 8, lambda: finish(8), lambda: finish(16))

    if layout.exponents == "value":
        following = finish_any()
    else:
        # All factors are normal numbers, and half a step is a number of the dtype.
        are_usual = jnp.min(jnp.minimum(*exponents())) > (-24 if layout.dtype == jnp.float16 else -110)
        is_short = (most <= 5) & are_usual
        following = lax.cond(
            is_short & (most <= 4) & ~has_signs,
            finish_shortest,
            lambda: lax.cond(is_short, finish_short, finish_any),
        )

    raw_before, raw_lanes = warp.before(is_raw)

    def get_raw(row, carry):
        count = 2 * layout.dtype.itemsize // 4
        words = [get(following + raw_before + u32(count * row + i) * raw_lanes, is_raw) for i in range(count)]
        where.store(x_ref, jnp.int32(0), row, words, is_raw)
        return carry

    # Compilers would write out a loop whose length they know.
    lax.fori_loop(0, warp.opaque(any_lane(lanes.raw).astype(jnp.int32) * _tiles.ROWS), get_raw, 0)


def _into_cache(words_ref, offset, where):
    """Reads 384 words, likely all of the tile's, all at once: later reads wait for each other. Returns 0."""
    from jax.experimental.pallas import triton

    seen = jnp.zeros((LANES,), jnp.uint32)
    for first, lines in ((0, 8), (8, 4)):
        line = jnp.arange(lines, dtype=jnp.int32)[:, None] + first
        at = offset + line * LANES + jnp.arange(LANES, dtype=jnp.int32)
        loaded = triton.load(words_ref.at[at], mask=at < where.capacity, other=0)
        for i in range(lines):
            seen = seen | take(loaded, i)
    return jnp.max(where.warp.nothing(seen).astype(jnp.int32))


def _value(q, exponent, eighths, dtype, planes):
    """The bits of what q, of so many planes, stands for as a float32: `_quantize.dequantize`."""
    value = middle(q, exponent, eighths, dtype, most=2**planes) * step(exponent)
    return lax.bitcast_convert_type(value, jnp.uint32)


def _narrow(bits, dtype):
    """A float32 by its bits as `dtype`, bits beyond cut off."""
    if dtype == jnp.bfloat16:
        return _tiles.from_bits(bits >> 16, dtype)
    return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)


def _pair(first, second) -> list[Words]:
    """The words of two values."""
    low, high = _tiles.to_bits(first), _tiles.to_bits(second)
    return [low, high] if first.dtype.itemsize == 4 else [low | (high << 16)]
