"""Rules for values that are the same for every position: along which dimensions they differ."""

from __future__ import annotations

from typing import Any

from memjax._core.positions.indexing import scatter_places
from memjax._core.positions.walk import Shared, State, Walk, shape_of, shared


def uneven_everywhere(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    return [shared(shape_of(var)) for var in eqn.outvars]


def iota(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    shape = shape_of(eqn.outvars[0])
    return [Shared(tuple(dim == eqn.params["dimension"] and size > 1 for dim, size in enumerate(shape)))]


def elementwise(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    """The result differs along the dimensions along which any operand does. An operand may be a scalar."""
    rank = len(shape_of(eqn.outvars[0]))
    uneven = [state.uneven for state in states if isinstance(state, Shared) and len(state.uneven) == rank]
    return [Shared(tuple(map(any, zip(*uneven, strict=True))) if uneven else (False,) * rank)] * len(eqn.outvars)


def broadcast(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    assert isinstance(states[0], Shared)
    uneven = [False] * len(shape_of(eqn.outvars[0]))
    for dim, into in enumerate(eqn.params["broadcast_dimensions"]):
        uneven[into] = states[0].uneven[dim]
    return [Shared(tuple(uneven))]


def reshape(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    state, old, new = states[0], shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    assert isinstance(state, Shared)
    if not any(state.uneven):
        return [Shared((False,) * len(new))]
    if [size for size in old if size != 1] != [size for size in new if size != 1]:
        return [shared(new)]
    kept = iter([uneven for uneven, size in zip(state.uneven, old, strict=True) if size != 1])
    return [Shared(tuple(size != 1 and next(kept) for size in new))]


def transpose(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    assert isinstance(states[0], Shared)
    return [Shared(tuple(states[0].uneven[dim] for dim in eqn.params["permutation"]))]


def reduce(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    assert isinstance(states[0], Shared)
    stays = [uneven for dim, uneven in enumerate(states[0].uneven) if dim not in eqn.params["axes"]]
    return [Shared(tuple(stays))]


def cut(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    """A part of the first operand: what is even stays so."""
    return [states[0]]


def written(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    """The second operand in the place of a part of the first, from which it may differ."""
    operand, update = states[:2]
    assert isinstance(operand, Shared)
    assert isinstance(update, Shared)
    sizes = zip(shape_of(eqn.invars[0]), shape_of(eqn.invars[1]), strict=True)
    partly = [whole != part for whole, part in sizes]
    return [Shared(tuple(map(any, zip(operand.uneven, update.uneven, partly, strict=True))))]


def pad(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    assert isinstance(states[0], Shared)
    config = eqn.params["padding_config"]
    return [Shared(tuple(u or tuple(c) != (0, 0, 0) for u, c in zip(states[0].uneven, config, strict=True)))]


def concatenate(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    parts = [state.uneven for state in states if isinstance(state, Shared)]
    along = eqn.params["dimension"]
    return [Shared(tuple(dim == along or any(part) for dim, part in enumerate(zip(*parts, strict=True))))]


def scatter(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    """Even along the dimensions that it leaves apart, if the operands are."""
    operand, indices, updates = states
    assert isinstance(operand, Shared)
    assert isinstance(indices, Shared)
    assert isinstance(updates, Shared)
    even = {
        dim
        for dim, where, into in scatter_places(eqn)
        if not (operand.uneven[dim] or updates.uneven[into] or (where is not None and indices.uneven[where]))
    }
    shape = shape_of(eqn.outvars[0])
    return [Shared(tuple(size > 1 and dim not in even for dim, size in enumerate(shape)))]


def gather(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    """The result is even where the indices are."""
    operand, indices = states
    assert isinstance(operand, Shared)
    assert isinstance(indices, Shared)
    numbers, shape = eqn.params["dimension_numbers"], shape_of(eqn.outvars[0])
    uneven = [size > 1 for size in shape]
    batching = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    of_batch = [dim for dim in range(len(shape)) if dim not in numbers.offset_dims]
    for where, dim in enumerate(of_batch):
        uneven[dim] = indices.uneven[where] or (where in batching and operand.uneven[batching[where]])
    return [Shared(tuple(uneven))]
