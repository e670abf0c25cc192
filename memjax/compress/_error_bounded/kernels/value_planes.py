"""Turns a tile's values into planes of bits: magnitudes (quantize.py) with dither (dither.py), in the order of a lane's values
(lane_bits.py).

Values become numbers of parts of steps. Two bytes of each number are read at a time, and collected four to a word. Dither is
added to their planes.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from memjax.compress._codecs.bits import Words, u32
from memjax.compress._error_bounded import dither, tiles
from memjax.compress._error_bounded.kernels import lane_bits
from memjax.compress._error_bounded.kernels.pallas_tile import Where, any_lane, any_of, rows_of_bytes, stack, take
from memjax.compress._error_bounded.quantize import RAW_EXPONENT, float32_bits, inverse_step
from memjax.compress._error_bounded.tiles import GROUPS, LANES
from memjax.compress._error_bounded.warp import INTEGER

FEW = 8
_AT_A_TIME = 2  # groups


class Coded(NamedTuple):
    """A tile as planes of shape (4, 32): groups, lanes.

    Attributes:
      planes: bits of magnitudes, valid for values that are not zero.
      some: which values are not zero.
      raw: which lanes have to be stored as they are.
    """

    planes: list[Words]
    some: Words
    raw: Bool[Array, "32"]


class ValuePlanes(NamedTuple):
    """The planes of a tile.

    Attributes:
      few: the tile with `FEW` planes.
      is_all: whether these planes are enough for all lanes.
      all: gives the tile with as many planes as a code can have.
      signs: the plane of negative values.
    """

    few: Coded
    is_all: Bool[Array, ""]
    all: Callable[[], Coded]
    signs: Words


def value_planes(where: Where, x_ref, exponent_ref) -> ValuePlanes:
    """The planes of a tile, which is read once, again if there are negative values, and twice more by `all`."""
    warp, dtype = where.warp, where.layout.dtype
    dither_planes = dither.planes_of(dtype)
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
            return (lane_bits.transpose(lower, warp) + lane_bits.transpose(upper, warp))[:count], (seen, bits)

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
        *planes, too_many = lane_bits.increment(
            [*parts[dither_planes:], jnp.zeros_like(parts[0])],
            lane_bits.carries(parts[:dither_planes], where.dither()),
        )
        some = functools.reduce(jnp.bitwise_or, parts)
        beyond = seen & u32(~INTEGER & 0xFFFFFFFF & -(1 << len(parts)))
        return Coded(planes, some, is_raw | any_of(too_many & some) | any_of(beyond))

    last = tiles.max_planes(dtype) + dither_planes
    parts, seen, bits = read(0, FEW + dither_planes)
    is_raw = jnp.zeros((LANES,), jnp.bool_) if by_value else jnp.minimum(*exponents()) == RAW_EXPONENT
    few = coded(parts, seen)

    def all_():
        return coded(read(0, 16)[0] + read(2, last - 16)[0], seen)

    signs = lax.cond(
        any_lane(u32(any_of(bits & u32(_SIGNS[dtype.itemsize])))), read_signs, lambda: jnp.zeros_like(few.some)
    )
    return ValuePlanes(few, ~any_lane(u32(few.raw & ~is_raw)), all_, signs)


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
