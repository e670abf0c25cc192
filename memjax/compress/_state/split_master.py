"""`split_master`: the training of float32 weights with bfloat16 weights in the model and the rest of their bits in the state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, BFloat16, Float32, UInt16

from memjax._core import check
from memjax._core.barriers import barrier
from memjax.compress._state.bfloat16 import bits, check_weights, is_split, update_between, wide_gradients
from memjax.compress._state.regions import by_kernels
from memjax.compress._state.transformation import check_transformation, like

_NAN = 0x7FC00000


class SplitMasterState(NamedTuple):
    """State of `split_master`. It consists of arrays and can be saved like any other.

    Attributes:
      low: for each bfloat16 weight the low bits of its float32 master, uint16 of its shape.
      inner: state of the wrapped transformation.
    """

    low: Any
    inner: Any


def split_master(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Training of float32 weights, bit for bit, whose upper halves are the bfloat16 weights of the model.

    Usual mixed precision has a bfloat16 weight and its float32 master, 6 bytes. Here they share their bits: the weight is in the
    model, the low 16 bits of the master are in the state, 4 bytes, and `tx` sees float32 weights and float32 gradients.

    The weight is the master rounded to the nearest bfloat16, and the low half a signed distance from it, so that

        bits of the master = (bits of the weight) 2^16 + low,   -2^15 <= low < 2^15

    Truncation would be as exact, but has twice the error and makes every weight smaller. A tie is rounded away from zero, the one
    difference from `master.astype(jnp.bfloat16)`: ties to even are not invertible, since 65537 masters round to an even weight.
    NaNs of all kinds become one. Weights that are not bfloat16 are updated as by `tx`.

    Apply updates with `optax.apply_updates`, alone or in `nnx.Optimizer` or Flax's `TrainState`. They are not numbers but
    differences of bits, and have to reach it unchanged: `split_master` comes last in a chain. What multiplies or clips them
    afterwards raises, or makes weights NaN. Where something else changes the weights, the low halves stay.

    Memory: 2 bytes for each weight beside the state of `tx`, whose moments are float32 (or `memjax.compressed`).

    Args:
      tx: any optimizer. `memjax.compressed` may be in it or around this.

    Raises:
      TypeError: `tx` is no gradient transformation; at `init`, a weight is float16.
      ValueError: at `init`, no weight is bfloat16; at `update`, `params` is missing.
    """
    check_transformation("tx", tx)
    extra = optax.with_extra_args_support(tx)

    def init(params: Any) -> SplitMasterState:
        check_weights(params)
        zeros = lambda p: jnp.zeros_like(p, jnp.uint16) if is_split(p) else optax.MaskedNode()
        wide = lambda p: p.astype(jnp.float32) if is_split(p) else p
        return SplitMasterState(jax.tree.map(zeros, params), tx.init(jax.tree.map(wide, params)))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, SplitMasterState]:
        if params is None:
            raise ValueError(
                "params must be given to the update of memjax.compress.split_master: they are half of the masters."
            )
        if not isinstance(state, SplitMasterState):
            raise check.fail(TypeError, "state", "a SplitMasterState", state, "pass what init returned")
        (new, state), *_ = compute((params, state), updates, extra_args)
        return jax.tree.map(lambda p, w: update_between(p, w) if is_split(p) else w, params, new), state

    @by_kernels
    def compute(old: Any, updates: Any, extra_args: Any) -> tuple[Any, ...]:
        """The bits of the new weights, or where weights are not bfloat16 the updates, and the new state."""
        params, state = old
        masters = jax.tree.map(_joined, params, state.low)
        changes, inner = extra.update(wide_gradients(params, updates), state.inner, masters, **extra_args)
        masters = optax.apply_updates(masters, changes)
        # Computed once for both halves: two kernels may round a sum of products otherwise, and halves of two masters are none.
        pairs = jax.tree.map(lambda p, m: _halves(barrier(m)) if is_split(p) else None, params, masters)
        high = jax.tree.map(lambda p, u, pair: pair[0] if is_split(p) else u, params, changes, pairs)
        low = jax.tree.map(lambda p, pair: pair[1] if is_split(p) else optax.MaskedNode(), params, pairs)
        return ((high, SplitMasterState(low, inner)),)

    return like(tx, init, update)


