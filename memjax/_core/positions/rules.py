"""Which rule holds for which primitive: what it does to the dimension that holds positions."""

from __future__ import annotations

from typing import Any

from memjax._core.compat import primitive_name
from memjax._core.positions import bodies, dimensions
from memjax._core.positions import without_positions as without
from memjax._core.positions.walk import UNKNOWN, Rule, Shared, State, Summed, Walk, Zeros, is_zero, one_place, reason
from memjax._core.program.primitives import (
    ALIASES,
    CALLS_OF_ONE_BODY,
    CUSTOM_CALLS,
    DECOMPOSITIONS,
    ELEMENTWISE,
    REDUCTIONS,
    SCATTERS,
    TRACED_CUSTOM_CALLS,
)


def apply_rule(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """The states of an equation's outputs. Raises Mixed."""
    name = primitive_name(eqn)
    if all(isinstance(state, Shared) for state in states):
        if name not in _OF_ANY_SIZE and not (name in _CUTS and not any(states[0].uneven)):
            walk.seen.made.append(eqn)
        outs = _FOR_SHARED.get(name, without.uneven_everywhere)(walk, eqn, states)
        stays_zero = name in without.ZEROS_STAY and is_zero(eqn.invars[0], states[0])
        return [Zeros(state.uneven) if isinstance(state, Shared) else state for state in outs] if stays_zero else outs
    if any(isinstance(state, Summed) for state in states):
        return _FOR_SUMS.get(name, without.sum_refused)(walk, eqn, states)
    if name not in _FOR_POSITIONS:
        raise reason(eqn, UNKNOWN)
    return _FOR_POSITIONS[name](walk, eqn, states)


def _unchanged(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    return list(states)


def _elementwise(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    return [one_place(eqn, states)] * len(eqn.outvars)


_RESHAPES = ("reshape", "squeeze", "expand_dims")
_PLAIN_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call")
_CALLS = CALLS_OF_ONE_BODY | CUSTOM_CALLS.keys() | TRACED_CUSTOM_CALLS
_UNCHANGED = ALIASES.difference(_RESHAPES) | {"sharding_constraint", "psum", "psum_invariant"}
# Keys, one for each position: dimensions are added or removed behind the positions.
_OF_KEYS = ("random_bits", "random_split", "random_wrap", "random_unwrap", "random_seed")

_CUTS = ("slice", "dynamic_slice", "rev")  # of what is even they are the same, however long it is

# Each element of the result comes from one of each operand, however many there are.
_OF_ANY_SIZE = ELEMENTWISE.union(_RESHAPES, _UNCHANGED, _PLAIN_CALLS, ("iota", "broadcast_in_dim", "transpose"))

_FOR_SHARED: dict[str, Rule] = {
    "iota": without.iota,
    "broadcast_in_dim": without.broadcast,
    "transpose": without.transpose,
    **dict.fromkeys(_CUTS, without.cut),
    "dynamic_update_slice": without.written,
    "pad": without.pad,
    "concatenate": without.concatenate,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min"), without.reduce),
    **dict.fromkeys(SCATTERS, without.scatter),
    "gather": without.gather,
    "dot_general": without.product,
    **dict.fromkeys(_RESHAPES, without.reshape),
    **dict.fromkeys(ELEMENTWISE, without.elementwise),
    **dict.fromkeys(_UNCHANGED, _unchanged),
    **dict.fromkeys(_PLAIN_CALLS, bodies.call),
}

_FOR_SUMS: dict[str, Rule] = {
    **dict.fromkeys((*_RESHAPES, "broadcast_in_dim", "transpose", "reduce_sum", "rev", "slice"), without.sum_moved),
    "concatenate": without.sum_concatenate,
    "pad": without.sum_padded,
    "dot_general": without.sum_product,
    **dict.fromkeys(_CALLS, bodies.call),
    **dict.fromkeys(_UNCHANGED, _unchanged),
    **dict.fromkeys(ELEMENTWISE, without.sum_elementwise),
}

_FOR_POSITIONS: dict[str, Rule] = {
    "broadcast_in_dim": dimensions.broadcast,
    **dict.fromkeys(_RESHAPES, dimensions.reshape),
    "transpose": dimensions.transpose,
    "bitcast_convert_type": dimensions.bitcast,
    **dict.fromkeys(REDUCTIONS, dimensions.reduce),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), dimensions.along("axis")),
    "split": dimensions.along("axis"),
    **dict.fromkeys(("concatenate", "sort"), dimensions.along("dimension")),
    "rev": dimensions.along("dimensions"),
    "top_k": dimensions.top_k,
    "reduce": dimensions.reduce_by_function,
    "stack": dimensions.stack,
    "unstack": dimensions.unstack,
    "fft": dimensions.fft,
    **dict.fromkeys(DECOMPOSITIONS, dimensions.last(2)),
    "pad": dimensions.pad,
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), dimensions.windows
    ),
    **dict.fromkeys(("slice", "dynamic_slice"), dimensions.slice_),
    "dynamic_update_slice": dimensions.update_slice,
    "gather": dimensions.gather,
    **dict.fromkeys(SCATTERS | {"scatter-mul", "scatter-min", "scatter-max"}, dimensions.scatter),
    "dot_general": dimensions.dot,
    "conv_general_dilated": dimensions.convolution,
    "custom_linear_solve": bodies.linear_solve,
    "scan": bodies.scan,
    "while": bodies.while_,
    "cond": bodies.cond,
    **dict.fromkeys(("pmax", "pmin", "ppermute"), _unchanged),
    **dict.fromkeys(_OF_KEYS, dimensions.of_keys),
    **dict.fromkeys(_CALLS, bodies.call),
    **dict.fromkeys((*CUSTOM_CALLS, *TRACED_CUSTOM_CALLS), bodies.custom_call),
    **dict.fromkeys(_UNCHANGED, _unchanged),
    **dict.fromkeys(ELEMENTWISE, _elementwise),
}
