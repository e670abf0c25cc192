"""The error-bounded codec: how far a value may move is given, and the space follows from the values.

Jin et al. 2020, "A Novel Memory-Efficient Deep Learning Training Framework via Error-Bounded Lossy Compression". There
a prediction, a quantiser and a Huffman code, whose sizes vary; here a dithered quantiser whose step is a power of two, a
bitmap of zeros and as many bits for the rest as the largest of 128 values needs (`_tiles`), in arrays of static size.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from memjax._core import check
from memjax.compress._codecs.codec import (
    OptionalMembers,
    bound_of,
    check_bound,
    check_code,
    check_floats,
    largest_error,
)
from memjax.compress._codecs.sharded import ShardedCode, decode_parts, encode_parts
from memjax.compress._error_bounded import reference
from memjax.compress._error_bounded import tiles as _tiles
from memjax.compress._error_bounded.kernels import launch
from memjax.compress._error_bounded.quantize import step_exponent
from memjax.compress._error_bounded.reference import Packed
from memjax.compress._error_bounded.tiles import LANES, TILE_VALUES, Grid

_MOST_VALUES = 2**31 - TILE_VALUES  # so that places of values and words fit into 32 bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ErrorBoundedCode:
    """What `ErrorBounded` keeps.

    Attributes:
      packed: words and headers.
      exponent: k of the steps 2^k: of all values, or of every channel.
      shape, dtype: of the array.
    """

    packed: Packed
    exponent: Int32[Array, "..."]
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    @property
    def overflowed(self) -> Bool[Array, ""]:
        """Whether values were lost because the capacity did not suffice."""
        return self.packed.needed > self.packed.words.shape[-1]

    @property
    def needed_bits_per_value(self) -> Float[Array, ""]:
        """The least `bits_per_value` with which nothing would have been lost."""
        values = max(Grid.of(self.shape).tiles, 1) * TILE_VALUES
        return self.packed.needed.astype(jnp.float32) * (32 / values)

    @property
    def needed_nbytes(self) -> Float[Array, ""]:
        """Bytes, headers included, capacity that is not needed left out."""
        return 4.0 * self.packed.needed.astype(jnp.float32) + Grid.of(self.shape).tiles * (LANES + 4)

    @property
    def raw_share(self) -> Float[Array, ""]:
        """Share of the lanes of 128 values stored as they are, because one of them is no finite number or too many steps."""
        return jnp.mean((self.packed.headers == _tiles.RAW).astype(jnp.float32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ErrorBounded(OptionalMembers):
    """Every finite value decodes to one at most `bound` away, always; zeros, NaNs and infinities to themselves.

    Signs are kept exactly, unless `keeps_signs` is False: `decoded > 0` wherever `x > 0`, so of an activation after a ReLU it
    gives the mask. (A negative zero decodes to zero.) Values are rounded to the middle of steps of 2^k, the largest power of two
    not above `2 * bound`; before it they are moved by a part of a step that follows from their place in the array, afterwards
    moved back (subtractive dither), by sixteenths of a step, of narrow floats eighths. So errors are nearly uniform and
    independent of values and of each other, however alike values are; and equal values in two places decode to different ones.
    Bfloat16s are coarse beside an eighth of a step: their errors have a mean, towards zero, of a 64th of a step from 4 steps on,
    of a 16th from 16 on, of a quarter from 64 on.

    Errors of a value, over places, have a mean of at most half a part of a step, for what is known of the value is the part
    that it is in. But values smaller than half a step can be moved down by half a step only if signs are not kept: with
    signs what they decode to is too large on average, by up to 0.16 steps. Without signs some of them decode to numbers of the
    other sign, and the mean is at most 9/256 of a step, of narrow floats 5/64; `decoded != 0` is the mask then.
    `memjax.compressed` decodes so what the backward pass multiplies into gradients of weights, if that is all it does with an
    array.

    128 values at a time share a number of bits; if one of them is a NaN or an infinity, or 256 steps, with dither sometimes
    255 (float32: 32,768), they are stored as they are. The error is then zero: a bound that is too small for the values costs
    space, never precision; `code.raw_share` tells.

    Memory, with n values, n a multiple of 4096 or else rounded up to one: `n * capacity / 8 + n / 113` bytes, where capacity
    is `bits_per_value`, or without it the width of the dtype: the largest that any values can need. A rectified Gaussian takes
    2.69 bits a value, headers included, with a bound of a quarter of its standard deviation. With `bits_per_value`
    a code whose values need more has lost some, and says so: `code.overflowed`, `code.needed_bits_per_value`. It
    decodes to NaN, all of it.

    Args:
      bound: positive; a number, or an array with one bound for each channel of the last axis. It is a leaf of the codec
        as a pytree, so that a new bound does not recompile what takes the codec as an argument. Arrays are not checked:
        one that is not positive, like bounds below 2^-113 (float16: 2^-14), stores everything as it is; those above 2^118
        (float16: 64, float32: 2^110) are as these.
      bits_per_value: of capacity, without headers; None: never overflows.
      keeps_signs: whether decoded values have the signs of values; if not, those of values below half a step may have the
        other, and errors have hardly any mean. Codes are the same.
      implementation: `"pallas"`, kernels for NVIDIA GPUs; `"jnp"`, which runs everywhere and whose temporary memory is
        that of the array and of its code, and a few MiB; None: the first of the two that runs here. Values and sizes are
        the same, bit for bit; kernels may put the parts of a code in another order, and another each time. They are for
        one device: call them in `shard_map`.

    Raises:
      ValueError: a bound or a capacity that is not positive, more channels' bounds than channels, or an implementation
        that is unknown or cannot run here; encoding an array of 2^31 values or more.
      TypeError: what is encoded is not bfloat16, float16 or float32.
    """

    keeps_zeros = True

    bound: Any
    _: dataclasses.KW_ONLY
    bits_per_value: float | None = dataclasses.field(default=None, metadata={"static": True})
    keeps_signs: bool = dataclasses.field(default=True, metadata={"static": True})
    implementation: str | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self):
        check_bound(self.bound)
        if self.bits_per_value is not None:
            check.number("bits_per_value", self.bits_per_value, positive=True)
        check.flag("keeps_signs", self.keeps_signs)
        check.choice("implementation", self.implementation, (None, *_IMPLEMENTATIONS))

    def encode(self, x: Float[Array, "..."]) -> ErrorBoundedCode | ShardedCode:
        check_floats(x)
        exponent = step_exponent(bound_of(self.bound), x.dtype)
        if exponent.shape not in ((), x.shape[-1:]):
            raise ValueError(
                f"bound must be a number or have one entry per channel of x, shape {x.shape[-1:]}, got {exponent.shape}."
            )
        implementation = self._implementation()

        def encode(x, exponent):
            packed = _encode(implementation, self._capacity(x), x, exponent)
            return ErrorBoundedCode(packed, exponent, x.shape, np.dtype(x.dtype))

        return encode_parts(encode, x, exponent)

    def decode(self, code: ErrorBoundedCode | ShardedCode) -> Float[Array, "..."]:
        check_code(self, code, ErrorBoundedCode, ShardedCode)
        decode = functools.partial(_decode, self._implementation(), self.keeps_signs)
        return decode_parts(decode, code)

    def nbytes(self, aval: Any) -> int:
        if not hasattr(aval, "shape"):
            raise check.fail(TypeError, "aval", "an array or the type of one", aval)
        tiles = Grid.of(aval.shape).tiles
        return 4 * self._capacity(aval) + tiles * (LANES + 4) + 4 + 4 * max(np.size(self.bound), 1)

    def ratio(self, x: Float[Array, "..."]) -> Float[Array, ""]:
        """How many times smaller than `x` its code is, headers included, capacity that is not needed left out."""
        check_floats(x)
        return x.size * x.dtype.itemsize / jnp.maximum(self.encode(x).needed_nbytes, 1)

    def error(self, x: Float[Array, "..."]) -> Float[Array, ""]:
        """The largest |decode(encode(x)) - x| of the finite values of `x`, as float32."""
        return largest_error(x, self.decode(self.encode(x)))

    def without_signs(self) -> "ErrorBounded":
        """What decodes the same codes with errors that have hardly any mean: see `keeps_signs`."""
        return dataclasses.replace(self, keeps_signs=False)

    def scaled(self, deviation: Float[Array, " channels"]) -> "ErrorBounded":
        """With the bound in units of each channel's standard deviation: see `compressed`."""
        return dataclasses.replace(self, bound=self.bound * deviation)

    def _capacity(self, aval: Any) -> int:
        """Words."""
        tiles = Grid.of(aval.shape).tiles
        most = tiles * LANES * _tiles.raw_words(aval.dtype)
        if tiles * TILE_VALUES > _MOST_VALUES:
            raise ValueError(f"x must have fewer than 2^31 values, got shape {aval.shape}: encode parts of it.")
        if self.bits_per_value is None:
            return most
        return min(most, math.ceil(tiles * TILE_VALUES * self.bits_per_value / 32))

    def _implementation(self) -> str:
        if self.implementation == "pallas" and (reason := launch.why_not()):
            raise ValueError(f'implementation must be "jnp" or None here, got "pallas": {reason}.')
        return self.implementation or ("jnp" if launch.why_not() else "pallas")


_IMPLEMENTATIONS = ("jnp", "pallas")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _encode(implementation: str, capacity: int, x: Array, exponent: Array) -> Packed:
    if implementation == "pallas":
        return launch.encode(x, exponent, capacity)
    return reference.encode(x, exponent, capacity)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(implementation: str, keeps_signs: bool, code: ErrorBoundedCode) -> Array:
    if implementation == "pallas":
        return launch.decode(code.packed, code.exponent, code.shape, code.dtype, keeps_signs=keeps_signs)
    return reference.decode(code.packed, code.exponent, code.shape, code.dtype, keeps_signs=keeps_signs)
