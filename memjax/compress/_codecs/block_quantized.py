"""A fixed number of bits per value with ranges of channels in blocks: the default codecs of what convolutions and norms read."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, UInt

from memjax._core import check
from memjax._core.segments import automatic_devices
from memjax.compress._codecs import block_kernel, kernels
from memjax.compress._codecs.bits import WIDTHS, apart, as_pairs, check_width
from memjax.compress._codecs.channel_quantized import LARGEST, LEAST_DISTANCE, ends, inverse_of
from memjax.compress._codecs.codec import Code, FixedRate, Measured, check_floats, in_shape

_TINY = float(jnp.finfo(jnp.float32).tiny)
_FEWEST = 32  # values that share a range, if the array has so many
_LARGEST_BFLOAT16 = float(jnp.finfo(jnp.bfloat16).max)
_UP = 2.0**-8  # rounding to bfloat16 changes a number by at most this share of it


class View(NamedTuple):
    """A shape with as many values, and the axes over which values share a range."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def in_blocks(self) -> tuple[int, ...]:
        """Blocks x positions x channels."""
        return (math.prod(self.shape[:-2]), *self.shape[-2:])


def view_of(aval: Any, block: int) -> View:
    shape = aval.shape
    if aval.size == 0 or not shape:
        return View((aval.size, 1), (1,))
    if any(axis is not None for axis in aval.sharding.spec):
        # Axes that lie on several devices are left as they are: all positions of an example share a range.
        return View(shape, tuple(range(1, len(shape) - 1)) or (0,))
    channels = shape[-1] if len(shape) > 1 else 1
    positions = aval.size // channels
    per_example = positions // shape[0] if len(shape) > 2 else positions
    if per_example >= _FEWEST:
        # A block lies on one device where positions are sharded evenly. Axes stay apart there: merged, they would be gathered.
        shared = math.gcd(per_example, automatic_devices([aval]) or 1)
        part = per_example // shared
        length = _nearest_divisor(part if part >= _FEWEST else per_example, block)
        if len(shape) > 2 and not block_kernel.is_of_one_device(aval):
            return View((shape[0], per_example // length, length, channels), (2,))
    elif positions >= _FEWEST:
        length = _nearest_divisor(positions, block)
    else:
        channels, length = 1, _nearest_divisor(aval.size, block)
    return View((aval.size // (length * channels), length, channels), (1,))


def _nearest_divisor(number: int, wanted: int) -> int:
    """Among the divisors of `number` that are at least `_FEWEST`, the one whose ratio to `wanted` is closest to 1.

    `number` itself if it is smaller than `_FEWEST`.
    """
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    divisors = {*small, *(number // i for i in small)}
    return min((d for d in divisors if d >= min(_FEWEST, number)), key=lambda d: abs(math.log(d / wanted)))


def _kept(distance: Float[Array, "..."], most: Any, dtype: Any, *, by_xla: bool) -> Float[Array, "..."]:
    """A distance of levels of an array of this dtype, as it is kept: of bfloat16 in bfloat16, not rounded down.

    It is up to 2^-7 of itself larger then. It is `most` at most, so that no level is infinite.
    """
    if dtype != jnp.bfloat16:
        return distance
    distance, most = distance * (1 + _UP), most * (1 - _UP)
    return _in_bfloat16(jnp.where(distance > most, most, distance), by_xla=by_xla)  # a NaN stays


def _in_bfloat16(x: Float[Array, "..."], *, by_xla: bool) -> Float[Array, "..."]:
    """Rounded, also for what is computed from it: XLA leaves out a conversion to bfloat16 and back. Triton does not, and has no
    `reduce_precision`.
    """
    return (lax.reduce_precision(x, 8, 7) if by_xla else x).astype(jnp.bfloat16)


class OfBlocks(FixedRate):
    """What codecs of blocks share: they encode and decode by kernels where these suit.

    A subclass says what ranges and levels are, once for XLA and once for `block_kernel.encode`.

    Attributes:
      bits, block: see `BlockQuantized`.
      ends: of the ranges, that the kernel looks for.
    """

    bits: int
    block: int
    decoded_by = ("bits",)
    ends: tuple[block_kernel.End, ...]
    ranges: Callable[[Array, View], tuple[Array, ...]]  # they broadcast against the view; last the distance
    levels: Callable[..., Array]  # of values and ranges, float32
    value: Callable[..., Array]  # of levels and ranges
    ranges_in_kernel: Callable[..., tuple[tuple[Array, ...], tuple[Array, ...]]]  # and what `levels_in_kernel` is given
    levels_in_kernel: Callable[..., Array]

    def measured(self, x: Float[Array, "..."]) -> Measured:
        """An encoder with the ranges of `x`: only they need the whole array."""
        check_floats(x)
        return Measured(self.ranges(x, view_of(jax.typeof(x), self.block)), self)

    def levels_of(self, x: Float[Array, "..."], *ranges: Array) -> UInt[Array, "..."]:
        values = in_shape(x, view_of(jax.typeof(x), self.block).shape)
        return self.levels(values, *ranges).astype(WIDTHS[self.bits].number)

    def reads_once(self, aval: Any) -> bool:
        """Whether encoding an array of this type takes one pass over it."""
        return block_kernel.suits(aval, *view_of(aval, self.block))

    def encode(self, x: Float[Array, "..."]) -> Any:
        return self._encoded(x)[0]

    def encode_with_sums(self, x: Float[Array, "..."]) -> tuple[Any, Array]:
        """The code, and the sums of each channel's values and of their squares, float32, 2 x channels."""
        return self._encoded(x, with_sums=True)

    def _encoded(self, x: Float[Array, "..."], *, with_sums: bool = False) -> tuple[Any, Any]:
        check_floats(x)
        x = lax.stop_gradient(x)

        def plain(x: Array) -> tuple[Any, Any]:
            wide, axes = x.astype(jnp.float32), tuple(range(x.ndim - 1))
            sums = jnp.stack([jnp.sum(wide, axes), jnp.sum(wide * wide, axes)]) if with_sums else None
            return self.measured(x).encode(x), sums

        def in_pairs(x: Array) -> tuple[Any, Any]:
            code, sums = plain(x)
            return dataclasses.replace(code, levels=as_pairs(code.levels, self.bits)), sums

        def by_kernel(x: Array) -> tuple[Any, Any]:
            code, sums = self._encode_by_kernel(x, with_sums=with_sums)
            return code, None if sums is None else jnp.sum(sums, 0)

        if not self.reads_once(jax.typeof(x)):
            return plain(x)
        return lax.platform_dependent(x, cuda=by_kernel, default=in_pairs)

    def decoder_to_memory(self, code: Any) -> Callable[[Any], Array] | None:
        """A kernel where the levels are in pairs, and the program is compiled for an NVIDIA GPU."""
        in_pairs = code.levels.dtype == WIDTHS[self.bits].pair
        if not (in_pairs and block_kernel.is_of_one_device(jax.typeof(code.levels)) and block_kernel.has_kernels()):
            return None
        return lambda code: lax.platform_dependent(code, cuda=self._decode_by_kernel, default=self.decode)

    def steps(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The distance of levels of each value, float32."""
        view = view_of(jax.typeof(x), self.block)
        return in_shape(jnp.broadcast_to(self.measured(x).ranges[-1].astype(jnp.float32), view.shape), x.shape)

    def _encode_by_kernel(
        self, x: Float[Array, "..."], *, with_sums: bool = False, interpret: bool = False
    ) -> tuple[Code, Array | None]:
        level, ranges, sums = block_kernel.encode(
            in_shape(x, view_of(jax.typeof(x), self.block).in_blocks),
            self.bits,
            self.ends,
            functools.partial(self.ranges_in_kernel, x.dtype, interpret),
            functools.partial(self.levels_in_kernel, interpret),
            with_sums=with_sums,
            interpret=interpret,
        )
        return self.code_of(x, level, *ranges), sums

    def _decode(self, code: Code) -> Float[Array, "..."]:
        return in_shape(self.value(apart(code.levels, self.bits), *code.ranges, dtype=code.dtype), code.shape)

    def _decode_by_kernel(self, code: Code, *, interpret: bool = False) -> Float[Array, "..."]:
        value = functools.partial(self.value, dtype=code.dtype)
        x = block_kernel.decode(code.levels, code.ranges, value, self.bits, code.dtype, interpret=interpret)
        return in_shape(x, code.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockQuantized(OfBlocks):
    """2^bits levels between the least and the largest value of each channel of every block of neighbouring positions.

    Channels are the last axis, positions the other axes. A block lies within one example (the first of three axes or more) if
    an example has 32 positions or more. So large values in a channel, an example or a stretch of a sequence do not make others
    coarse. Arrays with fewer than 32 positions are cut into blocks along memory. The number of positions in a block is the
    divisor of all positions that is nearest to `block`.

    The code cannot overflow: every finite value decodes to a finite one, at most half the distance of levels away
    (`range / (2^bits - 1) / 2`, a rounding of the dtype, and 1e-37, since levels are no closer than 2^-125 and subnormal numbers
    may count as zero). Values are rounded to the nearest level; a kernel for NVIDIA GPUs takes 16-bit ones that are nearly in the
    middle of two levels to either, which is up to 1/256 of the distance farther, or 1/16 where values are close together beside
    their size. A NaN or an infinity makes its channel of its block NaN.

    Encoding reads the array for the ranges and once more for the levels. On NVIDIA GPUs one kernel reads it once, where the
    channels are a multiple of 64 and one device has the array, as inside `jax.shard_map`. Codes have no derivative. Decoding
    is arithmetic on single values, which XLA does where they are read: on a GPU no decoded array is written.

    Memory: `bits` per value, and 64 bits for each channel of a block: 8.25 or 4.25 bits per value at blocks of 256. Of bfloat16
    arrays ranges are kept in bfloat16, 32 bits: 8.125 or 4.125 bits. Ranges are then wider by 2^-7 of themselves, and by the
    rounding of their middle, at most.

    Args:
      bits: 8 or 4.
      block: positions that share a range, about; at least 32.

    Raises:
      ValueError: `bits` or `block` is none of these.
      TypeError: `bits` or `block` is no integer; what is encoded is not bfloat16, float16 or float32.
    """

    bits: int = dataclasses.field(default=8, metadata={"static": True})
    block: int = dataclasses.field(default=256, metadata={"static": True})

    ends = (block_kernel.LEAST, block_kernel.LARGEST)

    def __post_init__(self):
        object.__setattr__(self, "bits", check_width(self.bits, "number"))
        object.__setattr__(self, "block", check.integer("block", self.block, least=_FEWEST))

    # A level is decoded to `middle + (level - centre) * distance`. So no step overflows, even of ranges beyond float32's
    # largest value, and decoding takes three operations on a value.

    @property
    def _centre(self) -> float:
        """The mean of the levels."""
        return (2**self.bits - 1) / 2

    def ranges(self, x: Float[Array, "..."], view: View) -> tuple[Array, ...]:
        low, high = (
            jnp.expand_dims(end.astype(jnp.float32), view.axes) for end in ends(in_shape(x, view.shape), view.axes)
        )
        return self._between(low, high, x.dtype, by_xla=True)[:2]

    def _between(
        self, low: Float[Array, "..."], high: Float[Array, "..."], dtype: Any, *, by_xla: bool
    ) -> tuple[Array, Array, Array]:
        """The middle of levels from `low` to `high` and their distance, NaN where an end is not finite, as they are kept for an
        array of this dtype. And, float32, the distance of levels that reach both ends: 2^-125 at least where the ends differ.
        """
        middle, half = self._middle_and_half(low, high)
        if dtype == jnp.bfloat16:
            middle, exact = _in_bfloat16(middle, by_xla=by_xla), middle
            half = half + jnp.abs(exact - middle.astype(jnp.float32))
        distance = half / self._centre
        most = (_LARGEST_BFLOAT16 - jnp.abs(middle.astype(jnp.float32))) * (1 / self._centre)
        return middle, _kept(distance, most, dtype, by_xla=by_xla), distance

    def _middle_and_half(self, low: Float[Array, "..."], high: Float[Array, "..."]) -> tuple[Array, Array]:
        """The middle of a range, and half of its width.

        A narrow range that is not empty is widened, so that levels are at least `LEAST_DISTANCE` apart.
        """
        half = high * 0.5 - low * 0.5
        half = jnp.where(half <= LARGEST, half, jnp.nan)
        least = self._centre * LEAST_DISTANCE
        return low + half, jnp.where(half > 0, jnp.where(half < least, least, half), half)

    def levels(self, values: Float[Array, "..."], middle: Array, distance: Array) -> Float[Array, "..."]:
        """The nearest level of each value; any where the distance is zero."""
        middle, distance = middle.astype(jnp.float32), distance.astype(jnp.float32)
        part, inverse = inverse_of(distance)
        level = jnp.floor((values.astype(jnp.float32) * part - middle * part) * inverse + (self._centre + 0.5))
        return jnp.clip(level, 0, 2**self.bits - 1)

    def value(self, levels: UInt[Array, "..."], middle: Array, distance: Array, *, dtype: Any) -> Float[Array, "..."]:
        middle, distance = middle.astype(jnp.float32), distance.astype(jnp.float32)
        x = middle + (levels.astype(jnp.float32) - self._centre) * distance
        if dtype == jnp.float32:  # the largest numbers of 16 bits are too far from float32's to be rounded to infinity
            x = jnp.where(x > LARGEST, LARGEST, jnp.where(x < -LARGEST, -LARGEST, x))  # a kernel's maximum loses a NaN
        return x.astype(dtype)

    def ranges_in_kernel(self, dtype: Any, interpret: bool, low: Array, high: Array) -> Any:
        """For 16 bits levels get a factor and a shift: `x * factor + shift` is x's level, not rounded. That is off by 1 / 256,
        and by 1 / 16 at most where values are close together, for they are no closer than 2^-11 of their size. It takes few
        instructions.
        """
        middle, kept, distance = self._between(low, high, dtype, by_xla=interpret)
        if dtype == jnp.float32:  # ranges may be small beside the values
            return (middle, kept), (middle, kept)
        # The largest range in levels that are not infinite: ends are beyond the outermost of them.
        distance = jnp.where(distance > kept.astype(jnp.float32), distance, kept.astype(jnp.float32))
        factor = jnp.where(distance > 0, kernels.reciprocal(distance, interpret=interpret), 0)
        return (middle, kept), (factor, self._centre - middle.astype(jnp.float32) * factor)

    def levels_in_kernel(self, interpret: bool, values: Array, one: Array, other: Array) -> Array:
        if values.dtype == jnp.float32:
            return self.levels(values, one, other).astype(jnp.int32) << 8
        return block_kernel.rounded(values, one, other, interpret=interpret)


@dataclasses.dataclass(frozen=True)
class RectifiedBlocks(OfBlocks):
    """For arrays without negative values: level 0 is zero, and the others divide what is between zero and the largest value
    of each channel of every block. Blocks are those of `BlockQuantized`.

    With the distance of levels d = largest / (2^bits - 1), level n stands for the values from (n - 1) d to n d and is decoded
    to their middle. So an error is at most d / 2, and a rounding of the dtype. Zeros stay zeros, and all else stays positive:
    d is at least so large that half of it is a positive number. Only subnormal numbers of float32 may count as zero. What is
    finite decodes to what is finite. A NaN or an infinity makes its channel of its block NaN, but `nonzero` is right there as
    elsewhere: a NaN is not positive.

    Encoding reads the array for the largest values and once more for the levels, or once where `BlockQuantized` does.

    Memory: `bits` per value, and 32 bits for each channel of a block: 8.125 or 4.125 bits per value at blocks of 256. Of bfloat16
    arrays distances are kept in bfloat16, rounded up by 2^-7 at most: 8.0625 or 4.0625 bits.

    Args:
      bits: 4 or 8.
      block: positions that share a range, about; at least 32.
    """

    bits: int = 8
    block: int = 256

    keeps_zeros = True

    ends = (block_kernel.LARGEST,)

    def ranges(self, x: Float[Array, "..."], view: View) -> tuple[Array, ...]:
        """The distance of levels: NaN where a value is not finite."""
        x = jnp.where(jnp.isnan(x), jnp.inf, x)  # a maximum may lose a NaN
        largest = jnp.max(in_shape(x, view.shape), view.axes, keepdims=True, initial=0).astype(jnp.float32)
        return (self._distances(largest, x.dtype, by_xla=True)[0],)

    def _distances(self, largest: Float[Array, "..."], dtype: Any, *, by_xla: bool) -> tuple[Array, Array]:
        """The distance of levels as it is kept, and one in float32 of levels that reach the largest value."""
        # CPUs treat subnormal numbers of float32 as zeros.
        least_positive = max(float(jnp.finfo(dtype).smallest_subnormal), _TINY)
        distance = jnp.maximum(largest / (2**self.bits - 1), 2 * least_positive)
        distance = jnp.where(jnp.isfinite(largest), distance, jnp.nan)
        return _kept(distance, _LARGEST_BFLOAT16 / (2**self.bits - 1.5), dtype, by_xla=by_xla), distance

    def levels(self, values: Float[Array, "..."], distance: Array) -> Float[Array, "..."]:
        values, distance = values.astype(jnp.float32), distance.astype(jnp.float32)
        scaled = values * jnp.where(distance > 0, 1 / distance, 0)
        # Written so that levels are right in a channel with a NaN or an infinity, too.
        positive = jnp.where(scaled > 1, jnp.minimum(jnp.ceil(scaled), 2**self.bits - 1), 1)
        return jnp.where(values > 0, positive, 0)

    def value(self, levels: UInt[Array, "..."], distance: Array, *, dtype: Any) -> Float[Array, "..."]:
        return (jnp.maximum(levels.astype(jnp.float32) - 0.5, 0) * distance.astype(jnp.float32)).astype(dtype)

    def ranges_in_kernel(self, dtype: Any, interpret: bool, largest: Array) -> Any:
        kept, distance = self._distances(jnp.maximum(largest, 0), dtype, by_xla=interpret)
        wide = kept.astype(jnp.float32)
        # A little less than the inverse, so that the largest value gets the last level.
        factor = kernels.reciprocal(jnp.where(distance > wide, distance, wide), interpret=interpret) * (1 - 2.0**-21)
        return (kept,), (jnp.where(wide > 0, factor, _TINY),)

    def levels_in_kernel(self, interpret: bool, values: Array, factor: Array) -> Array:
        return block_kernel.rounded_up(values, factor, interpret=interpret)

    def steps(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The distance of levels of each value, float32; 0 for zeros, which are exact."""
        distance = super().steps(x)
        return jnp.where(x == 0, 0, distance)

    def nonzero(self, code: Code) -> Bool[Array, "..."]:
        """Where the values were positive."""
        return in_shape(apart(code.levels, self.bits) > 0, code.shape)
