"""The default codec: a fixed number of bits per value, with a range for each channel in a few hundred neighbouring positions."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt

from memjax._core import check
from memjax._core.segments import automatic_devices
from memjax.compress._codecs import block_kernel
from memjax.compress._codecs.channel_quantized import LEVELS, ends
from memjax.compress._codecs.codec import FixedRate, check_code, check_floats
from memjax.compress._codecs.kernels import apart, as_pairs
from memjax.compress._codecs.levels import centred_between, from_centred, levels_of_16_bits, to_centred

_FEWEST = 32  # values that share a range, if the array has so many


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockQuantizedCode:
    """What `BlockQuantized` keeps.

    Attributes:
      levels: in the shape of the view, or pairs of them: see `kernels.paired`.
      middle, distance: for each channel of each block, the middle of its range and the distance of levels, float32.
      view: the shape that the array is seen in, which `middle` and `distance` broadcast against.
      shape, dtype: the array's.
      bits: of a level.
    """

    levels: UInt[Array, "..."]
    middle: Float[Array, "..."]
    distance: Float[Array, "..."]
    view: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    bits: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MeasuredBlocks:
    """Encodes an array whose ranges are known: arithmetic on single values."""

    middle: Float[Array, "..."]
    distance: Float[Array, "..."]
    view: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    bits: int = dataclasses.field(metadata={"static": True})

    def encode(self, x: Float[Array, "..."]) -> BlockQuantizedCode:
        level = to_centred(in_shape(x, self.view), self.middle, self.distance, self.bits)
        level = level.astype(LEVELS[self.bits])
        return BlockQuantizedCode(level, self.middle, self.distance, self.view, x.shape, np.dtype(x.dtype), self.bits)


class OfBlocks(FixedRate):
    """What codecs of blocks have in common: they encode and decode by kernels where these suit."""

    bits: int
    block: int
    measured: Callable[[Array], Any]
    decode: Callable[[Any], Array]
    _encode_by_kernel: Callable[..., tuple[Any, Any]]
    _decode_by_kernel: Callable[[Any], Array]

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
            return code, jnp.sum(sums, 0) if with_sums else None

        if not self.reads_once(jax.typeof(x)):
            return plain(x)
        return lax.platform_dependent(x, cuda=by_kernel, default=in_pairs)

    def decoder_to_memory(self, code: Any) -> Callable[[Any], Array] | None:
        """A kernel where the levels are in pairs, and the program is compiled for an NVIDIA GPU."""
        in_pairs = code.levels.shape[-1] != code.view[-1]
        if not (in_pairs and block_kernel.is_of_one_device(jax.typeof(code.levels)) and block_kernel.has_kernels()):
            return None
        return lambda code: lax.platform_dependent(code, cuda=self._decode_by_kernel, default=self.decode)


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
    may count as zero). Values are rounded to the nearest level. A NaN or an infinity makes
    its channel of its block NaN.

    Encoding reads the array for the ranges and once more for the levels. On NVIDIA GPUs one kernel reads it once, where the
    channels are a multiple of 64 and one device has the array, as inside `jax.shard_map`. Codes have no derivative. Decoding
    is arithmetic on single values, which XLA does where they are read: on a GPU no decoded array is written.

    Memory: `bits` per value, and 64 bits for each channel of a block: 8.25 or 4.25 bits per value at blocks of 256.

    Args:
      bits: 4 or 8.
      block: positions that share a range, about; at least 32.

    Raises:
      ValueError: `bits` or `block` is none of these.
      TypeError: `bits` or `block` is no integer; what is encoded is not bfloat16, float16 or float32.
    """

    bits: int = dataclasses.field(default=8, metadata={"static": True})
    block: int = dataclasses.field(default=256, metadata={"static": True})

    def __post_init__(self):
        object.__setattr__(self, "bits", check.integer("bits", self.bits))
        if self.bits not in LEVELS:
            raise ValueError(f"bits must be 4 or 8, got {self.bits!r}")
        object.__setattr__(self, "block", check.integer("block", self.block, least=_FEWEST))

    def measured(self, x: Float[Array, "..."]) -> MeasuredBlocks:
        """An encoder with the ranges of `x`: only they need the whole array."""
        check_floats(x)
        view = view_of(jax.typeof(x), self.block)
        low, high = (
            jnp.expand_dims(end.astype(jnp.float32), view.axes) for end in ends(in_shape(x, view.shape), view.axes)
        )
        return MeasuredBlocks(*centred_between(low, high, self.bits), view.shape, self.bits)

    def _encode_by_kernel(
        self, x: Float[Array, "..."], *, with_sums: bool = False, interpret: bool = False
    ) -> tuple[BlockQuantizedCode, Array | None]:
        view = view_of(jax.typeof(x), self.block).in_blocks
        reciprocal = functools.partial(block_kernel.inverse, interpret=interpret)
        is_wide = x.dtype == jnp.float32  # ranges may be small beside the values

        def ranges(low: Array, high: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
            if is_wide:
                found = centred_between(low, high, self.bits)
                return found, found
            return levels_of_16_bits(low, high, self.bits, reciprocal)

        def levels(values: Array, one: Array, other: Array) -> Array:
            if is_wide:
                return to_centred(values, one, other, self.bits).astype(jnp.int32)
            return block_kernel.rounded(values, one, other, interpret=interpret)

        ends = block_kernel.LEAST, block_kernel.LARGEST
        level, (middle, distance), sums = block_kernel.encode(
            in_shape(x, view), self.bits, ends, ranges, levels, with_sums=with_sums, interpret=interpret
        )
        return BlockQuantizedCode(level, middle, distance, view, x.shape, np.dtype(x.dtype), self.bits), sums

    def steps(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The distance of levels of each value, float32."""
        measured = self.measured(x)
        return in_shape(jnp.broadcast_to(measured.distance, measured.view), x.shape)

    def decode(self, code: BlockQuantizedCode) -> Float[Array, "..."]:
        check_code(self, code, BlockQuantizedCode, "bits")
        levels = apart(code.levels, code.view[-1])
        return in_shape(from_centred(levels, code.middle, code.distance, self.bits, code.dtype), code.shape)

    def _decode_by_kernel(self, code: BlockQuantizedCode, *, interpret: bool = False) -> Float[Array, "..."]:
        value = functools.partial(from_centred, bits=self.bits, dtype=code.dtype)
        numbers = [code.middle, code.distance]
        x = block_kernel.decode(code.levels, numbers, value, self.bits, code.dtype, interpret=interpret)
        return in_shape(x, code.shape)


DEFAULT = BlockQuantized(8)
"""What `memjax.compressed` uses if no codec is given: 8 bits per value, at a fixed rate, for any finite values."""


class _View(NamedTuple):
    """A shape with as many values, and the axes over which values share a range."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def in_blocks(self) -> tuple[int, ...]:
        """Blocks x positions x channels."""
        return (math.prod(self.shape[:-2]), *self.shape[-2:])


def view_of(aval: Any, block: int) -> _View:
    shape = aval.shape
    if aval.size == 0 or not shape:
        return _View((aval.size, 1), (1,))
    if any(axis is not None for axis in aval.sharding.spec):
        # Axes that lie on several devices are left as they are: all positions of an example share a range.
        return _View(shape, tuple(range(1, len(shape) - 1)) or (0,))
    channels = shape[-1] if len(shape) > 1 else 1
    positions = aval.size // channels
    per_example = positions // shape[0] if len(shape) > 2 else positions
    if per_example >= _FEWEST:
        # A block lies on one device where positions are sharded evenly. Axes stay apart there: merged, they would be gathered.
        shared = math.gcd(per_example, automatic_devices([aval]) or 1)
        part = per_example // shared
        length = _nearest_divisor(part if part >= _FEWEST else per_example, block)
        if len(shape) > 2 and not block_kernel.is_of_one_device(aval):
            return _View((shape[0], per_example // length, length, channels), (2,))
    elif positions >= _FEWEST:
        length = _nearest_divisor(positions, block)
    else:
        channels, length = 1, _nearest_divisor(aval.size, block)
    return _View((aval.size // (length * channels), length, channels), (1,))


def _nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number`, of `_FEWEST` or more if there is one, whose ratio to `wanted` is nearest to one."""
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    divisors = {*small, *(number // i for i in small)}
    return min((d for d in divisors if d >= min(_FEWEST, number)), key=lambda d: abs(math.log(d / wanted)))


def in_shape(x: Array, shape: tuple[int, ...]) -> Array:
    return x if x.shape == shape else x.reshape(shape)
