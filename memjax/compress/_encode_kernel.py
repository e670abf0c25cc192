"""The kernel that encodes a tile: one warp, a lane of 128 values to a thread, one pass over the input.

From the planes of values (`_value_planes`) follows how many words the tile needs, and, once it has got a place for them, its
words. What differs between lanes are distances of shifts.

Tiles take places in the order in which they get that far: a sum of counts that all of them add to. That order is the one
thing that may differ from run to run. Waiting for all tiles before it, by decoupled look-back, cost half of the throughput
on an H200.

Arrays of four groups of a thread's words are (4, 32): with every operation written once for all of them, kernels are
small enough for compilers.
"""

import functools

import jax.numpy as jnp
from jax import lax

from memjax.compress import _tiles
from memjax.compress._bits import WORD, compress, compress_moves, u32
from memjax.compress._pallas_tile import Where, any_group, any_lane, take, when
from memjax.compress._reference import Lanes, write_headers
from memjax.compress._tiles import GROUPS, LANE_VALUES, LANES
from memjax.compress._value_planes import value_planes


def encode_tile(where: Where, x_ref, exponent_ref, words_ref, headers_ref, offsets_ref, needed_ref):
    from jax.experimental.pallas import triton

    warp, dtype = where.warp, where.layout.dtype
    of_values = value_planes(where, x_ref, exponent_ref)

    def needed_of(planes, mask):
        """How many of these planes are needed."""
        count = jnp.zeros((LANES,), jnp.uint32)
        for p, plane in enumerate(planes):
            if p in (4, 5, 8):  # for 16, 32 and 256 one more: see `_reference.encode`
                plane = plane | functools.reduce(jnp.bitwise_and, planes[:p])
            count = jnp.where(any_group(plane & mask), u32(p + 1), count)
        return count

    def write(planes, raw):
        """Everything."""
        mask = jnp.where(raw, u32(0), of_values.some)
        negative, n_planes = of_values.signs & mask, needed_of(planes, mask)
        bits = warp.ones(mask)
        total = jnp.sum(bits, 0, dtype=jnp.uint32)
        signs = u32(any_group(negative))
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

        def put_slot(pieces, needed, state):
            """The signs or a plane, of lanes that need it: see `_reference.Reader`."""
            word, at, left, following = state
            pieces, lengths = compress(pieces, moves), jnp.where(needed, bits, u32(0))
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

        def put_plane(p, carry):
            (plane, *others), state = carry
            # Planes move up: to choose one by its number takes longer.
            return (*others, plane), put_slot(plane & mask, u32(p) < n_planes, state)

        following = place + u32(GROUPS) * count
        has_bits = total * (n_planes + signs) != 0
        before, count = warp.before(has_bits)
        at = jnp.where(has_bits, following + before, u32(2**32 - 1))
        state = jnp.zeros((LANES,), jnp.uint32), at, jnp.full((LANES,), WORD, jnp.uint32), following + count
        state = lax.cond(any_lane(signs), lambda: put_slot(negative, signs != 0, state), lambda: state)
        _, (word, at, _, _) = lax.fori_loop(0, most, put_plane, (tuple(planes), state))
        put(at, word, has_bits)

        def put_raw(row, carry):
            for i, word in enumerate(values := where.load(x_ref, jnp.int32(0), row)):
                put(place + coded_words + raw_before + u32(len(values) * row + i) * raw_lanes, word, raw)
            return carry

        # Compilers would write out a loop whose length they know.
        lax.fori_loop(0, warp.opaque(any_lane(u32(raw)).astype(jnp.int32) * _tiles.ROWS), put_raw, 0)

    most_planes = _tiles.max_planes(dtype)
    if most_planes == 8:
        # Writing is written once if possible: compilers take long over large kernels.
        none = jnp.zeros((GROUPS, LANES), jnp.uint32)

        def few():
            planes, raw = of_values.few()
            return (planes + [none] * most_planes)[:most_planes], raw

        write(*lax.cond(of_values.are_few, few, of_values.all))
    else:
        when(of_values.are_few, lambda: write(*of_values.few()))
        when(~of_values.are_few, lambda: write(*of_values.all()))
