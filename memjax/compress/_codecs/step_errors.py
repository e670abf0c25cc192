"""Random errors in place of codes, to predict what codes do to gradients, or to check such predictions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax._core import check
from memjax._core.compat import is_tracer
from memjax.compress._codecs.bits import PLANES
from memjax.compress._codecs.codec import FixedRate, bound_of, check_bound, check_floats, check_seed
from memjax.compress._codecs.position_quantized import PositionQuantized


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepErrors(FixedRate):
    """A codec that saves no memory: what `compressed(..., bits=bits)` encodes gets errors uniform in the steps of its codes.

    Errors are independent of each other and of the values, as those of dithered codes are. So the gradient of
    `compressed(f, StepErrors(4))` is off by as much as that of `compressed(f, bits=4)`: a prediction, without codes. A `scale`
    that is an array can change without compiling again: with 0 the values are exact, with 17 errors of 8 bits are as large as
    those of 4.

    Args:
      bits: 8, 6, 5, 4 or 3.
      seed: it determines the errors together with the values: different arrays get different errors.
      scale: errors are this many times as large; a finite number of at least 0.

    Raises:
      ValueError: `bits` is none of these, or, when something is encoded, `scale` is negative or not finite.
      TypeError: what is encoded is not bfloat16, float16 or float32.
    """

    bits: int = dataclasses.field(default=8, metadata={"static": True})
    seed: Any = 0
    scale: Any = 1.0

    def __post_init__(self):
        object.__setattr__(self, "bits", check.integer("bits", self.bits))
        if self.bits not in PLANES:
            raise ValueError(f"bits must be 8, 6, 5, 4 or 3, got {self.bits!r}")

    def encode(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return ErrorsOf(PositionQuantized(self.bits), self.seed, self.scale).encode(x)

    def decode(self, code: Float[Array, "..."]) -> Float[Array, "..."]:
        return check.array("code", code)


@dataclasses.dataclass(frozen=True)
class ErrorsOf(FixedRate):
    """Errors uniform in the steps of a codec that tells its `steps`. If that codec keeps zeros, nothing else becomes zero."""

    codec: Any
    seed: Any
    scale: Any

    def __post_init__(self):
        object.__setattr__(self, "keeps_zeros", self.codec.keeps_zeros)

    def encode(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        check_floats(x)
        _check_scale(self.scale)
        wide = x.astype(jnp.float32)
        steps = self.codec.steps(x) * jnp.asarray(self.scale, jnp.float32)
        changed = wide + steps * _uniform_errors(wide, self.seed, 0.5)
        largest = float(jnp.finfo(x.dtype).max)  # what is finite stays so, as in the codes
        changed = jnp.where(jnp.isfinite(wide), jnp.clip(changed, -largest, largest), changed).astype(x.dtype)
        return jnp.where(changed == 0, x, changed) if self.keeps_zeros else changed

    def decode(self, code: Float[Array, "..."]) -> Float[Array, "..."]:
        return code


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UniformError(FixedRate):
    """A codec that saves no memory: adds to each value that is not zero an error, uniform in [-bound, bound].

    Args:
      bound: a positive number, or an array of one.
      seed: it determines the errors together with the values: different arrays get different errors.
      zeros: whether zeros get errors.

    Raises:
      ValueError: `bound` is not positive.
      TypeError: what is encoded is not floating point.
    """

    bound: Any
    seed: Any = 0
    zeros: bool = dataclasses.field(default=False, metadata={"static": True})

    def __post_init__(self):
        check_bound(self.bound)
        check.flag("zeros", self.zeros)

    def encode(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        check.array("x", x, floating=True)
        if jnp.ndim(self.bound):
            raise check.fail(ValueError, "bound", "one positive number", self.bound)
        wide = x.astype(jnp.float32)
        error = bound_of(self.bound) * _uniform_errors(wide, self.seed, 1)
        return jnp.where((wide == 0) & (not self.zeros), wide, wide + error).astype(x.dtype)

    def decode(self, code: Float[Array, "..."]) -> Float[Array, "..."]:
        return check.array("code", code)


def _uniform_errors(x: Float[Array, "..."], seed: Any, largest: float) -> Float[Array, "..."]:
    """Errors uniform in [-largest, largest] for float32 values, which determine them together with the seed."""
    check_seed(seed)
    checksum = jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint32), dtype=jnp.uint32)
    key = jax.random.fold_in(jax.random.key(seed), checksum)
    return jax.random.uniform(key, x.shape, minval=-largest, maxval=largest)


def _check_scale(scale: Any) -> None:
    """A value that a program is traced for may be anything; its type is known."""
    if not is_tracer(scale):
        check.number("scale", scale, least=0)
    elif scale.shape != () or not jnp.issubdtype(scale.dtype, jnp.number):
        raise check.fail(ValueError, "scale", "one number", scale)
