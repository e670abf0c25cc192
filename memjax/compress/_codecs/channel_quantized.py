"""A fixed number of bits per value, with a range for every channel, or for every group of neighbours."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt

from memjax._core import check
from memjax._core.segments import automatic_devices
from memjax.compress._codecs.bits import WIDTHS, check_width, u32
from memjax.compress._codecs.codec import Code, FixedRate, Measured, check_floats, check_seed
from memjax.compress._codecs.sharded import ShardedCode, encode_parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChannelQuantized(FixedRate):
    """2^bits levels between the least and the largest value of each channel of the last axis, rounded to the nearest.

    For what a batch norm reads: of a Gaussian channel of a million values, 4 bits keep all but 0.2 standard deviations. An
    error is at most half the distance of levels, `range / (2^bits - 1) / 2`, a rounding of the dtype, and 1e-37: levels
    are no closer than 2^-125, and subnormal numbers may count as zero. A NaN or an infinity makes its channel NaN.

    Encoding reads the array for the ranges, and makes the levels where a batch norm normalises its input, or else reads it
    again. Decoding is arithmetic on single values, which XLA does where they are read: on a GPU no decoded array is
    written.

    To read less, measure the ranges of 8192 `samples` of a channel, say: ranges are widened by a sixteenth on either side, and
    what is beyond is moved to the nearest level, so that there is no bound; a NaN or an infinity among the others becomes
    any level. Samples are of all examples, the first of three axes or more, for these differ more than the positions within
    one, and evenly spaced there. All is measured where positions are sharded explicitly.

    Memory: `bits` per value and 8 bytes per channel.

    Args:
      bits: 8 or 4.
      samples: how many values of a channel are measured, up to three times as many, and one of each example at least; None: all.

    Raises:
      ValueError: `bits` or `samples` is none of these.
      TypeError: what is encoded is not bfloat16, float16 or float32.
    """

    bits: int = dataclasses.field(default=4, metadata={"static": True})
    samples: int | None = dataclasses.field(default=None, metadata={"static": True})

    decoded_by = ("bits",)

    def __post_init__(self):
        object.__setattr__(self, "bits", check_width(self.bits, "number"))
        if self.samples is not None:
            samples = check.integer("samples", self.samples, least=1, what="None or an integer")
            object.__setattr__(self, "samples", samples)

    def measured(self, x: Float[Array, "..."]) -> Measured:
        """An encoder with the ranges of `x`: only they need the whole array. It encodes what a batch norm reads where that is
        normalised.
        """
        check_floats(x)
        if x.size == 0:
            low = high = jnp.zeros(x.shape[-1:], jnp.float32)
        else:
            part = x if self.samples is None else evenly_spaced(x, self.samples)
            low, high = (end.astype(jnp.float32) for end in ends(part, tuple(range(part.ndim - 1))))
            if part.size < x.size:
                # The outermost levels stay finite in the array's dtype, unless what was measured is not.
                margin, largest = high / 16 - low / 16, float(jnp.finfo(x.dtype).max)
                low, high = (
                    jnp.where(jnp.isfinite(margin), jnp.clip(end, -largest, largest), end)
                    for end in (low - margin, high + margin)
                )
        return Measured(levels_between(low, high, self.bits), self)

    def levels_of(self, x: Float[Array, "..."], low: Array, distance: Array) -> UInt[Array, "..."]:
        return to_levels(x, low, distance, self.bits, 0.5).astype(WIDTHS[self.bits].number)

    def encode(self, x: Float[Array, "..."]) -> Code:
        return self.measured(x).encode(x)

    def _decode(self, code: Code) -> Float[Array, "..."]:
        return from_levels(code.levels, *code.ranges).astype(code.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupQuantized(FixedRate):
    """2^bits levels between the least and the largest value of each group, rounded at random to one of the two nearest.

    Unbiased: in float32 the expectation of what is decoded is the value, up to float32's rounding (16-bit dtypes round the
    levels to nearest). An error is at most the distance of levels, `range / (2^bits - 1)`, a rounding of the dtype, and 1e-37,
    since levels are no closer than 2^-125 and subnormal numbers may count as zero. `bits + 64 / group_size` bits per value.
    Zeros stay zeros only where zero is the least or the largest value of a group; a NaN or an infinity makes its group NaN.

    After "ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed Training" (Chen et al. 2021).

    Args:
      bits: 8, 4 or 2.
      group_size: values per group, neighbours in memory; a multiple of 16.
      seed: of the random rounding, together with the values themselves: a sum over their bits. So different arrays
        get different roundings; the same array gets the same one until the seed changes, which does not recompile
        where the codec is an argument of what is compiled.

    Raises:
      ValueError: `bits` or `group_size` is none of these.
      TypeError: what is encoded is not bfloat16, float16 or float32.
    """

    bits: int = dataclasses.field(default=4, metadata={"static": True})
    group_size: int = dataclasses.field(default=256, metadata={"static": True})
    seed: Any = 0

    decoded_by = ("bits", "group_size")

    def __post_init__(self):
        object.__setattr__(self, "bits", check_width(self.bits, "per_word"))
        object.__setattr__(self, "group_size", check.integer("group_size", self.group_size))
        if not 16 <= self.group_size < 2**31 or self.group_size % 16:
            raise check.fail(ValueError, "group_size", "a multiple of 16, less than 2^31", self.group_size)

    def encode(self, x: Float[Array, "..."]) -> Code | ShardedCode:
        check_floats(x)
        check_seed(self.seed)
        return encode_parts(self._encode, x, self.seed)

    def _encode(self, array: Float[Array, "..."], seed: Any) -> Code:
        # Flat arrays take less memory; where a mesh may spread their axes they would be gathered.
        several = (automatic_devices([jax.typeof(array)]) or 1) > 1
        x = (array if several else array.reshape(-1)).astype(jnp.float32)
        checksum = jnp.sum(lax.bitcast_convert_type(x, jnp.uint32), dtype=jnp.uint32)
        x = self._in_groups(x)
        low, distance = levels_between(jnp.min(x, -1), jnp.max(x, -1), self.bits)
        key = jax.random.fold_in(jax.random.key(seed), checksum)
        level = u32(to_levels(x, low[..., None], distance[..., None], self.bits, jax.random.uniform(key, x.shape)))
        per_word = WIDTHS[self.bits].per_word
        places = self.bits * jnp.arange(per_word, dtype=jnp.uint32)
        words = jnp.sum(
            level.reshape(*low.shape, self.group_size // per_word, per_word) << places, -1, dtype=jnp.uint32
        )
        return self.code_of(array, words, low, distance)

    def _in_groups(self, x: Float[Array, "..."]) -> Float[Array, "*groups group_size"]:
        """Groups of as few of the last axes as can be: axes that are not merged may lie on several devices."""
        for count in range(1, x.ndim + 1):
            size = math.prod(x.shape[-count:])
            if size and size % self.group_size == 0:
                return x.reshape(*x.shape[:-count], size // self.group_size, self.group_size)
        x = x.reshape(-1)
        if padding := -x.size % self.group_size:
            x = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (padding,))])
        return x.reshape(-1, self.group_size) if x.size else x.reshape(0, self.group_size)

    def _decode(self, code: Code) -> Float[Array, "..."]:
        low, distance = code.ranges
        places = self.bits * jnp.arange(WIDTHS[self.bits].per_word, dtype=jnp.uint32)
        level = (code.levels[..., None] >> places) & u32(2**self.bits - 1)
        level = level.reshape(*low.shape, self.group_size).astype(jnp.float32)
        x = from_levels(level, low[..., None], distance[..., None])
        if low.ndim == 1:
            x = x.reshape(-1)[: math.prod(code.shape)]
        return x.reshape(code.shape).astype(code.dtype)


def ends(x: Float[Array, "..."], axes: tuple[int, ...]) -> tuple[Array, Array]:
    """The least and the largest value over `axes`, in one reduction: on a GPU each stage of a reduction is a kernel."""
    inf = np.asarray(np.inf, x.dtype)
    both = lambda a, b: (lax.min(a[0], b[0]), lax.max(a[1], b[1]))
    return lax.reduce((x, x), (inf, -inf), both, axes)


def evenly_spaced(x: Float[Array, "..."], samples: int) -> Float[Array, "..."]:
    """At least `samples` values of each channel, if it has so many: the same number from each example, evenly spaced."""
    if x.ndim < 2:
        return x
    examples = len(x) if x.ndim > 2 else 1
    positions = math.prod(x.shape[:-1]) // examples
    # Where devices share positions, each measures its own.
    shared = math.gcd(positions, automatic_devices([jax.typeof(x)]) or 1)
    # An odd distance: an even one would often be found in the same columns of all rows.
    distance = (max(positions // -(-samples // examples), 1) - 1) | 1
    sharded = jax.typeof(x).sharding.spec[1:-1] if x.ndim > 2 else jax.typeof(x).sharding.spec[:1]
    if distance == 1 or any(axis is not None for axis in sharded):
        return x
    part = positions // shared
    if shared > 1 and distance <= part:
        x = x.reshape(examples, shared, part, x.shape[-1])
        return lax.slice_in_dim(x, distance // 2, None, distance, axis=2)
    x = x.reshape(examples, positions, x.shape[-1])
    return lax.slice_in_dim(x, distance // 2, None, distance, axis=1)


# Levels are counted from the least value of a range. One beyond float32's largest value, as from -3e38 to 3e38, is kept at
# half its size. Its distance of levels is negative, which tells it from others.

LARGEST = float(jnp.finfo(jnp.float32).max)
LEAST_DISTANCE = 2.0**-125
"""Distances below this have no inverse in float32: levels are no closer."""
# Those above this have one that counts as zero, of 2 bits the largest: they are divided first.
_LARGE_DISTANCE, _DIVISOR = 2.0**100, 2.0**26


def levels_between(low: Float[Array, "..."], high: Float[Array, "..."], bits: int) -> tuple[Array, Array]:
    """The lowest of 2^bits levels from `low` to `high` and their distance, float32, for `to_levels` and `from_levels`.

    The distance is NaN if `low` or `high` is not finite, and 2^-125 at least where they differ.
    """
    fits = jnp.isfinite(high - low)
    scale = jnp.where(fits, 1.0, 0.5)
    low, high = low * scale, high * scale
    distance = (high - low) / (2**bits - 1)
    distance = jnp.where(high - low > 0, jnp.maximum(distance, LEAST_DISTANCE), 0) * jnp.where(fits, 1.0, -1.0)
    return low, jnp.where(jnp.isfinite(low) & jnp.isfinite(high), distance, jnp.nan)


def inverse_of(distance: Float[Array, "..."]) -> tuple[Array, Array]:
    """A power of two, and the inverse of a distance times that: 0 where levels are no distance apart."""
    part = jnp.where(distance > _LARGE_DISTANCE, 1 / _DIVISOR, 1.0)
    return part, jnp.where(distance >= LEAST_DISTANCE, 1 / (distance * part), 0)


def to_levels(
    x: Float[Array, "..."], low: Float[Array, "..."], distance: Float[Array, "..."], bits: int, offset: Array | float
) -> Float[Array, "..."]:
    """floor((x - low) / distance + offset), between 0 and 2^bits - 1, as float32; zero where the distance is zero."""
    part, inverse = inverse_of(jnp.abs(distance))
    scale = jnp.where(distance < 0, 0.5, 1.0) * part
    level = jnp.floor((x.astype(jnp.float32) * scale - low * part) * inverse + offset)
    return jnp.clip(level, 0, 2**bits - 1)


def from_levels(
    levels: UInt[Array, "..."], low: Float[Array, "..."], distance: Float[Array, "..."]
) -> Float[Array, "..."]:
    """low + level * distance, float32; NaN where the distance is NaN."""
    x = (low + levels.astype(jnp.float32) * jnp.abs(distance)) * jnp.where(distance < 0, 2.0, 1.0)
    return jnp.clip(x, -LARGEST, LARGEST)
