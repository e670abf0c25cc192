"""Rules for sums over positions. Each tile applies to its part what is applied to the sum, which must be linear."""

from __future__ import annotations

from typing import Any

from memjax._core.compat import primitive_name
from memjax._core.positions.walk import Positions, State, Summed, Walk, reason

_LINEAR = {"add", "sub", "add_any", "neg", "mul", "div", "convert_element_type", "copy", "reduce_precision"}


def refused(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    raise reason(eqn, "uses a sum over positions")


def moved(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    return [Summed()]


def concatenate(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    return [Summed()] if all(_summed(states)) else refused(walk, eqn, states)


def product(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    return [Summed()] if sum(_summed(states)) == 1 and not _has_positions(states) else refused(walk, eqn, states)


def elementwise(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    name, summed = primitive_name(eqn), _summed(states)
    if name not in _LINEAR or _has_positions(states) or (name == "div" and summed[1]):
        return refused(walk, eqn, states)
    # A derivative rule adds its sums to zeros.
    if name in ("add", "sub", "add_any") and not all(summed) and not walk.is_backward:
        raise reason(eqn, "adds to a sum over positions what every tile would add again")
    if name == "mul" and all(summed):
        raise reason(eqn, "multiplies sums over positions")
    return [Summed()] * len(eqn.outvars)


def _summed(states: list[State]) -> list[bool]:
    return [isinstance(state, Summed) for state in states]


def _has_positions(states: list[State]) -> bool:
    return any(isinstance(state, Positions) for state in states)
