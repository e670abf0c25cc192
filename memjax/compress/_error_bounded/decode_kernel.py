"""The kernel that decodes a tile: one warp, with a lane to a thread. It reverses the encoder's steps and reads each word once."""

import functools
import itertools

import jax.numpy as jnp
from jax import lax

from memjax.compress._codecs.bits import WORD, Words, expand, moves_of, u32
from memjax.compress._error_bounded import tiles
from memjax.compress._error_bounded.pallas_tile import (
    RAW_ROWS,
    Where,
    any_lane,
    rows_of_bytes,
    stack,
    take,
    transpose,
    when,
)
from memjax.compress._error_bounded.quantize import LEAST, dither_bits, middle, step
from memjax.compress._error_bounded.reference import columns_without, read_headers
from memjax.compress._error_bounded.tiles import GROUPS, LANES
from memjax.compress._error_bounded.warp import scales_of_bfloat16_values


def decode_tile(
    where: Where, words_ref, headers_ref, offsets_ref, needed_ref, exponent_ref, x_ref, *, keeps_signs: bool
):
    is_complete = needed_ref[0] <= where.capacity

    def lose():
        nan = _narrow(jnp.full((tiles.ROWS, LANES), 0x7FC00000, jnp.uint32), where.layout.dtype)
        rows = jnp.arange(tiles.ROWS, dtype=jnp.int32)[:, None]
        where.store(x_ref, rows, jnp.int32(0), _pair(nan, nan))

    when(is_complete, lambda: _decode(where, words_ref, headers_ref, offsets_ref, exponent_ref, x_ref, keeps_signs))
    when(~is_complete, lose)


