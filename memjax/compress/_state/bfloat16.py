"""bfloat16 weights under an optimizer that computes in float32, and updates of them that are exact."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float32, UInt16

from memjax._core import check

_FIX = "put memjax's transformation last in a chain: what it returns is the change of weights, not a gradient"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BitsUpdate:
    """The change of a bfloat16 array, as the difference of the bits as integers.

    No number can do this. `optax.apply_updates` computes `p + u`, rounded to bfloat16, and where the new weight is much
    smaller than the old one no u, bfloat16 or float32, gives exactly it: from p = 1 to 1.01 * 2^-30, p + u is a multiple of
    2^-24. So u is an object that Python asks for the sum, after the array has declined.

    What other transformations do to gradients makes no sense here. Scaled or clipped, `difference` becomes a float: a
    TypeError when it is added. What keeps its dtype, as a schedule of step sizes does, is done to `weight`, too: weights are
    NaN unless that is 1, or 0 for an update that has been masked: `optax.MultiSteps` makes zeros of updates.

    Attributes:
      difference: to be added to the bits, modulo 2^16.
      weight: 1.
    """

    difference: UInt16[Array, "..."]
    weight: Float32[Array, ""]

    __array_ufunc__ = None  # NumPy's arrays decline, too

    def __radd__(self, old: Any) -> BFloat16[Array, "..."]:
        if self.difference.dtype != jnp.uint16:
            raise TypeError(
                f"updates of bfloat16 weights must be added as they are, got {self.difference.dtype}: {_FIX}"
            )
        if jnp.result_type(old) != jnp.bfloat16:
            raise TypeError(f"updates of bfloat16 weights must be added to these, got {jnp.result_type(old)} weights")
        new = lax.bitcast_convert_type(bits(jnp.asarray(old)) + self.difference, jnp.bfloat16)
        is_whole = (self.weight == 1) | (self.weight == 0)
        return jnp.where(is_whole, new, jnp.bfloat16(jnp.nan))

    __add__ = __radd__


def update_between(old: BFloat16[Array, "..."], new: UInt16[Array, "..."]) -> BitsUpdate:
    """The update from `old` to the array with the bits `new`."""
    return BitsUpdate(new - bits(old), jnp.ones((), jnp.float32))


def bits(x: BFloat16[Array, "..."]) -> UInt16[Array, "..."]:
    return lax.bitcast_convert_type(x, jnp.uint16)


def is_split(weight: Any) -> bool:
    return jnp.result_type(weight) == jnp.bfloat16


def check_weights(params: Any) -> None:
    """At least one bfloat16 weight, and none of float16, for which nothing is done."""
    floats = [p for p in jax.tree.leaves(params) if jnp.issubdtype(jnp.result_type(p), jnp.floating)]
    for p in floats:
        if jnp.result_type(p) == jnp.float16:
            raise check.fail(TypeError, "params", "bfloat16 or float32 weights", p, "cast them to jnp.bfloat16")
    if floats and not any(map(is_split, floats)):
        wanted = "weights of which some are bfloat16"
        raise check.fail(ValueError, "params", wanted, floats[0], "cast them, or leave this transformation out")


def wide_gradients(params: Any, updates: Any) -> Any:
    """Gradients of bfloat16 weights in float32."""
    return jax.tree.map(lambda p, g: g.astype(jnp.float32) if is_split(p) else g, params, updates)
