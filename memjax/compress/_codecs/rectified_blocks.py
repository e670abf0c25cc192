"""The default codec of what convolutions read after a ReLU: a fixed number of bits per value, which tell the ReLU's mask, too."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt

from memjax.compress._codecs import block_kernel
from memjax.compress._codecs.bits import apart
from memjax.compress._codecs.block_quantized import OfBlocks, View
from memjax.compress._codecs.codec import Code, in_shape

_TINY = float(jnp.finfo(jnp.float32).tiny)


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

    ends = (block_kernel.LARGEST,)

    def ranges(self, x: Float[Array, "..."], view: View) -> tuple[Array, ...]:
        """The distance of levels: NaN where a value is not finite."""
        x = jnp.where(jnp.isnan(x), jnp.inf, x)  # a maximum may lose a NaN
        largest = jnp.max(in_shape(x, view.shape), view.axes, keepdims=True, initial=0).astype(jnp.float32)
        return (self._distance(largest, x.dtype),)

    def _distance(self, largest: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
        distance = jnp.maximum(largest / (2**self.bits - 1), 2 * _least_positive(dtype))
        return jnp.where(jnp.isfinite(largest), distance, jnp.nan)

    def levels(self, values: Float[Array, "..."], distance: Array) -> Float[Array, "..."]:
        values = values.astype(jnp.float32)
        scaled = values * jnp.where(distance > 0, 1 / distance, 0)
        # Written so that levels are right in a channel with a NaN or an infinity, too.
        positive = jnp.where(scaled > 1, jnp.minimum(jnp.ceil(scaled), 2**self.bits - 1), 1)
        return jnp.where(values > 0, positive, 0)

    def value(self, levels: UInt[Array, "..."], distance: Array, *, dtype: Any) -> Float[Array, "..."]:
        return (jnp.maximum(levels.astype(jnp.float32) - 0.5, 0) * distance).astype(dtype)

    def ranges_in_kernel(self, dtype: Any, interpret: bool, largest: Array) -> Any:
        distance = self._distance(jnp.maximum(largest, 0), dtype)
        # A little less than the inverse, so that the largest value gets the last level.
        factor = block_kernel.inverse(distance, interpret=interpret) * (1 - 2.0**-21)
        return (distance,), (jnp.where(distance > 0, factor, _TINY),)

    def levels_in_kernel(self, interpret: bool, values: Array, factor: Array) -> Array:
        return block_kernel.rounded_up(values, factor, interpret=interpret)

    def steps(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The distance of levels of each value, float32; 0 for zeros, which are exact."""
        distance = super().steps(x)
        return jnp.where(x == 0, 0, distance)

    def nonzero(self, code: Code) -> Bool[Array, "..."]:
        """Where the values were positive."""
        return in_shape(apart(code.levels, self.bits) > 0, code.shape)


def _least_positive(dtype: np.dtype) -> float:
    """The smallest number of a dtype that is no subnormal number of float32: CPUs take those for zeros."""
    return max(float(jnp.finfo(dtype).smallest_subnormal), _TINY)
