"""`stochastic_round`: bfloat16 weights without masters, with updates that are right on average."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt16, UInt32

from memjax._core import check
from memjax.compress._codecs.bits import u32
from memjax.compress._state import noise
from memjax.compress._state.bfloat16 import check_weights, is_split, update_between, wide_gradients
from memjax.compress._state.operations import random_bits
from memjax.compress._state.regions import by_kernels
from memjax.compress._state.transformation import check_transformation, like


class StochasticRoundState(NamedTuple):
    """State of `stochastic_round`.

    Attributes:
      step: updates so far; with a weight's place it chooses how that is rounded.
      inner: state of the wrapped transformation.
    """

    step: Int32[Array, ""]
    inner: Any


def stochastic_round(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Training of bfloat16 weights without float32 masters, each updated weight rounded at random to one of its neighbours.

    Rounded to the nearest, updates of less than 2^-9 of a weight are lost. At random, with the probabilities of the distances,
    none is lost on average. The error of a step is at most the distance of neighbours, 2^-7 of the weight, and its mean is zero.
    Which way a weight goes follows from its place in the array, the array's among the weights, and the count of steps: a run
    can be repeated, on any mesh under `jit`. Inside `jax.shard_map` a place is one in the part that a device has.

    `tx` sees weights and gradients in float32. Apply updates with `optax.apply_updates`, as for `split_master`: last in a chain.
    Weights that are not bfloat16 are updated as by `tx`.

    Memory: 2 bytes for each weight, and the state of `tx`.

    Args:
      tx: any optimizer.

    Raises:
      TypeError: `tx` is no gradient transformation; at `init`, a weight is float16.
      ValueError: at `init`, no weight is bfloat16; at `update`, `params` is missing.
    """
    check_transformation("tx", tx)
    extra = optax.with_extra_args_support(tx)
    wide = lambda p: p.astype(jnp.float32) if is_split(p) else p

    def init(params: Any) -> StochasticRoundState:
        check_weights(params)
        return StochasticRoundState(jnp.zeros((), jnp.int32), tx.init(jax.tree.map(wide, params)))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, StochasticRoundState]:
        if params is None:
            raise ValueError("params must be given to the update of memjax.compress.stochastic_round: it rounds them.")
        if not isinstance(state, StochasticRoundState):
            raise check.fail(TypeError, "state", "a StochasticRoundState", state, "pass what init returned")
        (new, state), *_ = compute((params, state), updates, extra_args)
        return jax.tree.map(lambda p, w: update_between(p, w) if is_split(p) else w, params, new), state

    @by_kernels
    def compute(old: Any, updates: Any, extra_args: Any) -> tuple[Any, ...]:
        """The bits of the new weights, or where weights are not bfloat16 the updates, and the new state."""
        params, state = old
        weights = jax.tree.map(wide, params)
        changes, inner = extra.update(wide_gradients(params, updates), state.inner, weights, **extra_args)
        new, step = optax.apply_updates(weights, changes), optax.safe_increment(state.step)
        tree: Any
        leaves, tree = jax.tree.flatten(params)
        parts = zip(leaves, tree.flatten_up_to(new), tree.flatten_up_to(changes), strict=True)
        rounded = [
            _rounded(w, random_bits(w.shape, noise.seed(step, salt), noise.WEIGHT)) if is_split(p) else u
            for salt, (p, w, u) in enumerate(parts)
        ]
        return ((tree.unflatten(rounded), StochasticRoundState(step, inner)),)

    return like(tx, init, update)


def _rounded(x: Float32[Array, "..."], random: UInt32[Array, "..."]) -> UInt16[Array, "..."]:
    """The bits of a bfloat16 neighbour. NaNs stay NaN: of those that arithmetic makes, the upper bits are set."""
    whole = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = jnp.minimum(whole & u32(0x7FFFFFFF), u32(0x7FC00000))  # of a NaN: nothing may be carried into its sign
    up = (magnitude + (random >> u32(16))) | (whole & u32(0x80000000))
    return (up >> u32(16)).astype(jnp.uint16)
