"""Integer arithmetic of codes, elementwise: bits in 32-bit words, levels in planes of bytes, and dither by place."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt, UInt8, UInt32

from memjax._core import check
from memjax.compress._codecs.kernels import is_of_one_device_on

WORD = 32


class Width(NamedTuple):
    """How levels of a number of bits are packed, where they are.

    Attributes:
      planes: by `PositionQuantized`: the widths of the arrays of `pack_levels`, lowest bits first.
      number: by `BlockQuantized` and `ChannelQuantized`: XLA's type for one level.
      pair: the type for two of these in the code that a kernel made: see `as_pairs`.
      per_word: by `GroupQuantized`: how many a word has.
    """

    planes: tuple[int, ...] = ()
    number: Any = None
    pair: Any = None
    per_word: int = 0


# XLA also has a 2-bit type, but cannot transpose it on GPUs.
WIDTHS = {
    8: Width((8,), jnp.uint8, jnp.uint16, 4),
    6: Width((4, 2)),
    5: Width((4, 1)),
    4: Width((4,), jnp.uint4, jnp.uint8, 8),
    3: Width((2, 1)),
    2: Width(per_word=16),
}
"""By the number of bits of a level."""


def widths_with(column: str) -> tuple[int, ...]:
    """The numbers of bits that have an entry in this column of the table, most first."""
    return tuple(bits for bits, width in WIDTHS.items() if getattr(width, column))


def check_width(bits: Any, column: str) -> int:
    """Check that levels of so many bits can be packed so."""
    bits, known = check.integer("bits", bits), widths_with(column)
    if bits not in known:
        raise ValueError(f"bits must be {', '.join(map(str, known[:-1]))} or {known[-1]}, got {bits!r}")
    return bits


Words = UInt32[Array, "..."]


def u32(x) -> Words:
    """`x` as unsigned 32-bit integers; negative numbers wrap."""
    return lax.convert_element_type(x, jnp.uint32)


def shift_left(x: Words, by: Words) -> Words:
    """`x << by`, which is zero for `by` >= 32 on every backend."""
    return jnp.where(by < WORD, x << (by & u32(WORD - 1)), u32(0))


def shift_right(x: Words, by: Words) -> Words:
    """`x >> by`, which is zero for `by` >= 32 on every backend."""
    return jnp.where(by < WORD, x >> (by & u32(WORD - 1)), u32(0))


def bit_length(x: Words) -> Words:
    """Bits needed to write x: 0 for 0, 1 for 1, 2 for 2 and 3."""
    return u32(WORD) - lax.clz(x)


def pack(bits: Bool[Array, "... n"]) -> UInt32[Array, "... m"]:
    """32 booleans a word, the first in the lowest bit; n must be a multiple of 32."""
    bits = bits.reshape(*bits.shape[:-1], bits.shape[-1] // WORD, WORD)
    # Distinct bits: their sum is their union.
    return jnp.sum(u32(bits) << jnp.arange(WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def unpack(words: UInt32[Array, "... m"]) -> Bool[Array, "... n"]:
    """The inverse of `pack`."""
    bits = (words[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & u32(1)
    return (bits != 0).reshape(*words.shape[:-1], words.shape[-1] * WORD)


class Moves(NamedTuple):
    """Which bits move by 1, 2, 4, 8 and 16 places: down in `compress`, and up in `expand`.

    Attributes:
      high, low: masks of these bits before and after moving down, for each distance.
      dense: the mask of all bits when they are together at the low end.
    """

    high: list[Words]
    low: list[Words]
    dense: Words


def moves_of(mask: Words) -> Moves:
    """The moves that `compress` a mask's bits.

    Warren, "Hacker's Delight", section 7-4: the distance of a bit is the number of zeros of the mask below it; its
    binary digits are found by parallel prefixes of exclusive ors.
    """
    high, low = [], []
    below = ~mask << 1
    for i in range(5):
        odd = below
        for j in range(5):
            odd = odd ^ (odd << (1 << j))
        high.append(odd & mask)
        low.append(high[i] >> (1 << i))
        mask = mask ^ high[i] | low[i]
        below = below & ~odd
    return Moves(high, low, mask)


def compress(x: Words, moves: Moves) -> Words:
    """The bits of `x` selected by the mask of `moves`, moved together to the low end."""
    for i, low in enumerate(moves.low):
        x = (x & ~low) | ((x >> (1 << i)) & low)  # bits that moved away also stay, where nothing reads them
    return x & moves.dense


def expand(x: Words, moves: Moves, mask: Words) -> Words:
    """The inverse of `compress`. It reads as many bits of `x` as `mask` has."""
    for i in reversed(range(5)):
        x = x ^ ((x ^ (x << (1 << i))) & moves.high[i])
    return x & mask


# Levels of 8, 6, 5, 4 or 3 bits packed into bytes without gaps: 6 bits as 4 and 2, 5 as 4 and 1, 3 as 2 and 1.
#
# Each part of a level has a byte array of its own, a plane. A byte of a plane of 4 bits holds the parts of two values
# that are half of the last axis apart: so neighbours read and write neighbouring bytes. One of 2 or 1 bits holds those
# of neighbours: a kernel has these in the registers of one thread, where others would be in pieces too narrow to read.
# Apart from slices, reshapes and bytes taken for words, `pack_levels` and `unpack_levels` are elementwise.

_APART = 4  # bits, of a plane whose bytes do not hold neighbours

MULTIPLE = 8
"""The last axis must be a multiple of this."""


def pack_levels(level: UInt32[Array, "... n"], bits: int) -> tuple[UInt8[Array, "... _"], ...]:
    """The planes of levels below 2^bits. What bits 16 and up of `level` are does not matter."""
    planes = []
    for width in WIDTHS[bits].planes:
        parts = _split(_lowest(level, width, bits), width)
        planes.append(functools.reduce(operator.or_, (part << u32(i * width) for i, part in enumerate(parts))))
        level = level >> u32(width)
    return tuple(plane.astype(jnp.uint8) for plane in planes)


def _split(level: UInt32[Array, "... n"], width: int) -> list[UInt32[Array, "... _"]]:
    """The values of each place in a byte, as slices: XLA fuses these with what makes the levels, and kernels have none."""
    per_byte = 8 // width
    if width == _APART:
        return jnp.split(level, per_byte, -1)
    return [level[..., i::per_byte] for i in range(per_byte)]


def _lowest(level: UInt32[Array, "..."], width: int, bits: int) -> UInt32[Array, "..."]:
    """The part of a level for a plane. Above the last plane's there is nothing that a byte would have."""
    return level if width == WIDTHS[bits].planes[-1] else level & u32(2**width - 1)


