"""`ErrorBounded`: the user sets how far a value may move, |decoded - x| <= bound, and the values determine the space.

Jin et al. 2020, "A Novel Memory-Efficient Deep Learning Training Framework via Error-Bounded Lossy Compression", use a
prediction, a quantiser and a Huffman code, whose sizes vary. Here there are a dithered quantiser whose step is a power of two
(quantize.py), a bitmap of zeros, and for the other values as many bits as the largest of 128 needs (tiles.py), in arrays of
static size.
"""

import dataclasses
import functools
import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from memjax._core import check
from memjax.compress._codecs.codec import OptionalMembers, check_floats, largest_error
from memjax.compress._codecs.sharded import ShardedCode, decode_parts, encode_parts
from memjax.compress._error_bounded import launch, reference
from memjax.compress._error_bounded import tiles as _tiles
from memjax.compress._error_bounded.quantize import step_exponent
from memjax.compress._error_bounded.reference import Packed
from memjax.compress._error_bounded.tiles import LANES, TILE_VALUES, Grid

_BOUND = "a positive finite number, or an array of one for each channel"
_MOST_VALUES = 2**31 - TILE_VALUES  # so that places of values and words fit into 32 bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ErrorBoundedCode:
    """What `ErrorBounded` keeps.

    Attributes:
      packed: words and headers.
      exponent: k of the step 2^k for all values, or for every channel.
      shape, dtype: those of the array.
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
        """Bytes of headers and needed words, without the capacity that is not needed."""
        return 4.0 * self.packed.needed.astype(jnp.float32) + Grid.of(self.shape).tiles * (LANES + 4)

    @property
    def raw_share(self) -> Float[Array, ""]:
        """Share of the lanes of 128 values that are stored raw, because a value is not finite or has too many steps."""
        return jnp.mean((self.packed.headers == _tiles.RAW).astype(jnp.float32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ErrorBounded(OptionalMembers):
    """Every finite value decodes to one at most `bound` away, always; zeros, NaNs and infinities to themselves.

    Signs are kept exactly, unless `keeps_signs` is False: `decoded > 0` wherever `x > 0`, so that the code of a ReLU's output
    gives the mask. (A negative zero decodes to zero.) A value is rounded to the middle of a step of width 2^k, the largest power
    of two not above `2 * bound`, with subtractive dither by its place: see quantize.py. So errors are nearly uniform, and
    independent of values and of each other however alike the values are. Over all places the errors of a value have a mean of at
    most half a part of a step, a sixteenth, or an eighth for 16-bit floats. With signs, values below half a step decode to values
    that are too large on average, by up to 0.16 steps. Without signs the mean is at most 9/256 of a step, or 5/64 for 16-bit
    floats, and the mask is `decoded != 0`: `memjax.compressed` decodes so what the backward pass only multiplies into gradients
    of weights. Bfloat16s are coarse beside an eighth of a step: their errors have a mean, towards zero, of 1/64 of a step from 4
    steps on, of 1/16 from 16 on, and of 1/4 from 64 on.

    128 values at a time share a number of bits. If one of them is a NaN or an infinity, or has 256 steps or more (with dither
    sometimes 255; float32: 32,768), they are stored raw. The error is then zero: a bound that is too small for the values costs
    space, never precision, and `code.raw_share` shows it.

    Memory for n values, n rounded up to a multiple of 4096: `n * capacity / 8 + n / 113` bytes. The capacity is
    `bits_per_value`, or without it the width of the dtype, the most that any values can need. A rectified Gaussian takes
    2.69 bits per value, headers included, with a bound of a quarter of its standard deviation. With `bits_per_value` a code
    overflows if its values need more: `code.overflowed` and `code.needed_bits_per_value` tell, and all of it decodes to NaN.

    Args:
      bound: a positive number, or an array with one bound for each channel of the last axis. It is a leaf of the codec
        as a pytree, so that a new bound does not recompile a function that takes the codec as an argument. Arrays are not
        checked: a bound that is not positive, or below 2^-113 (float16: 2^-14), stores everything raw; bounds above 2^118
        (float16: 64, float32: 2^110) count as these.
      bits_per_value: the capacity, without headers; None never overflows.
      keeps_signs: whether decoded values have the signs of the values. Codes are the same.
      implementation: `"pallas"` has kernels for NVIDIA GPUs. `"jnp"` runs everywhere; on a CPU its temporary memory is
        that of the array (twice that to encode one that is padded) and 100 KiB. None is the first of the two that runs here.
        Values and sizes are the same, bit for bit, but the kernels may put the parts of a code in another order each time.
        On a mesh each device encodes its own part, of examples where axes are automatic. Where `jax.jit` learns of the mesh
        from `in_shardings` alone, each device encodes all: give it arrays that are on the mesh, or use `jax.set_mesh`.

    Raises:
      ValueError: a bound or a capacity is not positive, the bound has not one entry per channel, the implementation is
        unknown or cannot run here, or an array to encode has 2^31 values or more.
      TypeError: what is encoded is not bfloat16, float16 or float32.
    """

    keeps_zeros = True

    bound: Any
    _: dataclasses.KW_ONLY
    bits_per_value: float | None = dataclasses.field(default=None, metadata={"static": True})
    keeps_signs: bool = dataclasses.field(default=True, metadata={"static": True})
    implementation: str | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self):
        _check_bound(self.bound)
        if self.bits_per_value is not None:
            check.number("bits_per_value", self.bits_per_value, positive=True)
        check.flag("keeps_signs", self.keeps_signs)
        check.choice("implementation", self.implementation, (None, *_IMPLEMENTATIONS))

    def encode(self, x: Float[Array, "..."]) -> ErrorBoundedCode | ShardedCode:
        check_floats(x)
        exponent = step_exponent(_bound_of(self.bound), x.dtype)
        if exponent.shape not in ((), x.shape[-1:]):
            raise ValueError(
                f"bound must be a number or have one entry per channel of x, shape {x.shape[-1:]}, got {exponent.shape}."
            )
        implementation = self._implementation()

        def encode(x, exponent):
            packed = _encode(implementation, self._capacity(x), x, exponent)
            return ErrorBoundedCode(packed, exponent, x.shape, np.dtype(x.dtype))

        return encode_parts(encode, x, exponent, automatic=True)

    def decode(self, code: ErrorBoundedCode | ShardedCode) -> Float[Array, "..."]:
        if not isinstance(getattr(code, "parts", code), ErrorBoundedCode):
            raise check.fail(TypeError, "code", "what ErrorBounded.encode returns", code)
        decode = functools.partial(_decode, self._implementation(), self.keeps_signs)
        return decode_parts(decode, code)

    def nbytes(self, aval: Any) -> int:
        if not hasattr(aval, "shape"):
            raise check.fail(TypeError, "aval", "an array or the type of one", aval)
        tiles = Grid.of(aval.shape).tiles
        return 4 * self._capacity(aval) + tiles * (LANES + 4) + 4 + 4 * max(np.size(self.bound), 1)

    def ratio(self, x: Float[Array, "..."]) -> Float[Array, ""]:
        """Bytes of `x` divided by the bytes of its code. Unused capacity of the code does not count."""
        check_floats(x)
        return x.size * x.dtype.itemsize / jnp.maximum(self.encode(x).needed_nbytes, 1)

    def error(self, x: Float[Array, "..."]) -> Float[Array, ""]:
        """The largest |decode(encode(x)) - x| of the finite values of `x`, as float32."""
        return largest_error(x, self.decode(self.encode(x)))

    def without_signs(self) -> "ErrorBounded":
        """The codec with `keeps_signs=False`, which decodes the same codes."""
        return dataclasses.replace(self, keeps_signs=False)

    def scaled(self, deviation: Float[Array, " channels"]) -> "ErrorBounded":
        """The codec with its bound in units of each channel's standard deviation."""
        check.array("deviation", deviation, floating=True)
        return dataclasses.replace(self, bound=self.bound * deviation)

    def _capacity(self, aval: Any) -> int:
        """The capacity in words."""
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


