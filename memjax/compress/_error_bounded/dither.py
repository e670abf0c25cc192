"""Dither: by how many parts of a step each value is moved before it is rounded, and moved back afterwards.

Without dither errors are a function of values. Where neighbours are nearly equal, as in large images and behind max-pooling, so
are their errors, and these add up in the gradient of a convolution, a sum over all positions: to more than fifty times the sum
of independent errors, on ResNet-50 at 224x224. With a random part of a step added before rounding and subtracted afterwards
(subtractive dither: Schuchman 1964, "Dither signals and their effect on quantization noise") errors are independent of values,
and predictions of their sums hold. The cost are quantised magnitudes that are larger by one now and then.

The number of parts depends on a value's place. Like a code it consists of planes of bits (tiles.py), which are hashes of tile,
lane and group. Parts are sixteenths for float32, and eighths for 16-bit floats, which have no bits for more. Errors of equal
values have a mean of up to half a part: the fewer the parts, the larger it is.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

from memjax.compress._codecs.bits import WORD, Words, u32
from memjax.compress._error_bounded.tiles import GROUPS, LANES

_FACTORS = (0x9E3779B1, 0x7FEB352D, 0xB5297A4D)


def planes_of(dtype) -> int:
    """The number p of planes of bits; a step has 2^p parts."""
    return 4 if jnp.dtype(dtype).itemsize == 4 else 3


def planes(count: int, tile: Int32[Array, "..."], lane: Int32[Array, "..."], group: Int32[Array, "..."]) -> list[Words]:
    """The planes of a group's 32 values, the lowest first: bit i of a word belongs to value i."""
    x = ((u32(tile) * u32(LANES) + u32(lane)) * u32(GROUPS) + u32(group)) * u32(0x85EBCA6B)
    x = (x ^ (x >> 15)) * u32(0xC2B2AE35)
    first = x ^ (x >> 16)
    others = (first * u32(factor) for factor in _FACTORS[: count - 1])
    return [first, *(word ^ (word >> 15) for word in others)]


def of_group(tile: Int32[Array, ""], group: Int32[Array, ""], dtype) -> UInt32[Array, "32 32"]:
    """The number of parts for every value of a group of a tile, 0 to 7 or 15: see `tiles.lanes`."""
    words, value = planes(planes_of(dtype), tile, jnp.arange(LANES), group), jnp.arange(WORD, dtype=jnp.uint32)[:, None]
    bits = [((word >> value) & u32(1)) << p for p, word in enumerate(words)]
    return sum(bits[1:], bits[0])
