"""The kernel that encodes a tile: one warp, with a lane of 128 values to a thread. It reads values once if they are not
negative and, in float32, have at most 256 steps.

The planes of values (`_value_planes`) determine how many words the tile needs. When it has a place for them, the warp writes
them; all lanes do the same, with different distances of shifts.

Tiles get places in the order in which they arrive, by adding their counts of words to one sum. That order alone may differ from
run to run. Waiting for all earlier tiles, by decoupled look-back, cost half of the throughput on an H200.

The words of a thread's four groups are arrays of (4, 32). Every operation is written once for all of them, which keeps kernels
small enough for compilers.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from memjax.compress._codecs.bits import WORD, Words, compress, moves_of, u32
from memjax.compress._error_bounded import tiles
from memjax.compress._error_bounded.pallas_tile import (
    RAW_ROWS,
    Where,
    any_lane,
    any_of,
    carries,
    increment,
    rows_of_bytes,
    stack,
    take,
    transpose,
    when,
)
from memjax.compress._error_bounded.quantize import RAW_EXPONENT, dither_bits, float32_bits, inverse_step
from memjax.compress._error_bounded.reference import Lanes, write_headers
from memjax.compress._error_bounded.tiles import GROUPS, LANES, Bitmaps
from memjax.compress._error_bounded.warp import INTEGER


def encode_tile(where: Where, x_ref, exponent_ref, _, words_ref, headers_ref, offsets_ref, needed_ref):
    """`_` is an input of zero. The output `needed_ref` lies in its memory, and so starts from zero."""
    of_values = _value_planes(where, x_ref, exponent_ref)

    def write(coded, is_unrolled):
        _write(where, coded, of_values.signs, is_unrolled, x_ref, words_ref, headers_ref, offsets_ref, needed_ref)

    if tiles.max_planes(where.layout.dtype) == _FEW:
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


# A tile's values as planes of bits: magnitudes (quantize.py) with dither, in the order of a lane's values (`transpose`).
#
# Values become numbers of parts of steps. Two bytes of each number are read at a time, and collected four to a word.
# Dither is added to their planes.

_FEW = 8
_AT_A_TIME = 2  # groups


class _Coded(NamedTuple):
    """A tile as planes of shape (4, 32): groups, lanes.

    Attributes:
      planes: bits of magnitudes, valid for values that are not zero.
      some: which values are not zero.
      raw: which lanes have to be stored as they are.
    """

    planes: list[Words]
    some: Words
    raw: Bool[Array, "32"]


class _ValuePlanes(NamedTuple):
    """The planes of a tile.

    Attributes:
      few: the tile with `_FEW` planes.
      is_all: whether these planes are enough for all lanes.
      all: gives the tile with as many planes as a code can have.
      signs: the plane of negative values.
    """

    few: _Coded
    is_all: Bool[Array, ""]
    all: Callable[[], _Coded]
    signs: Words


def _value_planes(where: Where, x_ref, exponent_ref) -> _ValuePlanes:
    """The planes of a tile, which is read once, again if there are negative values, and twice more by `all`."""
    warp, dtype = where.warp, where.layout.dtype
    dither_planes = dither_bits(dtype)
    exponents, by_value = where.exponents(exponent_ref), where.layout.exponents == "value"

    none = jnp.zeros((_AT_A_TIME, LANES), jnp.uint32)

    def of_groups(read, count, carry):
        """`count` arrays for all groups, which `read` makes from the values of some groups, two rows to a word; and a carry.

        Some groups at a time, so that the registers have room for many warps.
        """
        rows, steps = rows_of_bytes(8, _AT_A_TIME), GROUPS // _AT_A_TIME

        def some_groups(step, state):
            latest, carry = state
            later = tiles.ROWS // steps * step
            loaded, exponent = where.load(x_ref, rows, later), exponents(rows, later)
            each = [([take(x, row) for x in loaded], _of_row(exponent, row)) for row in range(16)]
            new, carry = read([each[i : i + 2] for i in range(0, 16, 2)], carry)
            return (*latest[1:], tuple(new)), carry

        state = ((none,) * count,) * steps, carry
        parts, carry = lax.fori_loop(0, warp.opaque(jnp.int32(steps)), some_groups, state)
        each_array = zip(*parts, strict=True)
        return [stack([take(part, i) for part in of_one for i in range(_AT_A_TIME)]) for of_one in each_array], carry

    def read(byte, count):
        """`count` planes of the numbers of parts of steps, from this byte on. And the bits that are set in any of these numbers,
        and in any value.
        """

        def read_groups(words, carry):
            lower, upper, (seen, bits) = [], [], carry
            for rows in words:
                both = []
                for values, exponent in rows:
                    counts = [
                        warp.parts(x, k - dither_planes, inverse_step(k - dither_planes))
                        for x, k in zip(_magnitudes(values, dtype), exponent, strict=True)
                    ]
                    if by_value:
                        is_raw = [k == RAW_EXPONENT for k in exponent]
                        counts = [jnp.where(raw, u32(2**32 - 1), x) for raw, x in zip(is_raw, counts, strict=True)]
                    both.append(warp.bytes_of(counts, (byte, byte + 1, byte + 4, byte + 5)))
                    seen = seen | counts[0] | counts[1]
                    bits = functools.reduce(jnp.bitwise_or, values, bits)
                lower.append(warp.bytes_of(both, (0, 4, 2, 6)))
                upper.append(warp.bytes_of(both, (1, 5, 3, 7)))
            return (transpose(lower, warp) + transpose(upper, warp))[:count], (seen, bits)

        planes, (seen, bits) = of_groups(read_groups, count, (none, none))
        return planes, seen, bits

    def read_signs():
        def read_groups(words, carry):
            bits = none
            for (first, _), (second, _) in words:
                bits = (bits >> 1) | (_top_bits(first, second, warp) & u32(0x80808080))
            return [bits], carry

        return of_groups(read_groups, 1, ())[0][0]

    def coded(parts, seen):
        """The tile as coded with these planes of parts."""
        *planes, too_many = increment(
            [*parts[dither_planes:], jnp.zeros_like(parts[0])],
            carries(parts[:dither_planes], where.dither()),
        )
        some = functools.reduce(jnp.bitwise_or, parts)
        beyond = seen & u32(~INTEGER & 0xFFFFFFFF & -(1 << len(parts)))
        return _Coded(planes, some, is_raw | any_of(too_many & some) | any_of(beyond))

    last = tiles.max_planes(dtype) + dither_planes
    parts, seen, bits = read(0, _FEW + dither_planes)
    is_raw = jnp.zeros((LANES,), jnp.bool_) if by_value else jnp.minimum(*exponents()) == RAW_EXPONENT
    few = coded(parts, seen)

    def all_():
        return coded(read(0, 16)[0] + read(2, last - 16)[0], seen)

    signs = lax.cond(
        any_lane(u32(any_of(bits & u32(_SIGNS[dtype.itemsize])))), read_signs, lambda: jnp.zeros_like(few.some)
    )
    return _ValuePlanes(few, ~any_lane(u32(few.raw & ~is_raw)), all_, signs)


_SIGNS = {2: 0x80008000, 4: 0x80000000}


def _of_row(exponents, index):
    """The exponents of one row."""
    return [take(x, index) if x.ndim == 3 else x for x in exponents]


def _top_bits(first: list[Words], second: list[Words], warp) -> Words:
    """A word whose bytes have the highest bits of two rows' values."""
    if len(first) == 1:
        return warp.bytes_of((first[0], second[0]), (1, 5, 3, 7))
    columns = [warp.bytes_of(column, (3, 7, 3, 7)) for column in zip(first, second, strict=True)]
    return warp.bytes_of(columns, (0, 1, 6, 7))


def _magnitudes(words: list[Words], dtype) -> list[Words]:
    """The magnitudes of two values, as the bits of float32s."""
    if len(words) == 2:
        return [word & u32(0x7FFFFFFF) for word in words]
    pair = words[0] & u32(0x7FFF7FFF)
    if dtype == jnp.bfloat16:
        return [pair << 16, pair & u32(0xFFFF0000)]
    return [float32_bits(tiles.from_bits(half, dtype)) for half in (pair & u32(0xFFFF), pair >> 16)]
