"""What a codec is, what those of a fixed rate share, and the simplest: narrower floats, booleans as bits, errors for codes."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from memjax._core import check
from memjax._core.program.jaxpr import nbytes
from memjax.compress._codecs.bits import WORD, pack, unpack
from memjax.compress._codecs.sharded import decode_parts


@runtime_checkable
class Codec(Protocol):
    """How an array is kept between forward and backward. A frozen dataclass with these methods will do.

    `encode` and `decode` run under `jit`, `vmap` and `shard_map`: a code is a pytree of arrays whose shapes depend on
    those of `x` alone, and carries with it what `decode` needs. A codec whose settings may change without recompiling
    is a pytree itself, with those settings as leaves.

    What reads an array waits for its code, and decoding waits for the cotangent that meets the decoded array.

    `memjax.compressed` calls `encode`, `decode` and `nbytes` alone. A codec may have these members, too:

    - `elementwise`, False by default: whether decoding is arithmetic on single values. On a GPU, decoding then waits for
      nothing, and the compiler makes it a part of what reads the array.
    - `keeps_zeros`, False by default: whether decoded values are zero exactly where the values are. The mask of a ReLU then
      follows from its decoded output.
    - `decoder_to_memory(code)`: what to call in place of `decode` where the reader fuses nothing, as a convolution, or None.
    - `nonzero(code)`: where the values are not zero, told by a code that keeps zeros without decoding it.
    - `without_signs()`, by default the codec itself: a codec that decodes the same codes for products with cotangents, where
      signs do not matter.
    - `scaled(deviation)`: the codec with its bound in units of each channel's standard deviation. It encodes what a batch
      norm reads.
    - `measured(x)`: an encoder whose `encode(x)` gives the codec's code by arithmetic on single values. It encodes what a
      batch norm reads, fused into the normalisation, and only what follows the normalisation waits for the code.
    """

    def encode(self, x: Array) -> Any:
        """The code of `x`."""

    def decode(self, code: Any) -> Array:
        """An array of the shape and dtype of what was encoded."""

    def nbytes(self, aval: Any) -> int:
        """Bytes of the code of an array of the shape and dtype of `aval`."""

    def ratio(self, x: Array) -> Float[Array, ""]:
        """How many times smaller than `x` its code is."""

    def error(self, x: Array) -> Float[Array, ""]:
        """The largest |decode(encode(x)) - x| of the finite values of `x`, as float32."""


class OptionalMembers:
    """The optional members of a codec and their defaults: see `Codec`. A method that is None is not there."""

    elementwise: bool = False
    keeps_zeros: bool = False
    nonzero: Callable[[Any], Array] | None = None
    scaled: Callable[[Array], Codec] | None = None
    measured: Callable[[Array], Any] | None = None
    encode_with_sums: Callable[[Array], tuple[Any, Array]] | None = None

    def reads_once(self, aval: Any) -> bool:
        return False

    def decoder_to_memory(self, code: Any) -> Callable[[Any], Array] | None:
        return None

    def without_signs(self) -> Any:
        return self


def with_optional_members(codec: Any) -> Any:
    """`codec`, with the defaults of the optional members that a user's class lacks."""
    if isinstance(codec, OptionalMembers):
        return codec
    complete = OptionalMembers()
    names = [name for name in vars(OptionalMembers) if not name.startswith("_")]
    members = {name: getattr(codec, name, getattr(complete, name)) for name in names}
    vars(complete).update(members, encode=codec.encode, decode=codec.decode)
    return complete


DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
"""The dtypes that are encoded."""


def check_floats(x: Any) -> None:
    """Check that `x` is an array of a dtype that quantisers take."""
    check.array("x", x)
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be bfloat16, float16 or float32, got {x.dtype}: convert it, or leave it as it is")


