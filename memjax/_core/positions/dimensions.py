"""Rules for equations whose sub-jaxpr, if any, need not be walked: which dimension of the result holds positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from memjax._core.compat import primitive_name
from memjax._core.positions.walk import (
    ALONG,
    COMBINES,
    TABLE,
    UNKNOWN,
    Positions,
    Rule,
    Shared,
    State,
    Summed,
    Walk,
    fits,
    is_zero,
    one_place,
    reason,
    shape_of,
)
from memjax._core.program.primitives import ADDING_SCATTERS

_PLACE = "is at a place that depends on the position"


# Along some dimensions, the others being left alone


def _without(place: Positions, dims: Sequence[int]) -> Positions:
    """Where the positions are when dimensions are gone."""
    return Positions(place.dim - sum(dim < place.dim for dim in dims), place.inner)


def reduce(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    state, axes = states[0], eqn.params["axes"]
    if state.dim not in axes:
        return [_without(state, axes)]
    if primitive_name(eqn) != "reduce_sum" or not walk.may_sum:
        raise reason(eqn, "is over positions")
    return [Summed()]


def along(parameter: str) -> Rule:
    """The rule for operations along the dimensions that a parameter names."""

    def rule(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
        dims = eqn.params[parameter]
        place = one_place(eqn, states)
        if place.dim in (dims if isinstance(dims, tuple | list) else (dims,)):
            raise reason(eqn, ALONG)
        return [place] * len(eqn.outvars)

    return rule


def last(count: int) -> Rule:
    """The rule for operations along the last dimensions."""

    def rule(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
        place = one_place(eqn, states)
        if place.dim >= len(shape_of(eqn.invars[0])) - count:
            raise reason(eqn, ALONG)
        return [place] * len(eqn.outvars)

    return rule


def top_k(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    return (along("axis") if "axis" in eqn.params else last(1))(walk, eqn, states)


def fft(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    return last(len(eqn.params["fft_lengths"]))(walk, eqn, states)


def pad(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    state = states[0]
    if not isinstance(state, Positions) or tuple(eqn.params["padding_config"][state.dim]) != (0, 0, 0):
        raise reason(eqn, ALONG)
    return [state]


def windows(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    place = one_place(eqn, [state for state in states if not (isinstance(state, Shared) and not state.uneven)])
    if eqn.params["window_dimensions"][place.dim] != 1 or eqn.params["window_strides"][place.dim] != 1:
        raise reason(eqn, "is over neighbouring positions")
    return [place] * len(eqn.outvars)


def reduce_by_function(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """`lax.reduce`: half of the operands are where it starts."""
    place, dims = one_place(eqn, states[: len(states) // 2]), eqn.params["dimensions"]
    if place.dim in dims or not all(isinstance(state, Shared) for state in states[len(states) // 2 :]):
        raise reason(eqn, "is over positions")
    return [_without(place, dims)] * len(eqn.outvars)


def unstack(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    along("axis")(walk, eqn, states)
    return [_without(states[0], [eqn.params["axis"]])] * len(eqn.outvars)


def stack(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    place = one_place(eqn, states)
    return [Positions(place.dim + (eqn.params["axis"] <= place.dim), place.inner)]


# Another shape


def broadcast(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    state = states[0]
    dim = eqn.params["broadcast_dimensions"][state.dim]
    if shape_of(eqn.invars[0])[state.dim] != shape_of(eqn.outvars[0])[dim]:
        raise reason(eqn, "repeats a position")
    return [Positions(int(dim), state.inner)]


def reshape(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    state, old, new = states[0], shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
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


def transpose(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    return [Positions(list(eqn.params["permutation"]).index(states[0].dim), states[0].inner)]


def bitcast(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    state, old, new = states[0], shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if state.dim >= min(len(old), len(new)) or old[: state.dim + 1] != new[: state.dim + 1]:
        raise reason(eqn, "splits the positions")
    return [state]


def of_keys(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """Keys, one for each position, and not the words of one."""
    place = one_place(eqn, states)
    if place.dim >= min(len(shape_of(eqn.invars[0])), len(shape_of(eqn.outvars[0]))):
        raise reason(eqn, "splits the positions")
    return [place]


# Matrix products and convolutions


def dot(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
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


def convolution(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    numbers, (state, kernel) = eqn.params["dimension_numbers"], states
    if not isinstance(kernel, Shared) or not isinstance(state, Positions):
        raise reason(eqn, "has a kernel that depends on the position")
    if state.dim == numbers.lhs_spec[0] and eqn.params["batch_group_count"] == 1:
        return [Positions(numbers.out_spec[0], state.inner)]
    raise reason(eqn, "mixes positions")


# Reading and writing parts of arrays: slices, gathers and scatters


def slice_(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """A slice must take all positions."""
    state = states[0]
    if any(not isinstance(index, Shared) for index in states[1:]) or not isinstance(state, Positions):
        raise reason(eqn, _PLACE)
    if shape_of(eqn.invars[0])[state.dim] != shape_of(eqn.outvars[0])[state.dim]:
        raise reason(eqn, "takes some of the positions")
    return [state]


def update_slice(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    if any(not isinstance(index, Shared) for index in states[2:]):
        raise reason(eqn, _PLACE)
    place = one_place(eqn, states[:2])
    if shape_of(eqn.invars[0])[place.dim] != shape_of(eqn.invars[1])[place.dim]:
        raise reason(eqn, "writes some of the positions")
    return [place]


def gather(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
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
        batching = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
        if indices.dim in batching and operand.uneven[batching[indices.dim]]:
            raise reason(eqn, TABLE)
    if len(places) != 1:
        raise reason(eqn, COMBINES)
    return [places.pop()]


def scatter(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """Where each position has a part of the operand, of the indices and of the updates to itself; or adds to zeros."""
    operand, indices, updates = states
    if _is_by_index(eqn, indices, updates):
        if primitive_name(eqn) not in ADDING_SCATTERS:
            raise reason(eqn, "combines all positions of an index otherwise than by a sum")
        if not is_zero(eqn.invars[0], operand):
            raise reason(eqn, "adds to a sum over positions what every tile would add again")
        if not walk.may_sum:
            raise reason(eqn, "sums over positions")
        return [Summed()]
    for dim, where, into in scatter_places(eqn):
        inner, rest = divmod(shape_of(eqn.invars[0])[dim], walk.length)
        is_indexed = isinstance(indices, Shared) if where is None else fits(indices, Positions(where, inner))
        is_apart = is_indexed and fits(operand, Positions(dim, inner)) and fits(updates, Positions(into, inner))
        if is_apart and inner and not rest:
            return [Positions(dim, inner)]
    raise reason(eqn, UNKNOWN)


def _is_by_index(eqn: Any, indices: State, updates: State) -> bool:
    """Whether each position has its own index and update: sums over the edges that end in a node, rows of a table's gradient."""
    numbers = eqn.params["dimension_numbers"]
    if not isinstance(indices, Positions) or numbers.operand_batching_dims:
        return False
    if indices.dim == len(shape_of(eqn.invars[1])) - 1:
        return False
    return fits(updates, Positions(into_of_scatter(eqn)[indices.dim], indices.inner))


def into_of_scatter(eqn: Any) -> list[int]:
    """The dimensions of a scatter's updates that are those of its indices, in order."""
    window = eqn.params["dimension_numbers"].update_window_dims
    return [dim for dim in range(len(shape_of(eqn.invars[2]))) if dim not in window]


def scatter_places(eqn: Any) -> list[tuple[int, int | None, int]]:
    """Dimensions of a scatter's operand that it does not mix, each with that of the indices, or None, and of the updates."""
    numbers, shape, updates = eqn.params["dimension_numbers"], shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    into = into_of_scatter(eqn)
    batching = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    found: list[tuple[int, int | None, int]] = [(int(dim), int(where), into[where]) for dim, where in batching]
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [dim for dim in range(len(shape)) if dim not in dropped]
    for dim, place in zip(window, numbers.update_window_dims, strict=True):
        if dim not in numbers.scatter_dims_to_operand_dims and shape[dim] == updates[place]:
            found.append((dim, None, int(place)))
    return found
