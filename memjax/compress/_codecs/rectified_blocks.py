"""The default codec of what convolutions read after a ReLU: a fixed number of bits per value, which tell the ReLU's mask, too."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt

from memjax.compress._codecs import block_kernel
from memjax.compress._codecs.block_quantized import OfBlocks, in_shape, view_of
from memjax.compress._codecs.channel_quantized import LEVELS
from memjax.compress._codecs.codec import check_code, check_floats
from memjax.compress._codecs.kernels import apart

_TINY = float(jnp.finfo(jnp.float32).tiny)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RectifiedBlocksCode:
    """What `RectifiedBlocks` keeps.

    Attributes:
      levels: in the shape of the view, or pairs of them: see `kernels.paired`.
      distance: for each channel of each block the distance of levels, float32; NaN where a value is not finite.
      view: the shape that the array is seen in, which `distance` broadcasts against.
      shape, dtype: the array's.
      bits: of a level.
    """

    levels: UInt[Array, "..."]
    distance: Float[Array, "..."]
    view: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    bits: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MeasuredRectified:
    """Encodes an array whose largest values are known: arithmetic on single values."""

    distance: Float[Array, "..."]
    view: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    bits: int = dataclasses.field(metadata={"static": True})

    def encode(self, x: Float[Array, "..."]) -> RectifiedBlocksCode:
        level = _levels(in_shape(x, self.view).astype(jnp.float32), self.distance, self.bits).astype(LEVELS[self.bits])
        return RectifiedBlocksCode(level, self.distance, self.view, x.shape, np.dtype(x.dtype), self.bits)


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

    Memory: `bits` per value, and 32 bits for each channel of a block: 8.125 or 4.125 bits per value at blocks of 256.

    Args:
      bits: 4 or 8.
      block: positions that share a range, about; at least 32.
    """

    bits: int = 8
    block: int = 256

    keeps_zeros = True

    def measured(self, x: Float[Array, "..."]) -> MeasuredRectified:
        """An encoder with the largest values of `x`: only they need the whole array."""
        check_floats(x)
        view = view_of(jax.typeof(x), self.block)
        x = jnp.where(jnp.isnan(x), jnp.inf, x)  # a maximum may lose a NaN
        largest = jnp.max(in_shape(x, view.shape), view.axes, keepdims=True, initial=0).astype(jnp.float32)
        return MeasuredRectified(self._distance(largest, x.dtype), view.shape, self.bits)

    def _distance(self, largest: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
        distance = jnp.maximum(largest / (2**self.bits - 1), 2 * _least_positive(dtype))
        return jnp.where(jnp.isfinite(largest), distance, jnp.nan)

    def _encode_by_kernel(
        self, x: Float[Array, "..."], *, with_sums: bool = False, interpret: bool = False
    ) -> tuple[RectifiedBlocksCode, Array | None]:
        view = view_of(jax.typeof(x), self.block).in_blocks

        def ranges(largest: Array) -> tuple[tuple[Array], tuple[Array]]:
            distance = self._distance(jnp.maximum(largest, 0), x.dtype)
            # A little less than the inverse, so that the largest value gets the last level.
            factor = block_kernel.inverse(distance, interpret=interpret) * (1 - 2.0**-21)
            return (distance,), (jnp.where(distance > 0, factor, _TINY),)

        levels = functools.partial(block_kernel.rounded_up, interpret=interpret)
        ends = [block_kernel.LARGEST]
        level, [distance], sums = block_kernel.encode(
            in_shape(x, view), self.bits, ends, ranges, levels, with_sums=with_sums, interpret=interpret
        )
        return RectifiedBlocksCode(level, distance, view, x.shape, np.dtype(x.dtype), self.bits), sums

    def steps(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The distance of levels of each value, float32; 0 for zeros, which are exact."""
        measured = self.measured(x)
        distance = in_shape(jnp.broadcast_to(measured.distance, measured.view), x.shape)
        return jnp.where(x == 0, 0, distance)

    def decode(self, code: RectifiedBlocksCode) -> Float[Array, "..."]:
        check_code(self, code, RectifiedBlocksCode, "bits")
        x = _from_levels(apart(code.levels, code.view[-1]), code.distance).astype(code.dtype)
        return in_shape(x, code.shape)

    def _decode_by_kernel(self, code: RectifiedBlocksCode, *, interpret: bool = False) -> Float[Array, "..."]:
        numbers = [code.distance]
        x = block_kernel.decode(code.levels, numbers, _from_levels, self.bits, code.dtype, interpret=interpret)
        return in_shape(x, code.shape)

    def nonzero(self, code: RectifiedBlocksCode) -> Bool[Array, "..."]:
        """Where the values were positive."""
        return in_shape(apart(code.levels, code.view[-1]) > 0, code.shape)


def _levels(values: Float[Array, "..."], distance: Float[Array, "..."], bits: int) -> Float[Array, "..."]:
    scaled = values * jnp.where(distance > 0, 1 / distance, 0)
    # Written so that levels are right in a channel with a NaN or an infinity, too.
    positive = jnp.where(scaled > 1, jnp.minimum(jnp.ceil(scaled), 2**bits - 1), 1)
    return jnp.where(values > 0, positive, 0)


def _from_levels(levels: UInt[Array, "..."], distance: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.maximum(levels.astype(jnp.float32) - 0.5, 0) * distance


def _least_positive(dtype: np.dtype) -> float:
    """The smallest number of a dtype that is no subnormal number of float32: CPUs take those for zeros."""
    return max(float(jnp.finfo(dtype).smallest_subnormal), _TINY)
