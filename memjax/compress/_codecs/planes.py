"""Levels of 8, 6, 5, 4 or 3 bits packed into bytes without gaps: 6 bits as 4 and 2, 5 as 4 and 1, 3 as 2 and 1.

Each part of a level has a byte array of its own, a plane. A byte of a plane of 4 bits holds the parts of two values that are half
of the last axis apart: so neighbours read and write neighbouring bytes. One of 2 or 1 bits holds those of neighbours: a kernel
has these in the registers of one thread, where others would be in pieces too narrow to read. Both ways are arithmetic on single
values.
"""

import functools
import operator
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt8, UInt32

from memjax.compress._codecs.bits import u32

PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1)}
"""By number of bits, the widths of the planes, lowest bits first."""

_APART = 4  # bits, of a plane whose bytes do not hold neighbours

MULTIPLE = 8
"""The last axis must be a multiple of this."""


def pack_levels(level: UInt32[Array, "... n"], bits: int) -> tuple[UInt8[Array, "... _"], ...]:
    """The planes of levels below 2^bits. What bits 16 and up of `level` are does not matter."""
    planes = []
    for width in PLANES[bits]:
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


def pack_halves(
    low: UInt32[Array, "rows half"], high: UInt32[Array, "rows half"], bits: int
) -> list[list[UInt32[Array, "rows _"]]]:
    """The planes of levels whose last axis is cut into two halves, in one piece or two: for kernels."""
    planes = []
    for width in PLANES[bits]:
        parts = [_lowest(half, width, bits) for half in (low, high)]
        if width == _APART:
            planes.append([parts[0] | (parts[1] << u32(width))])
        else:
            planes.append([_neighbours(part, width) for part in parts])
        low, high = low >> u32(width), high >> u32(width)
    return planes


def _neighbours(part: UInt32[Array, "rows n"], width: int) -> UInt32[Array, "rows _"]:
    per_byte = 8 // width
    if per_byte == 1:
        return part
    parts = part.reshape(part.shape[0], -1, per_byte)
    return jnp.sum(parts << (u32(width) * lax.broadcasted_iota(jnp.uint32, parts.shape, 2)), 2, dtype=jnp.uint32)


def _lowest(level: UInt32[Array, "..."], width: int, bits: int) -> UInt32[Array, "..."]:
    """The part of a level for a plane. Above the last plane's there is nothing that a byte would have."""
    return level if width == PLANES[bits][-1] else level & u32(2**width - 1)


def unpack_levels(planes: Sequence[UInt8[Array, "... _"]], bits: int) -> UInt32[Array, "... n"]:
    """The inverse of `pack_levels`."""
    level, below = None, 0
    for width, plane in zip(PLANES[bits], planes, strict=True):
        per_byte = 8 // width
        places = width * jnp.arange(per_byte, dtype=jnp.uint32)
        wide = u32(plane)
        shifted = wide[..., None, :] >> places[:, None] if width == _APART else wide[..., None] >> places
        parts = (shifted << u32(below)) & u32((2**width - 1) << below)
        part = parts.reshape(*plane.shape[:-1], per_byte * plane.shape[-1])
        level, below = part if level is None else level | part, below + width
    assert level is not None
    return level
