"""The kernel that encodes a tile: one warp, a lane of 128 values to a thread, one pass over the input.

Values become numbers of steps, four to a word; from these planes (`_lane_bits`), how many words the tile needs, and,
once it has got a place for them, its words. What differs between lanes are distances of shifts.

Tiles take places in the order in which they get that far: a sum of counts that all of them add to. That order is the one
thing that may differ from run to run. Waiting for all tiles before it, by decoupled look-back, cost half of the throughput
on an H200.

Arrays of four groups of a thread's words are (4, 32), of four values of each word (4, 4, 32): with every operation written
once for all of them, kernels are small enough for compilers.
"""

import jax.numpy as jnp
from jax import lax

from memjax.compress import _lane_bits, _tiles
from memjax.compress._bits import WORD, Words, compress, compress_moves, u32
from memjax.compress._pallas_tile import any_lane, of_group, rows_of_bytes, when
from memjax.compress._quantize import RAW_EXPONENT, float32_bits, inverse_step
from memjax.compress._reference import Lanes, write_headers
from memjax.compress._tiles import GROUPS, LANES, ROWS
from memjax.compress._warp import INTEGER


def encode_kernel(x_ref, exponent_ref, _, words_ref, headers_ref, offsets_ref, needed_ref, *, layout, warp):
    from jax.experimental.pallas import program_id, triton

    tile = program_id(0)
    lane = jnp.arange(LANES, dtype=jnp.int32)
    where = layout.at(tile, warp)
    exponents = where.exponents(exponent_ref)
    max_code = _tiles.max_code(layout.dtype)
    places = u32(8) * jnp.arange(4, dtype=jnp.uint32)[None, :, None]  # of bytes

    def steps(row):
        """`INTEGER` + q, and the values as float32s' bits."""
        wide = float32_bits(where.load(x_ref, row))
        exponent = exponents(row)
        q = warp.steps(wide, exponent, inverse_step(exponent))
        return jnp.where(exponent == RAW_EXPONENT, u32(0x7FFFFFFF), q) if where.exponent_varies else q, wide

    def half(step, carry):
        """Words 7 to 4, then 3 to 0: what is loaded at a time has to fit into registers, those of several warps."""
        _, latest, largest, sign = carry
        codes: list[Words] = []
        for word in reversed(range(4)):
            q, wide = steps(rows_of_bytes(word) + 4 * (1 - step))
            # All of `INTEGER` but that of the lowest byte overflows.
            codes.insert(0, jnp.sum(q << places, 1, dtype=jnp.uint32) - u32(INTEGER))
            largest = jnp.maximum(largest, q)
            sign = warp.append_top_bit(sign, wide)
        return latest, tuple(codes), largest, sign

    none, nothing = jnp.zeros((GROUPS, LANES), jnp.uint32), jnp.zeros((4, 4, LANES), jnp.uint32)
    upper, lower, largest, sign = lax.fori_loop(0, 2, half, ((none,) * 4, (none,) * 4, nothing, nothing))
    codes = [*lower, *upper]
    sign = jnp.sum(sign << places, 1, dtype=jnp.uint32)
    largest = jnp.max(jnp.max(largest.astype(jnp.int32), 1), 0)
    raw = largest > INTEGER + max_code
    if not where.exponent_varies:
        raw |= exponents(None) == RAW_EXPONENT
    largest = jnp.where(raw, u32(0), u32(largest) - u32(INTEGER))

    # For 16 and 256 one more: see `_reference.encode`.
    more = u32((largest == 16) | (largest == 256))
    n_planes = jnp.where(largest > 1, warp.bit_length(largest - u32(1)) + more, u32(0))
    most = jnp.max(n_planes.astype(jnp.int32))

    def byte_planes(byte):
        words = []
        for word in range(8):
            q, _ = steps(rows_of_bytes(word))
            words.append(jnp.sum(((q >> (8 * byte)) & u32(0xFF)) << places, 1, dtype=jnp.uint32))
        return _lane_bits.transpose(words)

    def write(q_planes):
        """Everything, from the planes of numbers of steps."""
        zero = jnp.zeros((LANES,), jnp.uint32)
        mask = q_planes[0]
        for plane in q_planes[1:]:
            mask = mask | plane
        mask = jnp.where(raw, u32(0), mask)
        bits = warp.ones(mask)
        total = jnp.sum(bits, 0, dtype=jnp.uint32)
        slots = [sign & mask, *(plane & mask for plane in _lane_bits.decrement(q_planes))]
        signs = u32(jnp.max((slots[0] != 0).astype(jnp.int32), 0))
        bitmap = u32((total > 0) & ((total < ROWS) | (n_planes + signs == 0)))
        coded_words = (total * (n_planes + signs) + u32(WORD - 1)) // u32(WORD) + bitmap * u32(GROUPS)
        raw_before, raw_lanes = warp.before(raw)
        coded_words = warp.total(coded_words)
        words = coded_words + raw_lanes * u32(_tiles.raw_words(layout.dtype))

        place = warp.fetch_add(needed_ref, jnp.max(words.astype(jnp.int32)))
        triton.store(offsets_ref.at[tile], place)
        headers = write_headers(Lanes(n_planes, signs, bitmap, u32(raw)))
        triton.store(headers_ref.at[tile * LANES + lane], headers.astype(jnp.uint8))
        place = jnp.broadcast_to(u32(place), (LANES,))
        moves = compress_moves(mask)

        def put(index, word, live):
            live &= index < u32(layout.capacity)
            triton.store(words_ref.at[index.astype(jnp.int32)], word, mask=live)

        has_bitmap = bitmap != 0
        before, count = warp.before(has_bitmap)
        for g in range(GROUPS):
            put(place + before + u32(g) * count, of_group(mask, g), has_bitmap)

        def put_slot(slot, state):
            """The signs, slot 0, or a plane: see `_reference.Reader`."""
            word, at, left, following = state
            live = jnp.where(slot == 0, signs, u32(u32(slot) <= n_planes)) != 0
            pieces = slots[0]
            for p in range(1, len(slots)):
                pieces = jnp.where(slot == p, slots[p], pieces)
            pieces = compress(jnp.where(live, pieces, u32(0)), moves)
            lengths = jnp.where(live, bits, u32(0))
            for g in range(GROUPS):
                dense, length = of_group(pieces, g), of_group(lengths, g)
                begins = length > left
                before, count = warp.before(begins)
                word = word | ((dense << (u32(WORD - 1) - left)) << 1)
                put(at, word, begins)
                word = jnp.where(begins, dense >> left, word)
                at = jnp.where(begins, following + before, at)
                left = jnp.where(begins, left + u32(WORD), left) - length
                following = following + count
            return word, at, left, following

        nowhere = jnp.full((LANES,), 2**32 - 1, jnp.uint32)
        state = zero, nowhere, zero, place + u32(GROUPS) * count
        first = 1 - any_lane(signs).astype(jnp.int32)
        word, at, _, _ = lax.fori_loop(first, most + 1, put_slot, state)
        put(at, word, at != nowhere)

        def put_raw(row, carry):
            index = place + coded_words + raw_before + u32(row) * raw_lanes
            put(index, where.load_words(x_ref, row), raw)
            return carry

        raw_rows = any_lane(u32(raw)).astype(jnp.int32) * _tiles.raw_words(layout.dtype)
        lax.fori_loop(0, raw_rows, put_raw, 0)

    def transposed():
        # Few planes are soon found.
        return lax.cond(
            most <= 4, lambda: _lane_bits.transpose(codes, 4) + [none] * 4, lambda: _lane_bits.transpose(codes)
        )

    # All that follows is written once if possible: compilers take long over large kernels.
    if max_code < 256:
        write(transposed())
    else:
        when(most <= 8, lambda: write(transposed()))
        when(most > 8, lambda: write(byte_planes(0) + byte_planes(1)))
