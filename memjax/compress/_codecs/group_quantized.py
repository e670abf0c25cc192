"""A fixed number of bits per value and a range for every group of neighbours, rounded at random."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from memjax._core import check
from memjax._core.segments import automatic_devices
from memjax.compress._codecs.bits import WIDTHS, check_width, u32
from memjax.compress._codecs.codec import Code, FixedRate, check_floats, check_seed
from memjax.compress._codecs.levels import from_levels, levels_between, to_levels
from memjax.compress._codecs.sharded import ShardedCode, encode_parts


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