def check_seed(seed: Any) -> None:
    """Check that a random key can be made from `seed`."""
    is_array = isinstance(seed, jax.Array | np.ndarray)
    if not (is_array and seed.shape == () and jnp.issubdtype(seed.dtype, jnp.integer)):
        whole = check.integer("seed", seed)
        if not -(2**63) <= whole < 2**63:
            raise check.fail(ValueError, "seed", "an integer of at most 64 bits", seed)


def in_shape(x: Array, shape: tuple[int, ...]) -> Array:
    return x if x.shape == shape else x.reshape(shape)


def largest_error(x: Array, decoded: Array) -> Float[Array, ""]:
    """The largest difference where both are finite, infinite where only `x` is, as float32."""
    wide = jnp.float32 if x.dtype.itemsize < 8 else x.dtype
    x, decoded = x.astype(wide), decoded.astype(wide)
    difference = jnp.where(jnp.isfinite(decoded), jnp.abs(x - decoded), jnp.inf)
    return jnp.max(jnp.where(jnp.isfinite(x), difference, 0), initial=0).astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Code:
    """The code of an array, by a codec of a fixed rate.

    Attributes:
      levels: a number for each value, as the codec packs them.
      ranges: the parameters that decode the levels, such as the least value and the step of each range.
      shape, dtype: the array's.
      codec: the class of the codec.
      settings: names and values of the settings that decoding depends on.
    """

    levels: Any
    ranges: tuple[Any, ...]
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    codec: type = dataclasses.field(metadata={"static": True})
    settings: tuple[tuple[str, Any], ...] = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Measured:
    """Encodes an array whose ranges are known: arithmetic on single values."""

    ranges: tuple[Any, ...]
    codec: Any = dataclasses.field(metadata={"static": True})

    def encode(self, x: Float[Array, "..."]) -> Code:
        return self.codec.code_of(x, self.codec.levels_of(x, *self.ranges), *self.ranges)


class FixedRate(OptionalMembers):
    """Base of elementwise codecs that take the same number of bits for all values. They have `encode` and `_decode`.

    Attributes:
      decoded_by: the names of the settings that decoding depends on.
    """

    elementwise = True
    decoded_by: tuple[str, ...] = ()
    encode: Callable[[Array], Any]
    _decode: Callable[[Code], Array]

    def code_of(self, x: Array, levels: Any, *ranges: Any) -> Code:
        """The code of `x` with these levels."""
        return Code(levels, ranges, x.shape, np.dtype(x.dtype), type(self), self._settings())

    def _settings(self) -> tuple[tuple[str, Any], ...]:
        return tuple((name, getattr(self, name)) for name in self.decoded_by)

    def decode(self, code: Any) -> Array:
        """Decodes `code`, which must have been made by a codec of the same class and `decoded_by` settings."""
        own, name = getattr(code, "parts", code), type(self).__name__
        if not isinstance(own, Code) or own.codec is not type(self):
            raise check.fail(TypeError, "code", f"what {name}.encode returns", code)
        if own.settings != self._settings():
            wanted, made = (
                ", ".join(f"{setting}={value}" for setting, value in one) for one in (self._settings(), own.settings)
            )
            raise ValueError(
                f"code must be one that {name}({wanted}) made, got one of {name}({made}): decode it with the codec that made it"
            )
        return decode_parts(self._decode, code)

    def nbytes(self, aval: Any) -> int:
        if not (hasattr(aval, "shape") and hasattr(aval, "dtype")):
            raise check.fail(TypeError, "aval", "an array or the type of one", aval, "pass jax.typeof(x)")
        return sum(map(nbytes, jax.tree.leaves(jax.eval_shape(self.encode, aval))))

    def ratio(self, x: Array) -> Float[Array, ""]:
        check.array("x", x)
        return jnp.float32(x.size * x.dtype.itemsize / max(self.nbytes(jax.typeof(x)), 1))

    def error(self, x: Array) -> Float[Array, ""]:
        return largest_error(x, self.decode(self.encode(x)))