def join_master(params: Any, state: Any) -> Any:
    """The float32 masters of weights under `split_master`; other weights as they are.

    To evaluate, to save for others, or to go on without `split_master`.

    Args:
      params: the weights of the model.
      state: the state of an optimizer with `split_master` somewhere in it.

    Raises:
      ValueError: `state` has no state of `split_master`, or several.
    """
    return jax.tree.map(_joined, params, _found(state).low)


def set_master(master: Any, state: Any) -> tuple[Any, Any]:
    """Weights of the model, and the state, for these float32 masters: to begin from float32 weights.

    Args:
      master: float32 weights, as a checkpoint has them.
      state: the state that `init` returned for weights of the model, as `jax.tree.map(lambda p: p.astype(jnp.bfloat16), master)`.

    Returns:
      The bfloat16 weights where `init` saw such, the others as they are; and `state` with the low halves of `master`.

    Raises:
      ValueError: `state` has no state of `split_master`, or several.
      TypeError: a master is not float32.
    """
    old = _found(state)
    is_pair = lambda node: isinstance(node, _Pair)

    def split(m: Any, low: Any) -> _Pair:
        if isinstance(low, optax.MaskedNode):
            return _Pair(m, low)
        if jnp.result_type(m) != jnp.float32:
            raise check.fail(TypeError, "master", "float32 weights", m)
        high, low = _halves(jnp.asarray(m))
        return _Pair(lax.bitcast_convert_type(high, jnp.bfloat16), low)

    pairs = jax.tree.map(split, master, old.low)
    part = lambda i: jax.tree.map(lambda pair: pair[i], pairs, is_leaf=is_pair)
    return part(0), _map_found(state, lambda _: old._replace(low=part(1)))


class _Pair(NamedTuple):
    weight: Any
    low: Any


def _joined(weight: BFloat16[Array, "..."], low: UInt16[Array, "..."]) -> Float32[Array, "..."]:
    """The master: see `split_master`. A weight without a low half is its own."""
    if isinstance(low, optax.MaskedNode):
        return weight
    signed = lax.bitcast_convert_type(low, jnp.int16).astype(jnp.int32)
    high = bits(jnp.asarray(weight)).astype(jnp.uint32) << jnp.uint32(16)
    return lax.bitcast_convert_type(high + lax.bitcast_convert_type(signed, jnp.uint32), jnp.float32)


def _halves(master: Float32[Array, "..."]) -> tuple[UInt16[Array, "..."], UInt16[Array, "..."]]:
    """The bits of the weight, and the low half: the inverse of `_joined`."""
    whole = lax.bitcast_convert_type(master, jnp.uint32)
    whole = jnp.where(jnp.isnan(master), jnp.uint32(_NAN), whole)  # others may round to infinity or to -0
    high = (whole + jnp.uint32(0x8000)) >> jnp.uint32(16)
    return high.astype(jnp.uint16), (whole & jnp.uint32(0xFFFF)).astype(jnp.uint16)


def _found(state: Any) -> SplitMasterState:
    """The one state of `split_master` in the state of an optimizer."""
    found: list[SplitMasterState] = []
    _map_found(state, lambda one: found.append(one))
    if len(found) != 1:
        raise ValueError(f"state must have one state of memjax.compress.split_master in it, got {len(found)}")
    return found[0]


def _map_found(state: Any, f: Any) -> Any:
    is_one = lambda node: isinstance(node, SplitMasterState)
    return jax.tree.map(lambda node: f(node) if is_one(node) else node, state, is_leaf=is_one)
