"""A fixed number of bits per value for dense values, with a range for each position and group of features: for Transformers.

The activations of Transformers have no zeros, their size differs between positions, and a few of their channels are much larger
than the others. So each position has ranges of its own, one for each group of neighbouring features ("per token, per group").
Channels are centred, and large ones made smaller, before ranges are measured: otherwise a single one would take most levels of
its group. Means and sizes of channels come from a few hundred positions.

Values are rounded with subtractive dither (Schuchman 1964, "Dither signals and their effect on quantization noise"): a random
part of a step is added before rounding and subtracted afterwards. So errors do not depend on values, their mean is zero, and
they are uniform in a step, which makes the error of a sum over positions predictable. Random parts are hashes of a place.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float

from memjax._core import check
from memjax.compress._codecs import position_kernel
from memjax.compress._codecs.bits import (
    DITHER_OFFSET,
    MULTIPLE,
    check_width,
    dithered_level,
    pack_levels,
    places,
    plus_dither,
    u32,
    unpack_levels,
)
from memjax.compress._codecs.channel_quantized import LEAST_DISTANCE, ends, evenly_spaced
from memjax.compress._codecs.codec import Code, FixedRate, check_floats, in_shape
from memjax.compress._codecs.sharded import ShardedCode, decode_parts, encode_parts

_FEWEST = 512  # positions of an array whose channels are measured: means and sizes take 64 bits of a channel
_SIZE = 8.0  # of usual channels: values divided by it have ranges whose distances of levels, and their inverses, fit float32
_LEAST_USUAL = 2.0**-100  # of spreads; those below are not told apart
_SMALLEST = 2.0**-123  # values below this are zero when they have been divided by `_SIZE`
_LARGEST_BFLOAT16 = float(jnp.finfo(jnp.bfloat16).max)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PositionQuantized(FixedRate):
    """2^bits levels between the least and the largest value of each position's groups of features, with dither.

    Features are the last axis, or as many of the last axes as it takes to fill a group; positions are the others. Groups are
    equally wide, about `group` features. With 512 positions or more, channels are centred and large ones scaled before: so
    ranges fit channels of the usual size, and the errors of large ones are in proportion to their size.

    An error is at most half the distance of levels, and unbiased: its mean over places is zero. The range of 128 Gaussian
    values is about 5.2 deviations, so that their relative error is 0.6% at 8 bits, 2.4% at 6, 4.8% at 5, 10% at 4 and 22% at 3;
    `relative_error` tells it for an array.

    The code cannot overflow: every finite value decodes to a finite one. Levels are no closer than 2^-122 (in a channel that is
    scaled, than 1e-6 of its size), and subnormal numbers may count as zero: so an error may be 5e-37 larger, which ranges below
    1e-34 show. A NaN or an infinity makes its group of its position NaN.

    Encoding reads the array for the ranges, and once more for each array of levels, of which 6, 5 and 3 bits have two; compiled
    for an NVIDIA GPU a kernel reads it once, if there are 512 positions or more, a multiple of 16, and groups are 64, 128, 256,
    512 or 1,024 wide. Decoding is arithmetic on single values, which XLA does where they are read: no decoded array is written.

    Memory: `bits + 32 / group` per value, 8.25, 6.25, 5.25, 4.25 or 3.25 bits, and 64 bits per channel.

    Args:
      bits: 8, 6, 5, 4 or 3.
      group: features that share a range, about; at least 8.

    Raises:
      ValueError: `bits` or `group` is none of these.
      TypeError: `bits` or `group` is no integer; what is encoded is not bfloat16, float16 or float32.
    """

    bits: int = dataclasses.field(default=8, metadata={"static": True})
    group: int = dataclasses.field(default=128, metadata={"static": True})

    decoded_by = ("bits", "group")

    def __post_init__(self):
        object.__setattr__(self, "bits", check_width(self.bits, "planes"))
        object.__setattr__(self, "group", check.integer("group", self.group, least=MULTIPLE))

    def encode(self, x: Float[Array, "..."]) -> Code | ShardedCode:
        check_floats(x)
        return encode_parts(lambda x, _: self._encode(x), x, 0)

    def relative_error(self, x: Float[Array, "..."]) -> Float[Array, ""]:
        """The expected norm of `decode(encode(x)) - x`, over the norm of `x`: errors are uniform in a step, and then rounded to
        the dtype. NaN if `x` has values that are not finite. Below 1e-36 it is rough, for values below 1e-37 count as lost.
        """
        check_floats(x)
        wide = x.astype(jnp.float32)
        largest = jnp.max(jnp.abs(wide), initial=0)
        # The inverse of neither the largest nor the smallest floats is a normal number.
        part = jnp.where(largest > 1, 2.0**-64, 2.0**64)
        inverse = 1 / jnp.maximum(largest * part, 1e-30)
        over_largest = lambda values: values * part * inverse
        steps = over_largest(self.steps(x))
        errors = steps**2 / 12
        if x.dtype.itemsize == 2:
            power_of_two = lax.bitcast_convert_type(
                lax.bitcast_convert_type(wide, jnp.uint32) & 0x7F800000, jnp.float32
            )
            errors = _rounded_errors(steps, float(jnp.finfo(x.dtype).eps) * over_largest(power_of_two))
        errors += over_largest(jnp.minimum(jnp.abs(wide), _SMALLEST)) ** 2
        found = jnp.sqrt(jnp.sum(errors) / jnp.maximum(jnp.sum(over_largest(wide) ** 2), 1e-30))
        # By bits of magnitudes: CPUs take subnormal numbers for zeros.
        is_subnormal = largest < float(jnp.finfo(jnp.float32).tiny)
        digits = lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32) << 1
        return jnp.where(is_subnormal & jnp.any(digits != 0), 1.0, found)

    def steps(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The distance of levels of each value, float32: errors are uniform in it, and independent of each other."""
        check_floats(x)
        return decode_parts(lambda steps: steps, encode_parts(lambda x, _: self._steps(x, self._encode(x)), x, 0))

    def _steps(self, x: Float[Array, "..."], code: Code) -> Float[Array, "..."]:
        view, (_, distance, _, size) = _view_of(x.shape, self.group), code.ranges
        steps = _of_each(distance, view) * (_SIZE if size is None else size)
        return in_shape(steps[..., : view.features], x.shape)

    def _encode(self, x: Float[Array, "..."]) -> Code:
        """Levels are planes, ranges for each position and group the least value and the distance of levels, of centred and scaled
        values, as bfloat16, and of each channel the centre and the size, float32. Without these they are 0 and `_SIZE`.
        """
        view = _view_of(x.shape, self.group)
        flat = in_shape(x, view.flat)

        if math.prod(view.positions) < _FEWEST or not x.size:
            wide = _padded(flat, view).astype(jnp.float32)
            planes, low, distance = self._encode_scaled(_times(wide, 1 / _SIZE), view)
            return self.code_of(x, planes, low, distance, None, None)

        def plain(x: Array) -> tuple[Any, Array, Array]:
            samples = _padded(evenly_spaced(x, position_kernel.SAMPLES), view).astype(jnp.float32)
            centre, size = map(_with_few_digits, _of_samples(samples.reshape(-1, view.groups, view.width)))
            wide = _padded(x, view).astype(jnp.float32)
            return self._encode_scaled(_times(wide, 1 / size) - centre * (1 / size), view), centre, size

        grouped = math.prod(view.positions), view.groups, view.width
        if view.padded == view.flat and position_kernel.suits(jax.typeof(x), grouped):
            kernel = functools.partial(self._encode_by_kernels, view)
            (planes, *ranges), centre, size = lax.platform_dependent(flat, cuda=kernel, default=plain)
        else:
            (planes, *ranges), centre, size = plain(flat)
        return self.code_of(x, planes, *ranges, centre, size)

    def _encode_by_kernels(self, view: "_View", x: Array, *, interpret: bool = False) -> Any:
        """Computes the same as `_encode`, with kernels."""
        grouped = x.reshape(-1, view.groups, view.width)
        centre, size = map(_with_few_digits, position_kernel.measure(grouped, _of_samples, interpret=interpret))
        return self._encode_by_kernel(view, x, centre * (1 / size), 1 / size, interpret=interpret), centre, size

    def _encode_by_kernel(
        self, view: "_View", x: Array, shift: Array, inverse: Array, *, interpret: bool = False
    ) -> tuple[tuple[Array, ...], Array, Array]:
        """Computes `_encode_scaled` of `x * inverse - shift`, up to rounding."""
        groups = view.groups, view.width
        *planes, low, distance = position_kernel.encode(
            *(x.reshape(-1, *groups), shift.reshape(groups), inverse.reshape(groups), self.bits),
            functools.partial(_levels, highest=2**self.bits - 1),
            interpret=interpret,
        )
        as_grouped = lambda a: a.reshape(*view.grouped[:-1], *a.shape[2:])
        return tuple(map(as_grouped, planes)), as_grouped(low), as_grouped(distance)

    def _encode_scaled(self, y: Float[Array, "..."], view: "_View") -> tuple[tuple[Array, ...], Array, Array]:
        """Quantises centred and scaled values: returns bit planes, lowest levels and steps."""
        highest = 2**self.bits - 1
        low, distance, factor = _levels(*ends(y.reshape(view.grouped), (len(view.positions) + 1,)), highest)
        scaled = (y - _of_each(low, view)) * _of_each(factor, view) + DITHER_OFFSET
        level = dithered_level(scaled, places(view.padded)).reshape(view.grouped)
        return pack_levels(level, self.bits), low, distance

    def _decode(self, code: Code) -> Float[Array, "..."]:
        view, (low, distance, centre, size) = _view_of(code.shape, self.group), code.ranges
        # Arithmetic is in the array's own shape, not in groups: only so is it fused into what reads the array.
        level = unpack_levels(code.levels, self.bits).reshape(view.padded)
        y = plus_dither(level, places(view.padded)) * _of_each(distance, view) + _of_each(low, view)
        y = y * (_SIZE if size is None else size)
        if centre is not None:
            y = y + centre
        largest = float(jnp.finfo(code.dtype).max)
        y = jnp.clip(y, -largest, largest).astype(code.dtype)
        return in_shape(y if view.padded == view.flat else y[..., : view.features], code.shape)


