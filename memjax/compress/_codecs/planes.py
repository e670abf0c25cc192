"""Levels of 8, 6, 5, 4 or 3 bits packed into bytes without gaps: 6 bits as 4 and 2, 5 as 4 and 1, 3 as 2 and 1.

Each part of a level has a byte array of its own, a plane. A byte holds the parts of values that are a half, a quarter or an
eighth of the last axis apart, so that neighbours read and write neighbouring bytes. Both ways are arithmetic on single values.
"""

import functools
import operator
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, UInt8, UInt32

from memjax.compress._codecs.bits import u32

PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1)}
"""By number of bits, the widths of the planes, lowest bits first."""

MULTIPLE = 8
"""The last axis must be a multiple of this."""


def pack_levels(level: UInt32[Array, "... n"], bits: int) -> tuple[UInt8[Array, "... _"], ...]:
    """The planes of levels below 2^bits. What bits 16 and up of `level` are does not matter."""
    planes = []
    for width in PLANES[bits]:
        per_byte = 8 // width
        parts = _lowest(level, width, bits).reshape(*level.shape[:-1], per_byte, level.shape[-1] // per_byte)
        byte = parts[..., 0, :]
        for i in range(1, per_byte):
            byte = byte | (parts[..., i, :] << u32(i * width))
        planes.append(byte.astype(jnp.uint8))
        level = level >> u32(width)
    return tuple(planes)


def pack_pieces(pieces: Sequence[UInt32[Array, "..."]], bits: int) -> list[list[UInt32[Array, "..."]]]:
    """The planes of levels that are cut along the last axis into 8 / (bits of the narrowest plane) pieces, in pieces too."""
    planes = []
    for width in PLANES[bits]:
        per_byte = 8 // width
        count = len(pieces) // per_byte
        parts = [_lowest(piece, width, bits) for piece in pieces]
        planes.append(
            [
                functools.reduce(operator.or_, (parts[i * count + j] << u32(i * width) for i in range(per_byte)))
                for j in range(count)
            ]
        )
        pieces = [piece >> u32(width) for piece in pieces]
    return planes


def _lowest(level: UInt32[Array, "..."], width: int, bits: int) -> UInt32[Array, "..."]:
    """The part of a level for a plane. Above the last plane's there is nothing that a byte would have."""
    return level if width == PLANES[bits][-1] else level & u32(2**width - 1)


def unpack_levels(planes: Sequence[UInt8[Array, "... _"]], bits: int) -> UInt32[Array, "... n"]:
    """The inverse of `pack_levels`."""
    level, below = None, 0
    for width, plane in zip(PLANES[bits], planes, strict=True):
        per_byte = 8 // width
        places = width * jnp.arange(per_byte, dtype=jnp.uint32)[:, None]
        parts = ((u32(plane)[..., None, :] >> places) << u32(below)) & u32((2**width - 1) << below)
        part = parts.reshape(*plane.shape[:-1], per_byte * plane.shape[-1])
        level, below = part if level is None else level | part, below + width
    assert level is not None
    return level
