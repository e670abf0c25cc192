"""A fixed number of bits per value, with a scale for every channel: elementwise, so that compilers fuse it with what follows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt

from memjax.compress._codec import FixedRate

_LEVELS = {4: jnp.uint4, 8: jnp.uint8}  # XLA has two bits, too, but cannot transpose them on GPUs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChannelQuantizedCode:
    """What `ChannelQuantized` keeps: for every channel its least value and the distance of levels, and the values' levels.

    Levels of four bits are XLA's own, two to a byte.
    """

    levels: UInt[Array, "..."]
    low: Float[Array, "*channels"]
    distance: Float[Array, "*channels"]
    dtype: np.dtype = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChannelQuantized(FixedRate):
    """2^bits levels between the least and the largest value of each channel of the last axis, rounded to the nearest.

    For what a batch norm reads: of a Gaussian channel of a million values, 4 bits keep all but 0.2 standard deviations. An
    error is at most half the distance of levels, `range / (2^bits - 1) / 2`, and a rounding of the dtype. A NaN, an
    infinity or a range beyond float32's makes its channel NaN.

    Encoding reads the array twice, for the ranges and for the levels. Decoding is arithmetic on single values, which XLA does
    where they are read: no decoded array is written.

    Memory: `bits` per value and 8 bytes per channel.

    Args:
      bits: 4 or 8.

    Raises:
      ValueError: `bits` is none of these.
      TypeError: what is encoded is not bfloat16, float16 or float32.
    """

    bits: int = dataclasses.field(default=4, metadata={"static": True})

    def __post_init__(self):
        if self.bits not in _LEVELS:
            raise ValueError(f"bits must be 4 or 8, got {self.bits!r}.")

    def encode(self, x: Float[Array, "..."]) -> ChannelQuantizedCode:
        if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            raise TypeError(f"x must be bfloat16, float16 or float32, got {x.dtype}.")
        rows = tuple(range(x.ndim - 1))
        if x.size == 0:
            low = high = jnp.zeros(x.shape[-1:], jnp.float32)
        else:
            low, high = (reduce(x, rows).astype(jnp.float32) for reduce in (jnp.min, jnp.max))
        most = 2**self.bits - 1
        distance = (high - low) / most
        inverse = jnp.where(distance > 0, 1 / distance, 0)
        # Not clipped: rounding cannot lead above `most` by half a level.
        level = jnp.floor((x.astype(jnp.float32) - low) * inverse + 0.5).astype(_LEVELS[self.bits])
        return ChannelQuantizedCode(level, low, distance, np.dtype(x.dtype))

    def decode(self, code: ChannelQuantizedCode) -> Float[Array, "..."]:
        return (code.low + code.levels.astype(jnp.float32) * code.distance).astype(code.dtype)