def _rounded_errors(steps: Float[Array, "..."], neighbours: Float[Array, "..."]) -> Float[Array, "..."]:
    """The mean square of quantisation errors that are uniform in [-step/2, step/2], and then rounded.

    They are rounded to multiples of `neighbours`, the float spacing.
    """
    half = steps / jnp.maximum(neighbours, 1e-30) / 2
    most = jnp.floor(half + 0.5)  # errors are -most to most neighbours, the outermost ones with a smaller probability
    squares = (most - 1) * most * (2 * most - 1) / 6 + most**2 * (half - most + 0.5)
    few = neighbours**2 * squares / jnp.maximum(half, 1e-30)
    return jnp.where(half < 100, few, steps**2 / 12)


class _View(NamedTuple):
    """The shapes of an array as positions by features, and with features in groups padded to a multiple of `MULTIPLE`."""

    positions: tuple[int, ...]
    features: int
    groups: int
    width: int

    @property
    def flat(self) -> tuple[int, ...]:
        return (*self.positions, self.features)

    @property
    def padded(self) -> tuple[int, ...]:
        return (*self.positions, self.groups * self.width)

    @property
    def grouped(self) -> tuple[int, ...]:
        return (*self.positions, self.groups, self.width)


def _view_of(shape: tuple[int, ...], group: int) -> _View:
    positions, features = shape[:-1], math.prod(shape[-1:])
    if math.prod(shape) == 0:
        return _View((), 0, 0, MULTIPLE)
    while positions and features < group:
        positions, features = positions[:-1], features * positions[-1]
    exact = [width for width in range(MULTIPLE, features + 1, MULTIPLE) if features % width == 0]
    near = [width for width in exact if group / 2 <= width <= 1.5 * group]
    if near:
        width = min(near, key=lambda width: abs(math.log(width / group)))
    else:
        width = -(-features // max(round(features / group), 1))
        width += -width % MULTIPLE
    return _View(positions, features, -(-features // width), width)


def _padded(x: Float[Array, "... features"], view: _View) -> Float[Array, "... padded"]:
    """Pads the features by repeating the last value, which leaves ranges unchanged."""
    padding = view.groups * view.width - view.features
    if padding == 0:
        return x
    return jnp.concatenate([x, jnp.broadcast_to(x[..., -1:], (*x.shape[:-1], padding))], -1)


def _of_each(x: Float[Array, "... groups"], view: _View) -> Float[Array, "... padded"]:
    """Repeats a number per group for each value of the group, as float32."""
    return jnp.broadcast_to(x.astype(jnp.float32)[..., None], view.grouped).reshape(view.padded)


def _of_samples(samples: Float[Array, "samples *groups width"]) -> tuple[Array, Array]:
    """Estimates the centre and the size of each channel from samples. Sizes are at least `_SIZE`."""
    share = 1 / len(samples)
    centre = jnp.sum(samples * share, 0)
    centre = jnp.clip(jnp.where(centre == centre, centre, 0), -_LARGEST_BFLOAT16, _LARGEST_BFLOAT16)
    spread = jnp.sum(jnp.abs(samples / 2 - centre / 2) * share, 0)
    # The usual spread of a group: a few large ones hardly change this mean.
    usual = (jnp.sum(jnp.sqrt(spread), -1, keepdims=True) / spread.shape[-1]) ** 2
    # Values divided by a size must not be so small that levels at their least distance are too far apart.
    ratio = jnp.where((usual > 0) & (spread < jnp.inf), spread / jnp.maximum(usual, _LEAST_USUAL), 1)
    return centre, _SIZE * jnp.clip(ratio, 1, 2.0**32)


def _levels(
    low: Float[Array, "..."], high: Float[Array, "..."], highest: int
) -> tuple[BFloat16[Array, "..."], BFloat16[Array, "..."], Float[Array, "..."]]:
    """The lowest of the levels and their distance, rounded so that levels reach from `low` to `high`; and by what values are
    multiplied for that distance to be 1."""
    finite = (jnp.abs(low) < jnp.inf) & (jnp.abs(high) < jnp.inf)
    low = jnp.maximum(_rounded(low, upwards=False), -_LARGEST_BFLOAT16)
    # From the rounded lowest level, or the highest would not reach the largest value.
    # A compiler may compute this in several places: the result must not depend on whether it contracts operations.
    distance = jnp.maximum(_rounded((high - low) / highest, upwards=True), LEAST_DISTANCE)
    distance = jnp.where(finite, jnp.where(high - low > 0, distance, 0), jnp.nan)
    factor = jnp.where(distance >= LEAST_DISTANCE, 1 / distance, 0)
    return low.astype(jnp.bfloat16), distance.astype(jnp.bfloat16), factor


def _times(x: Float[Array, "..."], factor: Array | float) -> Float[Array, "..."]:
    """The product, or zero where it is subnormal.

    A compiler may compute the levels once for each plane, and contract this product with a sum in only one of these. Where
    the product is subnormal, levels could then differ, and the planes would not belong together.
    """
    product = x * factor
    return jnp.where(jnp.abs(product) < float(jnp.finfo(jnp.float32).tiny), 0, product)


def _with_few_digits(x: Float[Array, "groups width"]) -> Float[Array, " padded"]:
    """As many as those of bfloat16: the last digits of a sum, which depend on the order of its terms, are gone."""
    return lax.reduce_precision(x.reshape(-1), 8, 7)


def _rounded(x: Float[Array, "..."], *, upwards: bool) -> Float[Array, "..."]:
    """Finite float32 with as many digits as bfloat16, not below `x`, or not above it."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    away = (bits >> 31) == u32(0 if upwards else 1)  # from zero
    bits = jnp.where(away, bits + u32(0xFFFF), bits) & u32(0xFFFF0000)
    return lax.bitcast_convert_type(bits, jnp.float32)