def unpack_levels(planes: Sequence[UInt8[Array, "... _"]], bits: int) -> UInt32[Array, "... n"]:
    """The inverse of `pack_levels`.

    What four neighbours share is computed for words of four bytes. It is written down for each of them, or XLA:GPU would make
    the words in a kernel of its own; it computes them once.
    """
    if bits == 8:
        return u32(planes[0])
    words, below = None, 0
    for width, plane in zip(WIDTHS[bits].planes, planes, strict=True):
        part = _in_bytes(plane, width) << u32(below)
        words, below = part if words is None else words | part, below + width
    assert words is not None
    levels = (words >> (u32(8) * lax.broadcasted_iota(jnp.uint32, words.shape, words.ndim - 1))) & u32(0xFF)
    return levels.reshape(*levels.shape[:-2], 4 * levels.shape[-2])


def _in_bytes(plane: UInt8[Array, "... _"], width: int) -> UInt32[Array, "... fours 4"]:
    """The parts of levels in a plane: those of four neighbours in the bytes of a word, which each of them has."""
    leading, fours = plane.shape[:-1], 8 * plane.shape[-1] // width // 4
    of_each = lambda x: jnp.broadcast_to(x[..., None], (*x.shape, 4))
    # Not a choice between two: on a mesh of explicit axes the condition would have to be sharded as they are.
    half = lambda x, axis: x >> (u32(4) * lax.broadcasted_iota(jnp.uint32, x.shape, axis))
    if width == 2:
        pairs = of_each(u32(plane))
        pairs = (pairs | pairs << 12) & u32(0x000F000F)
        return (pairs | pairs << 6) & u32(0x03030303)
    if width == 1:
        eights = jnp.broadcast_to(u32(plane)[..., None, None], (*plane.shape, 2, 4))
        parts = half(eights, eights.ndim - 2) & u32(0xF)
        return ((parts * u32(0x00204081)) & u32(0x01010101)).reshape(*leading, fours, 4)
    words = of_each(lax.bitcast_convert_type(plane.reshape(*leading, plane.shape[-1] // 4, 4), jnp.uint32))
    pairs = jnp.broadcast_to(words[..., None, :, :], (*leading, 2, *words.shape[-2:]))
    return (half(pairs, pairs.ndim - 3) & u32(0x0F0F0F0F)).reshape(*leading, fours, 4)


# Levels of two neighbouring channels in one number, which tells the code of a kernel: 4 bits each in a byte, as the kernel
# writes them, or 8 bits each in two bytes. In memory they are what XLA has as an array of 4-bit or 8-bit numbers.


def paired(levels: Int[Array, "rows channels"], bits: int) -> Int[Array, "rows pairs"]:
    """Pairs of levels, the first in the lower bits; in a kernel. What `levels` have above the lowest bits does not matter."""
    pairs = (levels & (2**bits - 1)).reshape(levels.shape[0], -1, 2)
    return jnp.sum(pairs << (bits * lax.broadcasted_iota(jnp.int32, pairs.shape, 2)), axis=2)


def as_pairs(levels: UInt[Array, "... channels"], bits: int) -> UInt[Array, "... pairs"]:
    """The same of XLA's numbers of so many bits."""
    pairs = levels.reshape(*levels.shape[:-1], -1, 2)
    return lax.bitcast_convert_type(pairs, WIDTHS[bits].pair)


def apart(levels: UInt[Array, "... numbers"], bits: int) -> UInt[Array, "... channels"]:
    """The levels, of what may be pairs of them."""
    if levels.dtype != WIDTHS[bits].pair:
        return levels
    return lax.bitcast_convert_type(levels, WIDTHS[bits].number).reshape(*levels.shape[:-1], -1)


def unpaired(pairs: Int[Array, "rows pairs"], bits: int) -> Int[Array, "rows channels"]:
    """The levels of pairs; in a kernel."""
    places = bits * lax.broadcasted_iota(jnp.int32, (*pairs.shape, 2), 2)
    return ((pairs[:, :, None] >> places) & (2**bits - 1)).reshape(pairs.shape[0], -1)


# Subtractive dither that depends on the place alone, in few instructions: what bounds the speed of codes on GPUs.
#
# A place has one of 256 parts of a step, a byte of a hash; four neighbours share a hash. A level and its part are put
# side by side into the digits of a float, which needs no conversion of integers.

_MIDDLE = 127.5 / 256  # the mean of bytes / 256
IN_BYTES = 1.5 * 2.0**15
"""Floats around it are multiples of 1 / 256, which their digits count: an integer up to 255 above it is their second byte."""
DITHER_OFFSET = IN_BYTES + 255 / 256
"""Added to a value from 0 to 255 before `dithered_level`."""


def places(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """The row-major index of each value, modulo 2^32."""
    count = math.prod(shape)
    if count >= 2**32 or not is_of_one_device_on(jax.sharding.get_abstract_mesh()):
        # An index for each axis: one for all would be too long, or each device would make the places of all devices.
        strides = [math.prod(shape[i + 1 :]) % 2**32 for i in range(len(shape))]
        each = [lax.broadcasted_iota(jnp.uint32, shape, i) * u32(stride) for i, stride in enumerate(strides)]
        return sum(each, jnp.zeros(shape, jnp.uint32))
    # One index for all axes: the compiler would make those of single axes in kernels of their own.
    return lax.iota(jnp.uint32, count).reshape(shape)


def dithered_level(x: Float[Array, "..."], place: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Levels less than 1 from `x` - `DITHER_OFFSET`, and on average that. `plus_dither` undoes what was subtracted.

    Levels are the lowest 8 bits; those from the 14th on are not zero.
    """
    return (lax.bitcast_convert_type(x, jnp.uint32) - _byte(place)) >> u32(8)


def hashes_of_rows(first: UInt32[Array, "rows fours"]) -> UInt32[Array, "rows places"]:
    """The hashes of places, each four of which follow one that is a multiple of four, and share one: for kernels."""
    fours = jnp.broadcast_to(_hash(first >> u32(2))[..., None], (*first.shape, 4))
    return fours.reshape(first.shape[0], -1)


def plus_dither(level: UInt32[Array, "..."], place: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Levels below 256, plus the parts of a step that `dithered_level` subtracted: at most half a step from what was rounded."""
    digits = (level << u32(15)) | (_byte(place) << u32(7)) | u32(0x43800000)  # 256 + level + a byte / 256
    return lax.bitcast_convert_type(digits, jnp.float32) - (256 + _MIDDLE)


def _byte(place: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A byte that looks random."""
    return (_hash(place >> u32(2)) >> (u32(8) * (place & u32(3)))) & u32(0xFF)


def _hash(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    x = x * u32(0x85EBCA6B)
    x = (x ^ (x >> u32(15))) * u32(0xC2B2AE35)
    return x ^ (x >> u32(16))
