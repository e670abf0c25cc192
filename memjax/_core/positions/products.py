"""Rules for matrix products and convolutions."""

from __future__ import annotations

from typing import Any

from memjax._core.positions.walk import (
    COMBINES,
    TABLE,
    Positions,
    Shared,
    State,
    Summed,
    Walk,
    reason,
    shape_of,
)


def dot(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    contracted, batch = eqn.params["dimension_numbers"]
    free = [
        [dim for dim in range(len(shape_of(atom))) if dim not in (*contracted[side], *batch[side])]
        for side, atom in enumerate(eqn.invars)
    ]

    def role(side: int, dim: int) -> tuple[str, int]:
        """What the product does with a dimension of an operand: the kind, and its number among those or in the result."""
        for kind, dims in (("contracted", contracted[side]), ("batch", batch[side])):
            if dim in dims:
                return kind, list(dims).index(dim)
        return "free", len(batch[0]) + (len(free[0]) if side else 0) + free[side].index(dim)

    roles = {(*role(i, state.dim), state.inner) for i, state in enumerate(states) if isinstance(state, Positions)}
    ((kind, index, inner), *others) = roles
    if others:  # free dimensions of both operands, too: they become two of the result
        raise reason(eqn, COMBINES)
    for side, state in enumerate(states):
        dims = {"contracted": contracted, "batch": batch, "free": ((), ())}[kind][side]
        if dims and isinstance(state, Shared) and state.uneven[dims[index]]:
            raise reason(eqn, TABLE)
    if kind != "contracted":
        return [Positions(index, inner)]
    if not walk.may_sum:
        raise reason(eqn, "sums over positions")
    return [Summed()]


def convolution(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    numbers, (state, kernel) = eqn.params["dimension_numbers"], states
    if not isinstance(kernel, Shared) or not isinstance(state, Positions):
        raise reason(eqn, "has a kernel that depends on the position")
    if state.dim == numbers.lhs_spec[0] and eqn.params["batch_group_count"] == 1:
        return [Positions(numbers.out_spec[0], state.inner)]
    raise reason(eqn, "mixes positions")
