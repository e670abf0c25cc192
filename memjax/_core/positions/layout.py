"""Rules for operations that lay values out in another shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from memjax._core.positions.walk import Positions, State, Walk, reason, shape_of


def broadcast(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    state = states[0]
    assert isinstance(state, Positions)
    dim = eqn.params["broadcast_dimensions"][state.dim]
    if shape_of(eqn.invars[0])[state.dim] != shape_of(eqn.outvars[0])[dim]:
        raise reason(eqn, "repeats a position")
    return [Positions(int(dim), state.inner)]


def reshape(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    state, old, new = states[0], shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    assert isinstance(state, Positions)
    place = _regrouped(state, walk.length, old, new)
    if place is None:
        raise reason(eqn, f"from {old} to {new} splits the positions")
    return [place]


def _regrouped(state: Positions, length: int, old: Sequence[int], new: Sequence[int]) -> Positions | None:
    """The state after a reshape; None if it splits the positions, or puts them into two dimensions."""
    after = math.prod(old[state.dim + 1 :]) * state.inner
    stride = math.prod(new)
    for dim, size in enumerate(new):
        stride //= max(size, 1)
        if stride <= after and after * length <= stride * size:
            return Positions(dim, after // stride) if after % stride == 0 else None
    return None


def transpose(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    assert isinstance(states[0], Positions)
    return [Positions(list(eqn.params["permutation"]).index(states[0].dim), states[0].inner)]


def bitcast(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    state, old, new = states[0], shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    assert isinstance(state, Positions)
    if state.dim >= min(len(old), len(new)) or old[: state.dim + 1] != new[: state.dim + 1]:
        raise reason(eqn, "splits the positions")
    return [state]
