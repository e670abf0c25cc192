"""A fixed number of bits per value, with a range for every channel: elementwise, so that compilers fuse it with what follows."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt

from memjax._core import check
from memjax._core.segments import automatic_devices
from memjax.compress._codecs.bits import WIDTHS, check_width
from memjax.compress._codecs.codec import Code, FixedRate, Measured, check_floats
from memjax.compress._codecs.levels import from_levels, levels_between, to_levels


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
