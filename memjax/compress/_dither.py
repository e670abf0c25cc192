"""By how many eighths of a step each value is moved before it is rounded, and moved back afterwards.

Without it errors are a function of values: where neighbours are nearly equal, as in large images and behind max-pooling,
so are their errors, and in the gradient of a convolution, a sum over all positions, these add up: to more than fifty
times what independent ones do, on ResNet-50 at 224x224. Moved by a random part of a step (subtractive dither: Schuchman
1964, "Dither signals and their effect on quantization noise") they are independent of values, and what is predicted of
sums of them holds. It costs codes that are larger by one now and then.

Eighths follow from a value's place: three bits of a hash of tile, lane and group, of which neighbours share one.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from memjax.compress._bits import Words, rotate_right, u32
from memjax.compress._tiles import GROUPS, LANE_VALUES, LANES

EIGHTHS = 0x07070707  # the bits in a word of four values

# Exponents of steps for which a value and half a step are a float, as is `LEAST` of an eighth of a step.
_FROM_TO = {jnp.dtype(jnp.bfloat16): (-117, 119), jnp.dtype(jnp.float16): (-15, 7), jnp.dtype(jnp.float32): (-117, 111)}
LEAST = 2.0**-6


def dithers(exponent: Int32[Array, "..."], dtype) -> Bool[Array, "..."]:
    """Whether values with steps 2^exponent are moved at all."""
    least, most = _FROM_TO[jnp.dtype(dtype)]
    return (exponent >= least) & (exponent <= most)


def allowed(eighths: Words, exponent: Int32[Array, "..."], dtype) -> Words:
    """`eighths`, or zero for values that are not moved."""
    return jnp.where(dithers(exponent, dtype), eighths, u32(0))


def of_lanes(tile: Int32[Array, "..."], lane: Int32[Array, "..."]) -> Words:
    """What `of_words` needs of a lane."""
    x = (u32(tile) * u32(LANES) + u32(lane) + u32(1)) * u32(0x85EBCA6B)
    return (x ^ (x >> 13)) * u32(0xC2B2AE35)


def of_words(lanes: Words, group: Words, half: Words) -> Words:
    """What `of_word` needs for words 0 to 3 of a group, or, of the second half, 4 to 7."""
    x = lanes * ((u32(4) * group + u32(2) * half + u32(1)) * u32(0x9E3779B1))
    return x ^ (x >> 16)


def of_word(words: Words, k: Words | int) -> Words:
    """Eighths of the k-th word's four values, a byte each."""
    return rotate_right(words, 2 * k) & u32(EIGHTHS)


def of_values(tiles: int) -> UInt32[Array, "tiles 128 32"]:
    """0 to 7 for every value."""
    lanes = of_lanes(jnp.arange(tiles)[:, None], jnp.arange(LANES))[:, None, None]
    group, half = jnp.arange(GROUPS)[:, None, None], jnp.arange(2)[:, None]
    words = of_words(lanes, u32(group), u32(half))[:, :, None, :, None]
    byte, word = jnp.arange(4)[:, None, None, None], jnp.arange(4)[:, None]
    return ((of_word(words, word) >> u32(8 * byte)) & u32(7)).reshape(tiles, LANE_VALUES, LANES)