def _check_bound(bound: Any) -> None:
    """Check that a bound is positive and finite, if it is known. A leaf of a pytree may be a placeholder of any type."""
    if isinstance(bound, bool | str | bytes | dict | list | tuple | complex):
        raise check.fail(TypeError, "bound", _BOUND, bound)
    if isinstance(bound, np.ndarray | np.generic | jax.Array) and (
        not check.is_array(bound) or bound.dtype == jnp.bool_
    ):
        raise check.fail(TypeError, "bound", _BOUND, bound)
    is_number, is_known = isinstance(bound, int | float), isinstance(bound, np.ndarray | np.generic)
    if (is_number and not 0 < bound <= sys.float_info.max) or (
        is_known and not (np.all(np.isfinite(bound)) and np.all(np.asarray(bound) > 0))
    ):
        raise check.fail(ValueError, "bound", _BOUND, bound)


def _bound_of(bound: Any) -> Array:
    """The bound as an array, when something is encoded with it."""
    is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
    if not is_number and not isinstance(bound, jax.Array | np.ndarray | np.generic):
        raise check.fail(TypeError, "bound", _BOUND, bound)
    return jnp.asarray(bound, jnp.float32)


_IMPLEMENTATIONS: dict[str, Any] = {"jnp": reference, "pallas": launch}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _encode(implementation: str, capacity: int, x: Array, exponent: Array) -> Packed:
    return _IMPLEMENTATIONS[implementation].encode(x, exponent, capacity)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(implementation: str, keeps_signs: bool, code: ErrorBoundedCode) -> Array:
    decode = _IMPLEMENTATIONS[implementation].decode
    return decode(code.packed, code.exponent, code.shape, code.dtype, keeps_signs=keeps_signs)


