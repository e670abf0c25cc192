"""The kernel that encodes a tile: one warp, a lane of 128 values to a thread, one pass over the input.

Values become codes, four to a word; from these planes (`_lane_bits`), how many words the tile needs, and, once it has got a
place for them, its words. What differs between lanes are distances of shifts.

Tiles take places in the order in which they get that far: a sum of counts that all of them add to. That order is the one
thing that may differ from run to run. Waiting for all tiles before it, by decoupled look-back, cost half of the throughput
on an H200.

Arrays of four groups of a thread's words are (4, 32): with every operation written once for all of them, kernels are
small enough for compilers.
"""

import functools

import jax.numpy as jnp
from jax import lax

from memjax.compress import _dither, _lane_bits, _tiles
from memjax.compress._bits import WORD, Words, compress, compress_moves, u32
from memjax.compress._pallas_tile import Where, any_lane, rows_of_bytes, take, when
from memjax.compress._quantize import RAW_EXPONENT, float32_bits, inverse_step
from memjax.compress._reference import Lanes, write_headers
from memjax.compress._tiles import GROUPS, LANE_VALUES, LANES
from memjax.compress._warp import INTEGER, two_bfloat16s


def encode_tile(where: Where, x_ref, exponent_ref, words_ref, headers_ref, offsets_ref, needed_ref):
    from jax.experimental.pallas import triton

    warp, dtype = where.warp, where.layout.dtype
    exponents = where.exponents(exponent_ref)
    max_code = _tiles.max_code(dtype)
    none = jnp.zeros((GROUPS, LANES), jnp.uint32)
    dither = where.dither(exponent_ref)
    magnitude_bits = u32(0x7FFFFFFF if dtype.itemsize == 4 else 0x7FFF7FFF)

    def four_words(read, carry):
        """Words 0 to 3, then 4 to 7, of the codes of values: what is loaded at a time has to fit into registers, those of
        many warps. Also two planes: of values that are not zero, and of signs.
        """

        def half(step, carry):
            _, latest, some, sign, seen = carry
            rows = rows_of_bytes(4), 4 * step
            loaded, exponent = where.load(x_ref, *rows), exponents(*rows)
            codes: list[Words] = []
            for word in range(4):
                pairs = [[take(x, 2 * word + second) for x in loaded] for second in range(2)]
                magnitudes = [[x & magnitude_bits for x in pair] for pair in pairs]
                own = [_of_rows(exponent, 2 * word + second) for second in range(2)]
                code, seen = read(magnitudes, own, (step, word), seen)
                codes.append(code)
                # Of all but zeros the sum sets the bit that was the sign's.
                is_some = _top_bytes([[x + magnitude_bits for x in pair] for pair in magnitudes], warp)
                some = (some >> 1) | (is_some & u32(0x80808080))
                sign = (sign >> 1) | (_top_bytes(pairs, warp) & u32(0x80808080))
            return latest, tuple(codes), some, sign, seen

        lower, upper, some, sign, seen = lax.fori_loop(0, 2, half, ((none,) * 4, (none,) * 4, none, none, carry))
        return lower + upper, some, sign, seen

    def values(magnitudes, exponent, moved):
        """The q - 1 of each, and the distance of its byte."""
        for second, pair in enumerate(magnitudes):
            for column, value in enumerate(_values(pair, dtype)):
                own, byte = exponent[second][column], 8 * (2 * column + second)
                eighths = (moved >> byte) & u32(7)
                count = warp.eighths(value, own, inverse_step(own - 3)) - u32(INTEGER)
                if where.layout.exponents == "value":
                    eighths = _dither.allowed(eighths, own, dtype)
                    count = jnp.where(own == RAW_EXPONENT, u32(0x3FFFFFFF), count)
                yield (count + eighths) >> 3, byte

    def read_any(byte):
        """One byte of codes, whatever they are. Seen: the largest code."""
        all_moved = _lane_bits.transpose(dither)

        def read(magnitudes, exponent, place, largest):
            step, word = place
            code = u32(0)
            for q, distance in values(magnitudes, exponent, jnp.where(step == 0, *all_moved[word::4])):
                largest = jnp.maximum(largest, q)
                code += ((q >> (8 * byte)) & u32(0xFF)) << distance
            return code, largest

        return read

    def any_planes():
        codes, some, sign, largest = four_words(read_any(0), none)
        largest = jnp.max(largest.astype(jnp.int32), 0)
        raw = largest >= max_code
        if where.layout.exponents != "value":
            raw |= jnp.minimum(*exponents()) == RAW_EXPONENT
        return *_lane_bits.transpose(codes), some, sign, raw, jnp.where(raw, 0, largest)

    def bfloat16_planes():
        """Of codes below 17, two values at a time, or `any_planes`."""
        exponent = exponents()
        inverse = two_bfloat16s(*(inverse_step(k - 3) for k in exponent))

        def read(magnitudes, _, __, seen):
            low, high = (warp.bfloat16_eighths(pair[0], exponent, inverse) for pair in magnitudes)
            return warp.bytes_of(low, high, (0, 4, 2, 6)), seen | low | high

        codes, some, sign, seen = four_words(read, none)
        is_long = jnp.max((seen & u32(0xBC80BC80)).astype(jnp.int32), 0) != 0
        is_long |= jnp.minimum(*exponent) == RAW_EXPONENT
        is_long = any_lane(u32(is_long))

        def short():
            eighths = _lane_bits.transpose(codes)
            # Dither is added to the lowest planes, of which no more is needed than what it adds to the others.
            carry = _lane_bits.carries(eighths[: _dither.PLANES], dither)
            planes = _lane_bits.increment(eighths[_dither.PLANES :], carry)
            zero = jnp.zeros((LANES,), jnp.int32)
            return *planes, *(none,) * _dither.PLANES, some, sign, zero > 0, zero

        return lax.cond(is_long, any_planes, short)

    is_simple = dtype == jnp.bfloat16 and where.layout.exponents != "value"
    *planes, some, sign, raw, largest = bfloat16_planes() if is_simple else any_planes()
    mask = jnp.where(raw, u32(0), some)

    def needed_of(planes):
        """How many of these planes are needed."""
        count = jnp.zeros((LANES,), jnp.uint32)
        for p, plane in enumerate(planes):
            if p in (4, 8):  # for 16 and 256 one more: see `_reference.encode`
                plane = plane | functools.reduce(jnp.bitwise_and, planes[:p])
            count = jnp.where(_any_group(plane & mask), u32(p + 1), count)
        return count

    def write(planes):
        """Everything."""
        slots = [plane & mask for plane in (sign, *planes)]
        n_planes = needed_of(planes)
        bits = warp.ones(mask)
        total = jnp.sum(bits, 0, dtype=jnp.uint32)
        signs = u32(_any_group(slots[0]))
        most = jnp.max(n_planes.astype(jnp.int32))
        bitmap = u32((total > 0) & ((total < LANE_VALUES) | (n_planes + signs == 0)))
        coded_words = (total * (n_planes + signs) + u32(WORD - 1)) // u32(WORD) + bitmap * u32(GROUPS)
        raw_before, raw_lanes = warp.before(raw)
        coded_words = warp.total(coded_words)
        words = coded_words + raw_lanes * u32(_tiles.raw_words(dtype))

        place = warp.fetch_add(needed_ref, words.astype(jnp.int32))
        lane = jnp.arange(LANES, dtype=jnp.int32)
        triton.store(offsets_ref.at[where.tile], jnp.max(place))
        headers = write_headers(Lanes(n_planes, signs, bitmap, u32(raw)))
        triton.store(headers_ref.at[where.tile * LANES + lane], headers.astype(jnp.uint8))
        place = u32(place)
        fits = place + words <= u32(where.capacity)
        moves = compress_moves(mask)

        def put(index, word, live):
            triton.store(words_ref.at[index.astype(jnp.int32)], word, mask=live & fits)

        has_bitmap = bitmap != 0
        before, count = warp.before(has_bitmap)
        for g in range(GROUPS):
            put(place + before + u32(g) * count, take(mask, g), has_bitmap)

        def put_slot(slot, state):
            """The signs, slot 0, or a plane: see `_reference.Reader`."""
            word, at, left, following = state
            pieces = slots[0]
            for p in range(1, len(slots)):
                pieces = jnp.where(slot == p, slots[p], pieces)
            pieces = compress(pieces, moves)
            live = jnp.where(slot == 0, signs, u32(u32(slot) <= n_planes)) != 0
            lengths = jnp.where(live, bits, u32(0))
            for g in range(GROUPS):
                dense, length = take(pieces, g), take(lengths, g)
                begins = length > left
                before, count = warp.before(begins)
                word = word | warp.shift_left(dense, u32(WORD) - left)
                put(at, word, begins)
                word = jnp.where(begins, warp.shift_right(dense, left), word)
                at = jnp.where(begins, following + before, at)
                left = jnp.where(begins, left + u32(WORD), left) - length
                following = following + count
            return word, at, left, following

        following = place + u32(GROUPS) * count
        has_bits = total * (n_planes + signs) != 0
        before, count = warp.before(has_bits)
        at = jnp.where(has_bits, following + before, u32(2**32 - 1))
        state = jnp.zeros((LANES,), jnp.uint32), at, jnp.full((LANES,), WORD, jnp.uint32), following + count
        first = 1 - any_lane(signs).astype(jnp.int32)
        word, at, _, _ = lax.fori_loop(first, most + 1, put_slot, state)
        put(at, word, has_bits)

        def put_raw(row, carry):
            for i, word in enumerate(values := where.load(x_ref, jnp.int32(0), row)):
                put(place + coded_words + raw_before + u32(len(values) * row + i) * raw_lanes, word, raw)
            return carry

        # Compilers would write out a loop whose length they know.
        lax.fori_loop(0, warp.opaque(any_lane(u32(raw)).astype(jnp.int32) * _tiles.ROWS), put_raw, 0)

    # Writing is written once if possible: compilers take long over large kernels.
    if max_code < 256:
        write(planes)
    else:
        is_short = jnp.max(largest) < 255
        when(is_short, lambda: write(planes))
        when(~is_short, lambda: write([*planes, *_lane_bits.transpose(four_words(read_any(1), none)[0])]))


def _any_group(x: Words):
    some = take(x, 0)
    for g in range(1, GROUPS):
        some = some | take(x, g)
    return some != 0


def _of_rows(exponents, index):
    """Those of one row of all, if they vary by row."""
    return [take(x, index) if x.ndim == 3 else x for x in exponents]


def _top_bytes(rows: list[list[Words]], warp) -> Words:
    """The bytes with the signs of the values of two rows, in a word's order."""
    first, second = rows
    if len(first) == 1:
        return warp.bytes_of(first[0], second[0], (1, 5, 3, 7))
    return warp.bytes_of(*(warp.bytes_of(a, b, (3, 7, 3, 7)) for a, b in zip(first, second, strict=True)), (0, 1, 6, 7))


def _values(pair: list[Words], dtype) -> list[Words]:
    """The bits of both values as float32s."""
    if dtype == jnp.bfloat16:
        return [pair[0] << 16, pair[0] & u32(0xFFFF0000)]
    if dtype == jnp.float16:
        return [float32_bits(_tiles.from_bits(half, dtype)) for half in (pair[0] & u32(0xFFFF), pair[0] >> 16)]
    return pair
