"""The kernel that encodes a tile: one warp, with a lane of 128 values to a thread. It reads values once if they are not
negative and, in float32, have at most 256 steps.

The planes of values (value_planes.py) determine how many words the tile needs. When it has a place for them, the warp writes
them; all lanes do the same, with different distances of shifts.

Tiles get places in the order in which they arrive, by adding their counts of words to one sum. That order alone may differ from
run to run. Waiting for all earlier tiles, by decoupled look-back, cost half of the throughput on an H200.

The words of a thread's four groups are arrays of (4, 32). Every operation is written once for all of them, which keeps kernels
small enough for compilers.
"""

import functools

import jax.numpy as jnp
from jax import lax

from memjax.compress._codecs.bits import WORD, compress, moves_of, u32
from memjax.compress._error_bounded import tiles
from memjax.compress._error_bounded.bitmaps import Bitmaps
from memjax.compress._error_bounded.kernels.pallas_tile import RAW_ROWS, Where, any_lane, any_of, take, when
from memjax.compress._error_bounded.kernels.value_planes import FEW, value_planes
from memjax.compress._error_bounded.reference import Lanes, write_headers
from memjax.compress._error_bounded.tiles import GROUPS, LANES


def encode_tile(where: Where, x_ref, exponent_ref, _, words_ref, headers_ref, offsets_ref, needed_ref):
    """The unnamed input, zero, is the memory of `needed_ref`."""
    of_values = value_planes(where, x_ref, exponent_ref)

    def write(coded, is_unrolled):
        _write(where, coded, of_values.signs, is_unrolled, x_ref, words_ref, headers_ref, offsets_ref, needed_ref)

    if tiles.max_planes(where.layout.dtype) == FEW:
        write(of_values.few, True)
    else:
        when(of_values.is_all, lambda: write(of_values.few, True))
        when(~of_values.is_all, lambda: write(of_values.all(), False))


def _write(where, coded, signs, is_unrolled, x_ref, words_ref, headers_ref, offsets_ref, needed_ref):
    from jax.experimental.pallas import triton

    warp, dtype, (planes, some, raw) = where.warp, where.layout.dtype, coded
    mask = jnp.where(raw, u32(0), some)
    negative, n_planes = signs & mask, jnp.zeros((LANES,), jnp.uint32)
    for p, plane in enumerate(planes):
        n_planes = jnp.where(any_of(plane & mask), u32(p + 1), n_planes)
    bits = warp.ones(mask)
    total = jnp.sum(bits, 0, dtype=jnp.uint32)
    signs = u32(any_of(negative))
    most = jnp.max(n_planes.astype(jnp.int32))
    groups = [take(mask, g) for g in range(GROUPS)]
    bitmaps = Bitmaps.of(groups, n_planes + signs)
    coded_words = (total * (n_planes + signs) + u32(WORD - 1)) // u32(WORD) + bitmaps.words
    raw_before, raw_lanes = warp.before(raw)
    coded_words = warp.total(coded_words)
    words = coded_words + raw_lanes * u32(tiles.raw_words(dtype))

    place = warp.fetch_add(needed_ref, words.astype(jnp.int32))
    lane = jnp.arange(LANES, dtype=jnp.int32)
    triton.store(offsets_ref.at[where.tile], jnp.max(place))
    headers = write_headers(Lanes(n_planes, signs, bitmaps, u32(raw)))
    triton.store(headers_ref.at[where.tile * LANES + lane], headers.astype(jnp.uint8))
    place = u32(place)
    fits = place + words <= u32(where.capacity)
    moves = moves_of(mask)

    def put(index, word, live):
        where.store_words(words_ref, index, word, live & fits)

    following, packed = place, bitmaps.pack(groups, warp)
    for has_words, pair in ((bitmaps.any, packed[:2]), (bitmaps.both, packed[2:])):
        before, count = warp.before(has_words)
        for word in pair:
            put(following + before, word, has_words)
            following = following + count

    def put_slot(pieces, needed, state):
        """Write the signs or a plane of the lanes that have it: see `reference.Reader`."""
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

    has_bits = total * (n_planes + signs) != 0
    before, count = warp.before(has_bits)
    at = jnp.where(has_bits, following + before, u32(2**32 - 1))
    state = jnp.zeros((LANES,), jnp.uint32), at, jnp.full((LANES,), WORD, jnp.uint32), following + count
    state = lax.cond(any_lane(signs), lambda: put_slot(negative, signs != 0, state), lambda: state)
    if is_unrolled:
        for p, plane in enumerate(planes):
            put_plane = functools.partial(put_slot, plane, u32(p) < n_planes, state)
            state = lax.cond(p < most, put_plane, lambda state=state: state)
    else:

        def put_next(p, carry):
            (plane, *others), state = carry
            # Planes move up: to choose one by its number takes longer.
            return (*others, plane), put_slot(plane, u32(p) < n_planes, state)

        _, state = lax.fori_loop(0, most, put_next, (tuple(planes), state))
    word, at, _, _ = state
    put(at, word, has_bits)

    def put_raw(i, carry):
        """Write some rows at once: a load of one row takes as long."""
        row = jnp.arange(RAW_ROWS, dtype=jnp.int32)[:, None]
        for j, words in enumerate(values := where.load(x_ref, row, RAW_ROWS * i)):
            before = u32(len(values) * (row + RAW_ROWS * i) + j) * raw_lanes
            put(place + coded_words + raw_before + before, words, jnp.broadcast_to(raw, words.shape))
        return carry

    # Compilers would write out a loop whose length they know.
    lax.fori_loop(0, warp.opaque(any_lane(u32(raw)).astype(jnp.int32) * (tiles.ROWS // RAW_ROWS)), put_raw, 0)