@dataclasses.dataclass(frozen=True)
class Cast(FixedRate):
    """Floats kept in a narrower dtype, rounded to nearest: `size * itemsize(dtype)` bytes.

    Finite values that are too large for that dtype become its largest value, not infinite.

    Raises:
      TypeError: `dtype` is not a floating dtype, or what is encoded is not floating point.
    """

    dtype: Any = jnp.bfloat16
    decoded_by = ("dtype",)

    def __post_init__(self):
        check.dtype("dtype", self.dtype, floating=True, fix="pass jnp.bfloat16, for example")
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    def encode(self, x: Float[Array, "..."]) -> Code:
        check.array("x", x, floating=True)
        largest = float(jnp.finfo(self.dtype).max)
        if largest < float(jnp.finfo(x.dtype).max):
            narrow = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x).astype(self.dtype)
        else:
            narrow = x.astype(self.dtype)
        return self.code_of(x, narrow)

    def _decode(self, code: Code) -> Float[Array, "..."]:
        narrow, wide = jnp.finfo(self.dtype), jnp.finfo(code.dtype)
        # Where one program encodes and decodes, compilers leave both conversions out: this they do not.
        return lax.reduce_precision(code.levels.astype(code.dtype), wide.nexp, min(narrow.nmant, wide.nmant))


@dataclasses.dataclass(frozen=True)
class Exact(FixedRate):
    """Keeps arrays uncoded, where others beside them are encoded."""

    keeps_zeros = True

    def encode(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return x

    def decode(self, code: Float[Array, "..."]) -> Float[Array, "..."]:
        return code


@dataclasses.dataclass(frozen=True)
class StepErrors(Exact):
    """A codec that saves no memory: errors uniform in the steps of a codec, independent of each other and of the values, as those
    of dithered codes are. If that codec keeps zeros, nothing else becomes zero.

    Args:
      codec: a codec that tells its `steps`.
      seed: it determines the errors together with the values: different arrays get different errors.
      scale: errors are this many times as large. With 0 values are exact, with 17 errors of 8 bits are as large as those of 4.
    """

    codec: Any
    seed: Any
    scale: Any

    def __post_init__(self):
        object.__setattr__(self, "keeps_zeros", self.codec.keeps_zeros)

    def encode(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        check_floats(x)
        check_seed(self.seed)
        wide = x.astype(jnp.float32)
        steps = self.codec.steps(x) * jnp.asarray(self.scale, jnp.float32)
        checksum = jnp.sum(lax.bitcast_convert_type(wide, jnp.uint32), dtype=jnp.uint32)
        key = jax.random.fold_in(jax.random.key(self.seed), checksum)
        changed = wide + steps * jax.random.uniform(key, x.shape, minval=-0.5, maxval=0.5)
        largest = float(jnp.finfo(x.dtype).max)  # what is finite stays so, as in the codes
        changed = jnp.where(jnp.isfinite(wide), jnp.clip(changed, -largest, largest), changed).astype(x.dtype)
        return jnp.where(changed == 0, x, changed) if self.keeps_zeros else changed


@dataclasses.dataclass(frozen=True)
class Mask(FixedRate):
    """Booleans as bits, exactly: `4 * ceil(size / 32)` bytes.

    Raises:
      TypeError: what is encoded is not boolean.
    """

    def encode(self, x: Bool[Array, "..."]) -> Code:
        check.array("x", x)
        if x.dtype != jnp.bool_:
            raise TypeError(f"x must be boolean, got {x.dtype}: pass x != 0, for example")
        flat = x.reshape(-1)
        if padding := -x.size % WORD:
            flat = jnp.concatenate([flat, jnp.zeros(padding, bool)])
        return self.code_of(x, pack(flat))

    def _decode(self, code: Code) -> Bool[Array, "..."]:
        return unpack(code.levels)[: math.prod(code.shape)].reshape(code.shape)
