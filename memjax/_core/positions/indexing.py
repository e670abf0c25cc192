"""Rules for reading and writing parts of arrays: slices, gathers and scatters."""

from __future__ import annotations

from typing import Any

from memjax._core.positions.walk import (
    ALONG,
    COMBINES,
    TABLE,
    UNKNOWN,
    Positions,
    Shared,
    State,
    Walk,
    one_place,
    reason,
    shape_of,
)

_PLACE = "is at a place that depends on the position"


def slice_(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    """A slice must take all positions."""
    state = states[0]
    if any(not isinstance(index, Shared) for index in states[1:]) or not isinstance(state, Positions):
        raise reason(eqn, _PLACE)
    if shape_of(eqn.invars[0])[state.dim] != shape_of(eqn.outvars[0])[state.dim]:
        raise reason(eqn, "takes some of the positions")
    return [state]


def update_slice(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    if any(not isinstance(index, Shared) for index in states[2:]):
        raise reason(eqn, _PLACE)
    place = one_place(eqn, states[:2])
    if shape_of(eqn.invars[0])[place.dim] != shape_of(eqn.invars[1])[place.dim]:
        raise reason(eqn, "writes some of the positions")
    return [place]


def gather(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    (operand, indices), numbers = states, eqn.params["dimension_numbers"]
    out = shape_of(eqn.outvars[0])
    of_batch = [dim for dim in range(len(out)) if dim not in numbers.offset_dims]
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    places: set[Positions] = set()
    if isinstance(indices, Positions):
        if indices.dim == len(shape_of(eqn.invars[1])) - 1:
            raise reason(eqn, ALONG)
        places.add(Positions(of_batch[indices.dim], indices.inner))
    if isinstance(operand, Positions):
        if operand.dim in numbers.operand_batching_dims:
            where = numbers.start_indices_batching_dims[list(numbers.operand_batching_dims).index(operand.dim)]
            if isinstance(indices, Shared) and indices.uneven[where]:
                raise reason(eqn, TABLE)
            places.add(Positions(of_batch[where], operand.inner))
        elif operand.dim in dropped or operand.dim in numbers.start_index_map:
            raise reason(eqn, ALONG)
        elif eqn.params["slice_sizes"][operand.dim] != shape_of(eqn.invars[0])[operand.dim]:
            raise reason(eqn, "takes some of the positions")
        else:
            kept = [dim for dim in range(len(shape_of(eqn.invars[0]))) if dim not in dropped]
            places.add(Positions(numbers.offset_dims[kept.index(operand.dim)], operand.inner))
    elif isinstance(indices, Positions) and numbers.operand_batching_dims:
        assert isinstance(operand, Shared)
        batching = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
        if indices.dim in batching and operand.uneven[batching[indices.dim]]:
            raise reason(eqn, TABLE)
    if len(places) != 1:
        raise reason(eqn, COMBINES)
    return [places.pop()]


def scatter(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    """Where each position has a part of the operand, of the indices and of the updates to itself."""
    operand, indices, updates = states
    for dim, where, into in scatter_places(eqn):
        fits = [
            operand == Positions(dim, 1) or (isinstance(operand, Shared) and not operand.uneven[dim]),
            updates == Positions(into, 1) or (isinstance(updates, Shared) and not updates.uneven[into]),
            isinstance(indices, Shared)
            if where is None
            else indices == Positions(where, 1) or (isinstance(indices, Shared) and not indices.uneven[where]),
        ]
        if all(fits) and shape_of(eqn.invars[0])[dim] == walk.length:
            return [Positions(dim, 1)]
    raise reason(eqn, UNKNOWN)


def scatter_places(eqn: Any) -> list[tuple[int, int | None, int]]:
    """Dimensions of a scatter's operand that it leaves apart, with those of indices, if they have them, and of updates."""
    numbers, shape, updates = eqn.params["dimension_numbers"], shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    into = [dim for dim in range(len(updates)) if dim not in numbers.update_window_dims]
    batching = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    found: list[tuple[int, int | None, int]] = [(dim, where, into[where]) for dim, where in batching]
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [dim for dim in range(len(shape)) if dim not in dropped]
    for dim, place in zip(window, numbers.update_window_dims, strict=True):
        if dim not in numbers.scatter_dims_to_operand_dims and shape[dim] == updates[place]:
            found.append((dim, None, place))
    return found