# Warns at run time of codes that overflow: their values are lost, and gradients are NaN.


class CapacityWarning(UserWarning):
    """Codes of `memjax.compressed` needed more bits than the codec's `bits_per_value`."""


_warned: set[tuple[str, ...]] = set()


def warn_of_overflow(names: Sequence[str], codes: Sequence[Any]) -> None:
    """Have the host issue a `CapacityWarning`, once for these arrays, when one of `codes` overflows.

    A device that finds no overflow does not call the host.

    Codes without `overflowed` and `needed_bits_per_value` are skipped.
    """
    pairs = [(name, code) for name, code in zip(names, codes, strict=True) if hasattr(code, "overflowed")]
    if not pairs:
        return
    arrays = tuple(name for name, _ in pairs)

    def tell(overflowed, needed):
        if np.any(overflowed) and arrays not in _warned:
            _warned.add(arrays)
            warnings.warn(_message(arrays, np.asarray(overflowed), np.asarray(needed)), CapacityWarning, stacklevel=2)

    @jax.custom_batching.custom_vmap
    def look(overflowed, needed):
        jax.lax.cond(jnp.any(overflowed), lambda: jax.debug.callback(tell, overflowed, needed), lambda: None)
        return overflowed

    @look.def_vmap
    def look_once(size, batched, overflowed, needed):  # a callback would be repeated for every example
        overflowed = jnp.any(overflowed, 0) if batched[0] else overflowed
        return look(overflowed, jnp.max(needed, 0) if batched[1] else needed), False

    look(
        jnp.stack([code.overflowed for _, code in pairs]),
        jnp.stack([code.needed_bits_per_value for _, code in pairs]),
    )


def _message(names: Sequence[str], overflowed: np.ndarray, needed: np.ndarray) -> str:
    worst = sorted(map(int, np.flatnonzero(overflowed)), key=lambda i: -needed[i])
    listed = ", ".join(f"{names[i]} ({_up(needed[i])} bits)" for i in worst[:5])
    more = f" and {len(worst) - 5} more" if len(worst) > 5 else ""
    enough = _up(needed[worst[0]])
    return (
        f"memjax.compressed: the codes of {len(worst)} of {len(names)} saved arrays need more than bits_per_value: "
        f"{listed}{more}. Their values are lost, and gradients computed from them are NaN. Give a codec with "
        f"bits_per_value={enough} or more or a larger bound, use memjax.compress.transactional, which repeats such steps "
        f"with more capacity, or leave the codec out: the default cannot overflow."
    )


def _up(bits: float) -> float:
    """The number rounded up to a tenth."""
    return math.ceil(float(bits) * 10) / 10