def _decode(where, words_ref, headers_ref, offsets_ref, exponent_ref, x_ref, keeps_signs):
    tile, layout, warp = where.tile, where.layout, where.warp
    zero = jnp.zeros((LANES,), jnp.uint32)
    header = u32(headers_ref[tile * LANES + jnp.arange(LANES, dtype=jnp.int32)])
    lanes = read_headers(header)
    is_raw = lanes.raw != 0

    get = functools.partial(where.load_words, words_ref)
    offset = offsets_ref[tile]
    following = jnp.broadcast_to(u32(offset + _into_cache(words_ref, offset, where)), (LANES,))
    words = []
    for has_words in (lanes.bitmaps.any, lanes.bitmaps.both):
        before, count = warp.before(has_words)
        words += [get(following + before, has_words), get(following + count + before, has_words)]
        following = following + u32(2) * count
    mask = stack(lanes.bitmaps.unpack(words, columns_without(header), warp))
    bits = warp.ones(mask)
    moves = moves_of(mask)
    has_bits = (jnp.sum(bits, 0, dtype=jnp.uint32) != 0) & (lanes.planes + lanes.signs != 0)
    before, count = warp.before(has_bits)
    start = get(following + before, has_bits), jnp.full((LANES,), WORD, jnp.uint32), following + count
    has_signs = any_lane(lanes.signs)
    most = jnp.max(lanes.planes.astype(jnp.int32))

    def get_slot(slot, state):
        """Read the signs, slot 0, or a plane: see `reference.Reader`."""
        unread, left, following = state
        live = jnp.where(slot == 0, lanes.signs, u32(u32(slot) <= lanes.planes)) != 0
        lengths = jnp.where(live, bits, u32(0))
        pieces = []
        for g in range(GROUPS):
            length = take(lengths, g)
            begins = length > left
            before, count = warp.before(begins)
            fresh = get(following + before, begins)
            pieces.append(unread | warp.shift_left(fresh, left))
            left = jnp.where(begins, left + u32(WORD), left) - length
            # A new word has `left` bits that are not read yet; an old one loses the bits that were just read.
            unread = jnp.where(begins, warp.shift_right(fresh, u32(WORD) - left), warp.shift_right(unread, length))
            following = following + count
        return jnp.where(live, expand(stack(pieces), moves, mask), u32(0)), (unread, left, following)

    exponents = where.exponents(exponent_ref)
    in_pairs = warp.native and layout.dtype == jnp.bfloat16
    value_of = functools.partial(_value_of, dtype=layout.dtype, keeps_signs=keeps_signs)
    none = jnp.zeros((GROUPS, LANES), jnp.uint32)

    def numbers_of(planes):
        """Planes of the numbers whose `middle` the values are. With signs, numbers below half the parts of a step become half of
        them, and zeros are 0. Without signs, half becomes one more than half, and zeros are half.
        """
        *low, half = (~plane for plane in where.dither())
        above = functools.reduce(jnp.bitwise_or, planes)
        if keeps_signs:
            at_least = half | above
            low, half = [plane & at_least for plane in low], half | ~at_least
        else:
            low[0] = low[0] | (half & ~functools.reduce(jnp.bitwise_or, [*low[1:], above]))
        if layout.dtype == jnp.bfloat16 and len(planes) == 8:
            half = half | planes[7]  # past 128 steps, see `middle`
        half = half & mask if keeps_signs else half | ~mask
        return [*(plane & mask for plane in low), half, *planes]

    def get_planes(count, state):
        """`numbers_of` the next `count` planes, and the state after them. It is unrolled: loops take longer."""
        planes = []
        for slot in range(1, count + 1):
            get = functools.partial(get_slot, jnp.int32(slot), state)
            plane, state = lax.cond(slot <= most, get, lambda state=state: (none, state))
            planes.append(plane)
        return numbers_of(planes), state

    def finish_short():
        """Decode up to four planes without signs: the outputs of most ReLUs."""
        numbers, state = get_planes(4, start)
        words = transpose([*numbers, *[~none] * in_pairs], warp)
        second, steps = jnp.arange(2, dtype=jnp.uint32)[:, None, None], [step(k) for k in exponents()]
        if in_pairs:
            scales = scales_of_bfloat16_values(steps, keeps_signs)
        for i, word in enumerate(words):
            if in_pairs:
                values = [warp.bfloat16_values(word, second, scales)]
            else:
                numbers = (warp.float_of_byte(word, u32(2 * column) + second) for column in range(2))
                values = _pair(*(value_of(x, s) for x, s in zip(numbers, steps, strict=True)))
            where.store(x_ref, rows_of_bytes(1) + i % 2, jnp.int32(i - i % 2), values)
        return state[2]

    def finish_eight(signed):
        """Decode up to eight planes."""
        signs, state = get_slot(jnp.int32(0), start) if signed else (none, start)
        numbers, state = get_planes(8, state)
        steps = [step(k) for k in exponents()]

        def finish_group(group, groups):
            """Decode a group at a time, so that many warps fit into the registers."""
            *planes, signs = groups[0]
            lower = transpose(planes[:8], warp)
            upper = transpose([*planes[8:], *[zero] * (15 - len(planes)), *[signs] * signed], warp)
            for i, which in itertools.product(range(8), ((0, 4, 2, 6), (1, 5, 3, 7))):
                halves, sign = warp.bytes_of((lower[i], upper[i]), which), zero
                if signed:
                    halves, sign = halves & u32(0x7FFF7FFF), halves & u32(0x80008000)
                if layout.dtype == jnp.bfloat16:
                    values = [warp.bfloat16_values_of_halves(halves, steps, keeps_signs)]
                else:
                    numbers = (warp.float_of_half(halves, column) for column in range(2))
                    values = _pair(*(value_of(x, s) for x, s in zip(numbers, steps, strict=True)))
                signs_of_words = [sign] if len(values) == 1 else [sign << 16, sign & u32(1 << 31)]
                values = [value ^ sign for value, sign in zip(values, signs_of_words, strict=True)]
                where.store(x_ref, jnp.int32(8 * (which[0] % 2) + i), 16 * group, values)
            return *groups[1:], groups[0]

        groups = tuple(tuple(take(plane, g) for plane in (*numbers, signs)) for g in range(GROUPS))
        lax.fori_loop(0, warp.opaque(jnp.int32(GROUPS)), finish_group, groups)
        return state[2]

    def finish(count):
        """Decode any number of planes, with any exponents."""

        def add_slot(slot, carry):
            slots, state = carry
            pieces, state = get_slot(slot, state)
            return tuple(jnp.where(slot == p, pieces, old) for p, old in enumerate(slots)), state

        first = 1 - has_signs.astype(jnp.int32)
        (signs, *planes), state = lax.fori_loop(first, most + 1, add_slot, ((none,) * (count + 1), start))
        numbers = numbers_of(planes)

        def finish_group(group, carry):
            signs_of_group, *bits = (take(x, group) for x in (signs, *numbers))
            words = tuple(tuple(transpose(bits[i : i + 8], warp)) for i in range(0, len(bits), 8))

            def finish_word(word, carry):
                rows = jnp.arange(2, dtype=jnp.int32)[:, None] * 8, 16 * group + word
                exponent = exponents(*rows)

                def value(column):
                    place = u32(8) * (u32(2 * column) + jnp.arange(2, dtype=jnp.uint32)[:, None])
                    bytes_ = (((words[0] >> place) & u32(0xFF)) << (8 * i) for i, words in enumerate(carry))
                    number = functools.reduce(jnp.add, bytes_)
                    x = middle(number, layout.dtype, keeps_signs=keeps_signs)
                    x = (jnp.where(number == 0, 0, x) if keeps_signs else x) * step(exponent[column])
                    sign = (signs_of_group << (u32(WORD - 1) - u32(word) - place)) & u32(1 << 31)
                    return _narrow(lax.bitcast_convert_type(x, jnp.uint32) ^ sign, layout.dtype)

                where.store(x_ref, *rows, _pair(value(0), value(1)))
                return tuple((*words[1:], words[0]) for words in carry)

            lax.fori_loop(0, 8, finish_word, words)
            return carry

        lax.fori_loop(0, GROUPS, finish_group, 0)
        return state[2]

    def finish_any():
        if tiles.max_planes(layout.dtype) == 8:
            return finish(8)
        return lax.cond(most <= 8, lambda: finish(8), lambda: finish(15))

    if layout.exponents == "value":
        following = finish_any()
    else:
        is_eight = (most <= 8) & (jnp.maximum(*exponents()).max() < 107)  # 2^20 steps are a float
        following = lax.cond(
            is_eight,
            lambda: lax.cond(
                has_signs,
                lambda: finish_eight(True),
                lambda: lax.cond(most <= 4, finish_short, lambda: finish_eight(False)),
            ),
            finish_any,
        )

    raw_before, raw_lanes = warp.before(is_raw)

    def get_raw(i, carry):
        """Copy some rows at once: a load of one row takes as long."""
        row, count = jnp.arange(RAW_ROWS, dtype=jnp.int32)[:, None], 2 * layout.dtype.itemsize // 4
        live = jnp.broadcast_to(is_raw, (RAW_ROWS, LANES))
        before = [u32(count * (row + RAW_ROWS * i) + j) * raw_lanes for j in range(count)]
        words = [get(following + raw_before + x, live) for x in before]
        where.store(x_ref, row, RAW_ROWS * i, words, live)
        return carry

    # The trip count is opaque, because compilers would unroll a loop with a known one.
    lax.fori_loop(0, warp.opaque(any_lane(lanes.raw).astype(jnp.int32) * (tiles.ROWS // RAW_ROWS)), get_raw, 0)


def _into_cache(words_ref, offset, where):
    """Read 512 words at once, likely all of the tile's, because later reads wait for each other. Returns 0."""
    seen, lane = jnp.zeros((LANES,), jnp.uint32), jnp.arange(LANES, dtype=jnp.int32)
    where.prefetch(words_ref, offset + 512 + LANES * lane)
    for first in (0, 8):
        at = offset + (jnp.arange(8, dtype=jnp.int32)[:, None] + first) * LANES + lane
        loaded = where.load_words(words_ref, at, at < where.capacity)
        for i in range(8):
            seen = seen | take(loaded, i)
    return jnp.max(where.warp.nothing(seen).astype(jnp.int32))


def _value_of(number, step, dtype, keeps_signs):
    """The `middle` of a number of `numbers_of`, times a step, as `dtype`. `number` is a float: that number plus 2^23."""
    half = 1 << (dither_bits(dtype) - 1)
    value = (number - (2.0**23 + half)) * (step * (0.5 / half))
    if keeps_signs:
        value = jnp.maximum(value, (number - 2.0**23) * (step * (LEAST / half)))
    return _narrow(lax.bitcast_convert_type(value, jnp.uint32), dtype)


def _narrow(bits, dtype):
    """A float32, given by its bits, as `dtype`; the lower bits are cut off."""
    if dtype == jnp.bfloat16:
        return tiles.from_bits(bits >> 16, dtype)
    return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)


def _pair(first, second) -> list[Words]:
    """Two values as words: one for both, or, if they have 32 bits, one for each."""
    low, high = tiles.to_bits(first), tiles.to_bits(second)
    return [low, high] if first.dtype.itemsize == 4 else [low | (high << 16)]
