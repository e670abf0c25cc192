"""Rules for operations along some dimensions, which leave the others alone."""

from __future__ import annotations

from typing import Any

from memjax._core.compat import primitive_name
from memjax._core.positions.walk import ALONG, Positions, Rule, Shared, State, Summed, Walk, one_place, reason, shape_of


def reduce(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    state, axes = states[0], eqn.params["axes"]
    assert isinstance(state, Positions)
    if state.dim not in axes:
        return [Positions(state.dim - sum(axis < state.dim for axis in axes), state.inner)]
    if primitive_name(eqn) != "reduce_sum" or not walk.may_sum:
        raise reason(eqn, "is over positions")
    return [Summed()]


def along(parameter: str) -> Rule:
    """The rule for operations along the dimensions that a parameter names."""

    def rule(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
        dims = eqn.params[parameter]
        place = one_place(eqn, states)
        if place.dim in (dims if isinstance(dims, tuple | list) else (dims,)):
            raise reason(eqn, ALONG)
        return [place] * len(eqn.outvars)

    return rule


def last(count: int) -> Rule:
    """The rule for operations along the last dimensions."""

    def rule(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
        place = one_place(eqn, states)
        if place.dim >= len(shape_of(eqn.invars[0])) - count:
            raise reason(eqn, ALONG)
        return [place] * len(eqn.outvars)

    return rule


def top_k(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    return (along("axis") if "axis" in eqn.params else last(1))(walk, eqn, states)


def fft(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    return last(len(eqn.params["fft_lengths"]))(walk, eqn, states)


def pad(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    state = states[0]
    if not isinstance(state, Positions) or tuple(eqn.params["padding_config"][state.dim]) != (0, 0, 0):
        raise reason(eqn, ALONG)
    return [state]


def windows(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    place = one_place(eqn, [state for state in states if not (isinstance(state, Shared) and not state.uneven)])
    if eqn.params["window_dimensions"][place.dim] != 1 or eqn.params["window_strides"][place.dim] != 1:
        raise reason(eqn, "is over neighbouring positions")
    return [place] * len(eqn.outvars)


def reduce_by_function(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    """`lax.reduce`: half of the operands are where it starts."""
    place, dims = one_place(eqn, states[: len(states) // 2]), eqn.params["dimensions"]
    if place.dim in dims or not all(isinstance(state, Shared) for state in states[len(states) // 2 :]):
        raise reason(eqn, "is over positions")
    return [Positions(place.dim - sum(dim < place.dim for dim in dims), place.inner)] * len(eqn.outvars)


def unstack(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    place, axis = one_place(eqn, states), eqn.params["axis"]
    if place.dim == axis:
        raise reason(eqn, ALONG)
    return [Positions(place.dim - (axis < place.dim), place.inner)] * len(eqn.outvars)


def stack(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    place = one_place(eqn, states)
    return [Positions(place.dim + (eqn.params["axis"] <= place.dim), place.inner)]
