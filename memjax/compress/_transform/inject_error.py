"""`inject_error`: random errors in saved arrays, to check predictions of the errors of gradients."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax._core import check
from memjax.compress._codecs.codec import FixedRate, bound_of, check_bound
from memjax.compress._codecs.step_errors import uniform_errors
from memjax.compress._transform.compressed import compressed

F = TypeVar("F")


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
        error = bound_of(self.bound) * uniform_errors(wide, self.seed, 1)
        return jnp.where((wide == 0) & (not self.zeros), wide, wide + error).astype(x.dtype)

    def decode(self, code: Float[Array, "..."]) -> Float[Array, "..."]:
        return check.array("code", code)


def inject_error(
    f_or_module: F,
    bound: float | Float[Array, ""],
    *,
    seed: Any = 0,
    zeros: bool = False,
    where: str | Callable[[str, Any], bool] | None = "conv",
    inputs: bool = False,
) -> F:
    """`compressed` with random errors in place of a codec's: uniform in [-bound, bound], and none for zeros.

    This is the model of errors of Jin et al. 2020, section 3. With it the errors of gradients are normally distributed, with the
    standard deviation that `predicted_sigma` gives. No memory is saved.

    Args:
      f_or_module, where, inputs: see `compressed`; by default errors go to what convolutions read.
      bound: the largest error; a positive number.
      seed: an integer, which may be traced. Another seed gives other errors.
      zeros: whether zeros get errors, as in the paper's figure 6a.

    Raises:
      ValueError, TypeError: those of `compressed`; `bound` is not positive.
    """
    return compressed(f_or_module, UniformError(bound, seed, zeros), where=where, inputs=inputs)
