"""From a tile's values to planes of bits: numbers of steps (`_quantize`), with dither (`_dither`), in the order of a lane's
values (`_lane_bits`).

Values become numbers of eighths of steps, one byte of them at a time, four to a word. Dither is added to their planes.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from memjax.compress import _dither, _lane_bits, _tiles
from memjax.compress._bits import Words, u32
from memjax.compress._pallas_tile import Where, any_group, any_lane, rows_of_bytes, take
from memjax.compress._quantize import RAW_EXPONENT, float32_bits, inverse_step
from memjax.compress._tiles import GROUPS, LANES
from memjax.compress._warp import INTEGER, two_bfloat16s


class ValuePlanes(NamedTuple):
    """Of a tile; planes are (4, 32): of groups, of lanes.

    Attributes:
      some, signs: of values that are not zero, and of negative ones.
      are_few: whether q - 1 is at most 32, and `few` gives its planes.
      few, all: planes of q - 1, of values that are not zero, six and as many as a code can have, and which lanes have to be
        stored as they are.
    """

    some: Words
    signs: Words
    are_few: Bool[Array, ""]
    few: Callable[[], tuple[list[Words], Bool[Array, "32"]]]
    all: Callable[[], tuple[list[Words], Bool[Array, "32"]]]


def value_planes(where: Where, x_ref, exponent_ref) -> ValuePlanes:
    warp, dtype = where.warp, where.layout.dtype
    exponents, by_value = where.exponents(exponent_ref), where.layout.exponents == "value"
    none = jnp.zeros((GROUPS, LANES), jnp.uint32)

    def each_word(read, carry, at_a_time=2):
        """What `read` gives for words 0 to 7, some at a time: what is loaded has to fit into registers, those of many warps.
        These are words, and flags of values, in the low bits of bytes; and a carry.
        """

        def some_words(step, state):
            latest, flags, carry = state
            rows = rows_of_bytes(at_a_time), at_a_time * step
            loaded, exponent = where.load(x_ref, *rows), exponents(*rows)
            places = [(2 * word, 2 * word + 1) for word in range(at_a_time)]
            pairs = [[[take(x, place) for x in loaded] for place in places_of_word] for places_of_word in places]
            own = [[_of_rows(exponent, place) for place in places_of_word] for places_of_word in places]
            words, new, carry = read(pairs, own, carry)
            flags = (flags >> at_a_time) | (new << (8 - at_a_time))
            return (*latest[at_a_time:], *words), flags, carry

        return lax.fori_loop(0, 8 // at_a_time, some_words, ((none,) * 8, none, carry))

    def read_byte(byte):
        """One byte of the numbers of eighths of steps, and which values are not zero. Carried: all bits that are set in these
        numbers, and in values.
        """

        def read(pairs, exponent, carry):
            words, (seen, bits) = [], carry
            values = [[_values(pair, dtype) for pair in word] for word in pairs]
            for word in range(len(pairs)):
                columns = []
                for column in range(2):
                    own = [exponent[word][second][column] for second in range(2)]
                    counts = [
                        warp.eighths(values[word][i][column], k, inverse_step(k - 3), dtype) for i, k in enumerate(own)
                    ]
                    if by_value:
                        counts = [
                            jnp.where(k == RAW_EXPONENT, u32(0xFFFFFFFF), x) for k, x in zip(own, counts, strict=True)
                        ]
                    columns.append(warp.bytes_of(counts, (byte, byte + 4, byte, byte + 4)))
                    seen, bits = seen | counts[0] | counts[1], bits | values[word][0][column] | values[word][1][column]
                words.append(warp.bytes_of(columns, (0, 1, 4, 5)))
            flags = [
                warp.flags([[values[word][i][column] for word in range(len(pairs))] for i in range(2)])
                for column in range(2)
            ]
            return words, warp.bytes_of(flags, (0, 1, 4, 5)), (seen, bits)

        return read

    def read_pairs(pairs, _, carry):
        """`read_byte(0)` for bfloat16s, two at a time: of numbers below 256 halves, and a plane of the rest. Carried, too: bits
        that are set in larger ones.
        """
        words, (odd, seen, bits) = [], carry
        first, second = ([word[i][0] for word in pairs] for i in range(2))
        quarters = [[warp.bfloat16_quarters(x, exponents(), inverse_of_pairs) for x in row] for row in (first, second)]
        for i in range(len(pairs)):
            counts = [row[i] for row in quarters]
            words.append(warp.bytes_of(counts, (0, 4, 2, 6)))
            seen, bits = seen | counts[0] | counts[1], bits | first[i] | second[i]
        rows = zip((first, second), quarters, strict=True)
        odds = [warp.bfloat16_odds(*row, exponents(), inverse_of_pairs) for row in rows]
        odd = (odd >> 4) | (warp.bytes_of(odds, (0, 4, 2, 6)) << 4)
        flags = [warp.bfloat16_flags(row) for row in (first, second)]
        return words, warp.bytes_of(flags, (0, 4, 2, 6)), (odd, seen, bits)

    def read_signs(pairs, _, carry):
        return [none] * len(pairs), _top_bits(pairs, warp), carry

    def read_allowed(_, exponent, carry):
        """Which values may be moved, for bounds that vary within lanes: rare, so what is loaded in vain does no harm."""
        flags = none
        for word, second, column in itertools.product(range(len(exponent)), range(2), range(2)):
            place = u32(1 << (8 * (2 * column + second) + word))
            flags |= _dither.allowed(place, exponent[word][second][column], dtype)
        return [none] * len(exponent), flags, carry

    def moved(eighths):
        """Planes of q - 1, one more than there are of whole steps, of values that are not zero."""
        # Dither is added to the lowest planes, of which no more is needed than what it adds to the others.
        carry = _lane_bits.carries(eighths[: _dither.PLANES], dither)
        return _lane_bits.increment([*eighths[_dither.PLANES :], none], carry)

    def has(word, bits):
        """Which lanes have some of these bits."""
        return any_group(word & u32(bits))

    in_pairs = dtype == jnp.bfloat16 and not by_value
    if in_pairs:
        inverse_of_pairs = two_bfloat16s(*(inverse_step(k - 2) for k in exponents()))
        words, some, (odd, seen, bits) = each_word(read_pairs, (none, none, none), at_a_time=4)
    else:
        words, some, (seen, bits) = each_word(read_byte(0), (none, none))
    is_long = has(seen, 0xBC80BC80 if in_pairs else ~INTEGER & 0xFFFFFF00)
    is_raw = jnp.zeros((LANES,), jnp.bool_) if by_value else jnp.minimum(*exponents()) == RAW_EXPONENT
    dither = where.dither(exponent_ref)
    if by_value:
        _, may_move, _ = each_word(read_allowed, 0)
        dither = [plane & may_move for plane in dither]
    is_negative = any_lane(u32(has(bits, 0x80008000 if in_pairs else 0x80000000)))
    signs = lax.cond(is_negative, lambda: each_word(read_signs, 0)[1], lambda: none)
    most_planes = _tiles.max_planes(dtype)

    def few():
        eighths = _lane_bits.transpose(words, warp)
        return moved([odd, *eighths[:7]] if in_pairs else eighths), jnp.zeros((LANES,), jnp.bool_)

    def all_():
        eighths: list[Words] = []
        last = most_planes + _dither.PLANES
        for byte in reversed(range((last + 7) // 8)):  # fewer planes wait for others this way
            words, _, (seen, _) = each_word(read_byte(byte), (none, none))
            eighths = (_lane_bits.transpose(words, warp) + eighths)[: last - 8 * byte]
        *planes, too_many = moved(eighths)
        too_many = any_group((too_many | functools.reduce(jnp.bitwise_and, planes)) & some)
        return planes, is_raw | too_many | has(seen, ~INTEGER & 0xFFFFFFFF & -(1 << last))

    return ValuePlanes(some, signs, ~any_lane(u32(is_long | is_raw)), few, all_)


def _of_rows(exponents, index):
    """Those of one row of all, if they vary by row."""
    return [take(x, index) if x.ndim == 3 else x for x in exponents]


def _top_bits(words: list[list[list[Words]]], warp) -> Words:
    """The highest bits of some words' values, as the low bits of bytes."""
    bits = jnp.zeros((GROUPS, LANES), jnp.uint32)
    for first, second in words:
        if len(first) == 1:
            tops = warp.bytes_of((first[0], second[0]), (1, 5, 3, 7))
        else:
            columns = [warp.bytes_of(column, (3, 7, 3, 7)) for column in zip(first, second, strict=True)]
            tops = warp.bytes_of(columns, (0, 1, 6, 7))
        bits = (bits >> 1) | (tops & u32(0x80808080))
    return bits >> (8 - len(words))


def _values(pair: list[Words], dtype) -> list[Words]:
    """The bits of both values as float32s."""
    if dtype == jnp.bfloat16:
        return [pair[0] << 16, pair[0] & u32(0xFFFF0000)]
    if dtype == jnp.float16:
        return [float32_bits(_tiles.from_bits(half, dtype)) for half in (pair[0] & u32(0xFFFF), pair[0] >> 16)]
    return pair
