"""Subtractive dither that depends on the place alone, in few instructions: what bounds the speed of codes on GPUs.

A place has one of 256 parts of a step, a byte of a hash; four neighbours share a hash. A level and its part are put side by side
into the digits of a float, which needs no conversion of integers.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt32

from memjax.compress._codecs.bits import u32
from memjax.compress._codecs.launch import is_of_one_device_on

_MIDDLE = 127.5 / 256  # the mean of bytes / 256
OFFSET = 1.5 * 2.0**15 + 255 / 256
"""What is added to a value from 0 to 255, before `level`: floats around it are multiples of 1/256, whose digits count these."""


def places(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """The places of an array's values; they repeat after 2^32."""
    axis = 0
    while math.prod(shape[axis:]) >= 2**32:
        axis += 1
    if not is_of_one_device_on(jax.sharding.get_abstract_mesh()):
        # An index for each axis: of one for all, each device would make the places of all devices.
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        each = [lax.broadcasted_iota(jnp.uint32, shape, i) * u32(strides[i]) for i in range(axis, len(shape))]
        return sum(each, jnp.zeros(shape, jnp.uint32))
    # One index for all axes: the compiler would make those of single axes in kernels of their own.
    return jnp.broadcast_to(lax.iota(jnp.uint32, math.prod(shape[axis:])).reshape(shape[axis:]), shape)


def level(x: Float[Array, "..."], place: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Levels less than 1 from `x` - `OFFSET`, and on average that. `plus` undoes what was subtracted.

    Levels are the lowest 8 bits; those from the 14th on are not zero.
    """
    return level_of_byte(x, _byte(place))


def level_of_byte(x: Float[Array, "..."], byte: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """`level` of places with these bytes."""
    return (lax.bitcast_convert_type(x, jnp.uint32) - byte) >> u32(8)


def bytes_of_rows(first: UInt32[Array, "rows fours"]) -> UInt32[Array, "rows places"]:
    """The bytes of places, each four of which follow one that is a multiple of four: for kernels, where four share a hash."""
    fours = jnp.broadcast_to(_hash(first >> u32(2))[..., None], (*first.shape, 4))
    shifts = u32(8) * lax.broadcasted_iota(jnp.uint32, fours.shape, 2)
    return ((fours >> shifts) & u32(0xFF)).reshape(first.shape[0], -1)


def plus(level: UInt32[Array, "..."], place: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Levels below 256, plus the parts of a step that `rounded` subtracted: at most half a step from what was rounded."""
    digits = (level << u32(15)) | (_byte(place) << u32(7)) | u32(0x43800000)  # 256 + level + a byte / 256
    return lax.bitcast_convert_type(digits, jnp.float32) - (256 + _MIDDLE)


def _byte(place: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A byte that looks random."""
    return (_hash(place >> u32(2)) >> (u32(8) * (place & u32(3)))) & u32(0xFF)


def _hash(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    x = x * u32(0x85EBCA6B)
    x = (x ^ (x >> u32(15))) * u32(0xC2B2AE35)
    return x ^ (x >> u32(16))
