"""Which rule holds for which primitive: what it does to the dimension that holds positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memjax._core.compat import primitive_name
from memjax._core.positions import bodies, derivatives, dimensions, indexing, layout, products, shared_values, sums
from memjax._core.positions.walk import UNKNOWN, Rule, Seen, Shared, State, Summed, Walk, one_place, reason
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


def walk(jaxpr: Any, states: Sequence[State], length: int, may_sum: bool, seen: Seen | None = None) -> list[State]:
    """The states of a program's outputs, the program being traced for `length` positions.

    Args:
      jaxpr: without constants that hold positions.
      states: of its inputs.
      length: at least 2.
      may_sum: whether sums over positions are of use.
      seen: what has to be compared with a walk for another length is added to this.

    Raises Mixed.
    """
    return Walk(length, may_sum, apply_rule, seen).program(jaxpr, states)


def apply_rule(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    """The states of an equation's outputs. Raises Mixed."""
    name = primitive_name(eqn)
    if all(isinstance(state, Shared) for state in states):
        is_of_any_size = name in _OF_ANY_SIZE or (
            name in _CUTS and isinstance(states[0], Shared) and not any(states[0].uneven)
        )
        if not is_of_any_size:
            walk.seen.made.append(eqn)
        return _FOR_SHARED.get(name, shared_values.uneven_everywhere)(walk, eqn, states)
    if any(isinstance(state, Summed) for state in states):
        return _FOR_SUMS.get(name, sums.refused)(walk, eqn, states)
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
    "iota": shared_values.iota,
    "broadcast_in_dim": shared_values.broadcast,
    "transpose": shared_values.transpose,
    **dict.fromkeys(_CUTS, shared_values.cut),
    "dynamic_update_slice": shared_values.written,
    "pad": shared_values.pad,
    "concatenate": shared_values.concatenate,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min"), shared_values.reduce),
    **dict.fromkeys(SCATTERS, shared_values.scatter),
    "gather": shared_values.gather,
    **dict.fromkeys(_RESHAPES, shared_values.reshape),
    **dict.fromkeys(ELEMENTWISE, shared_values.elementwise),
    **dict.fromkeys(_UNCHANGED, _unchanged),
    **dict.fromkeys(_PLAIN_CALLS, bodies.call),
}

_FOR_SUMS: dict[str, Rule] = {
    **dict.fromkeys((*_RESHAPES, "broadcast_in_dim", "transpose", "reduce_sum", "rev", "slice"), sums.moved),
    "concatenate": sums.concatenate,
    "dot_general": sums.product,
    **dict.fromkeys(_CALLS, bodies.call),
    **dict.fromkeys(_UNCHANGED, _unchanged),
    **dict.fromkeys(ELEMENTWISE, sums.elementwise),
}

_FOR_POSITIONS: dict[str, Rule] = {
    "broadcast_in_dim": layout.broadcast,
    **dict.fromkeys(_RESHAPES, layout.reshape),
    "transpose": layout.transpose,
    "bitcast_convert_type": layout.bitcast,
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
    **dict.fromkeys(("slice", "dynamic_slice"), indexing.slice_),
    "dynamic_update_slice": indexing.update_slice,
    "gather": indexing.gather,
    **dict.fromkeys(SCATTERS | {"scatter-mul", "scatter-min", "scatter-max"}, indexing.scatter),
    "dot_general": products.dot,
    "conv_general_dilated": products.convolution,
    "custom_linear_solve": bodies.linear_solve,
    "scan": bodies.scan,
    "while": bodies.while_,
    "cond": bodies.cond,
    **dict.fromkeys(("pmax", "pmin", "ppermute", *_OF_KEYS), _unchanged),
    **dict.fromkeys(_CALLS, bodies.call),
    **dict.fromkeys((*CUSTOM_CALLS, *TRACED_CUSTOM_CALLS), derivatives.custom_call),
    **dict.fromkeys(_UNCHANGED, _unchanged),
    **dict.fromkeys(ELEMENTWISE, _elementwise),
}
