"""What a codec is, and the two simplest: narrower floats, and booleans as bits."""

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, UInt32

from memjax._core import check
from memjax._core.program.jaxpr import nbytes
from memjax.compress._codecs.bits import WORD, pack, unpack


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


_OPTIONAL = (
    "elementwise",
    "keeps_zeros",
    "decoder_to_memory",
    "nonzero",
    "scaled",
    "measured",
    "reads_once",
    "without_signs",
)


def with_optional_members(codec: Any) -> Any:
    """`codec`, with the defaults of the optional members that a user's class lacks."""
    if isinstance(codec, OptionalMembers):
        return codec
    complete = OptionalMembers()
    members = {name: getattr(codec, name, getattr(complete, name)) for name in _OPTIONAL}
    vars(complete).update(members, encode=codec.encode, decode=codec.decode)
    return complete


DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
"""The dtypes that are encoded."""

_BOUND = "a positive finite number, or an array of one for each channel"


def check_floats(x: Any) -> None:
    """Check that `x` is an array of a dtype that quantisers take."""
    check.array("x", x)
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be bfloat16, float16 or float32, got {x.dtype}: convert it, or leave it as it is")


def check_code(codec: Any, code: Any, kind: type, *settings: str) -> None:
    """Check that `code` is one that `codec` makes: of this kind, or of parts of it, and with the same `settings`."""
    own, name = getattr(code, "parts", code), type(codec).__name__
    if not isinstance(own, kind):
        raise check.fail(TypeError, "code", f"what {name}.encode returns", code)
    made, wanted = ({setting: getattr(one, setting) for setting in settings} for one in (own, codec))
    if made != wanted:
        shown = [", ".join(f"{setting}={value}" for setting, value in some.items()) for some in (wanted, made)]
        raise ValueError(
            f"code must be one that {name}({shown[0]}) made, got one of {name}({shown[1]}): decode it with the codec that made it"
        )


def check_bound(bound: Any) -> None:
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


def bound_of(bound: Any) -> Array:
    """The bound as an array, when something is encoded with it."""
    is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
    if not is_number and not isinstance(bound, jax.Array | np.ndarray | np.generic):
        raise check.fail(TypeError, "bound", _BOUND, bound)
    return jnp.asarray(bound, jnp.float32)


def check_seed(seed: Any) -> None:
    """Check that a random key can be made from `seed`."""
    is_array = isinstance(seed, jax.Array | np.ndarray)
    if not (is_array and seed.shape == () and jnp.issubdtype(seed.dtype, jnp.integer)):
        whole = check.integer("seed", seed)
        if not -(2**63) <= whole < 2**63:
            raise check.fail(ValueError, "seed", "an integer of at most 64 bits", seed)


def largest_error(x: Array, decoded: Array) -> Float[Array, ""]:
    """The largest difference where both are finite, infinite where only `x` is, as float32."""
    wide = jnp.float32 if x.dtype.itemsize < 8 else x.dtype
    x, decoded = x.astype(wide), decoded.astype(wide)
    difference = jnp.where(jnp.isfinite(decoded), jnp.abs(x - decoded), jnp.inf)
    return jnp.max(jnp.where(jnp.isfinite(x), difference, 0), initial=0).astype(jnp.float32)


def tree_nbytes(tree: Any) -> int:
    """Bytes of the arrays, or array types, of a pytree."""
    return sum(map(nbytes, jax.tree.leaves(tree)))


class FixedRate(OptionalMembers):
    """`nbytes`, `ratio` and `error` of an elementwise codec whose codes of all values are equally large."""

    elementwise = True

    def nbytes(self, aval: Any) -> int:
        if not (hasattr(aval, "shape") and hasattr(aval, "dtype")):
            raise check.fail(TypeError, "aval", "an array or the type of one", aval, "pass jax.typeof(x)")
        return tree_nbytes(jax.eval_shape(self.encode, aval))  # type: ignore[attr-defined]

    def ratio(self, x: Array) -> Float[Array, ""]:
        check.array("x", x)
        return jnp.float32(x.size * x.dtype.itemsize / max(self.nbytes(jax.typeof(x)), 1))

    def error(self, x: Array) -> Float[Array, ""]:
        return largest_error(x, self.decode(self.encode(x)))  # type: ignore[attr-defined]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CastCode:
    """What `Cast` keeps."""

    values: Float[Array, "..."]
    dtype: np.dtype = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Cast(FixedRate):
    """Floats kept in a narrower dtype, rounded to nearest: `size * itemsize(dtype)` bytes.

    What is finite and too large for that dtype becomes its largest value, not infinite.

    Raises:
      TypeError: `dtype` is not a floating dtype, or what is encoded is not floating point.
    """

    dtype: Any = jnp.bfloat16

    def __post_init__(self):
        check.dtype("dtype", self.dtype, floating=True, fix="pass jnp.bfloat16, for example")

    def encode(self, x: Float[Array, "..."]) -> CastCode:
        check.array("x", x, floating=True)
        largest = float(jnp.finfo(self.dtype).max)
        if largest < float(jnp.finfo(x.dtype).max):
            x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
        return CastCode(x.astype(self.dtype), np.dtype(x.dtype))

    def decode(self, code: CastCode) -> Float[Array, "..."]:
        check_code(self, code, CastCode)
        if code.values.dtype != self.dtype:
            wanted = f"one that Cast({jnp.dtype(self.dtype)}) made"
            raise check.fail(ValueError, "code", wanted, code.values, "decode it with the codec that made it")
        narrow, wide = jnp.finfo(self.dtype), jnp.finfo(code.dtype)
        # Where one program encodes and decodes, compilers leave both conversions out: this they do not.
        return lax.reduce_precision(code.values.astype(code.dtype), wide.nexp, min(narrow.nmant, wide.nmant))


@dataclasses.dataclass(frozen=True)
class Exact(FixedRate):
    """Arrays as they are, where others beside them are encoded."""

    keeps_zeros = True

    def encode(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return x

    def decode(self, code: Float[Array, "..."]) -> Float[Array, "..."]:
        return code


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskCode:
    """What `Mask` keeps."""

    words: UInt32[Array, " words"]
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Mask(FixedRate):
    """Booleans as bits, exactly: `4 * ceil(size / 32)` bytes.

    Raises:
      TypeError: what is encoded is not boolean.
    """

    def encode(self, x: Bool[Array, "..."]) -> MaskCode:
        check.array("x", x)
        if x.dtype != jnp.bool_:
            raise TypeError(f"x must be boolean, got {x.dtype}: pass x != 0, for example")
        flat = x.reshape(-1)
        if padding := -x.size % WORD:
            flat = jnp.concatenate([flat, jnp.zeros(padding, bool)])
        return MaskCode(pack(flat), x.shape)

    def decode(self, code: MaskCode) -> Bool[Array, "..."]:
        check_code(self, code, MaskCode)
        return unpack(code.words)[: math.prod(code.shape)].reshape(code.shape)
