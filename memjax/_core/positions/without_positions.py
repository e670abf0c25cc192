"""Rules for values without positions: those that are the same for all, along which dimensions they differ; and sums."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from memjax._core.compat import primitive_name
from memjax._core.positions.dimensions import scatter_places
from memjax._core.positions.walk import Positions, Shared, State, Summed, Walk, is_zero, reason, shape_of, shared


def uneven_everywhere(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    return [shared(shape_of(var)) for var in eqn.outvars]


def iota(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    shape = shape_of(eqn.outvars[0])
    return [Shared(tuple(dim == eqn.params["dimension"] and size > 1 for dim, size in enumerate(shape)))]


def elementwise(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """The result differs along the dimensions along which any operand does. An operand may be a scalar."""
    rank = len(shape_of(eqn.outvars[0]))
    uneven = [state.uneven for state in states if len(state.uneven) == rank]
    return [Shared(tuple(map(any, zip(*uneven, strict=True))) if uneven else (False,) * rank)] * len(eqn.outvars)


def broadcast(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    uneven = [False] * len(shape_of(eqn.outvars[0]))
    for dim, into in enumerate(eqn.params["broadcast_dimensions"]):
        uneven[into] = states[0].uneven[dim]
    return [Shared(tuple(uneven))]


def reshape(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    state, old, new = states[0], shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if not any(state.uneven):
        return [Shared((False,) * len(new))]
    if [size for size in old if size != 1] != [size for size in new if size != 1]:
        return [shared(new)]
    kept = iter([uneven for uneven, size in zip(state.uneven, old, strict=True) if size != 1])
    return [Shared(tuple(size != 1 and next(kept) for size in new))]


def transpose(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    return [Shared(tuple(states[0].uneven[dim] for dim in eqn.params["permutation"]))]


def reduce(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    stays = [uneven for dim, uneven in enumerate(states[0].uneven) if dim not in eqn.params["axes"]]
    return [Shared(tuple(stays))]


def cut(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """A part of the first operand: what is even stays so."""
    return [states[0]]


def written(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """The second operand in the place of a part of the first, from which it may differ."""
    operand, update = states[:2]
    sizes = zip(shape_of(eqn.invars[0]), shape_of(eqn.invars[1]), strict=True)
    partly = [whole != part for whole, part in sizes]
    return [Shared(tuple(map(any, zip(operand.uneven, update.uneven, partly, strict=True))))]


def pad(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    config = eqn.params["padding_config"]
    return [Shared(tuple(u or tuple(c) != (0, 0, 0) for u, c in zip(states[0].uneven, config, strict=True)))]


def product(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """The result differs along a dimension if an operand does along the dimension that it comes from."""
    contracted, batch = eqn.params["dimension_numbers"]
    pairs = zip(*(map(states[side].uneven.__getitem__, batch[side]) for side in (0, 1)), strict=True)
    uneven = [a or b for a, b in pairs]
    for state, summed, shared_dims in zip(states, contracted, batch, strict=True):
        uneven += [one for dim, one in enumerate(state.uneven) if dim not in (*summed, *shared_dims)]
    return [Shared(tuple(uneven))]


def concatenate(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    parts = [state.uneven for state in states]
    along = eqn.params["dimension"]
    return [Shared(tuple(dim == along or any(part) for dim, part in enumerate(zip(*parts, strict=True))))]


def scatter(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """Even along the dimensions that it leaves apart, if the operands are."""
    operand, indices, updates = states
    even = {
        dim
        for dim, where, into in scatter_places(eqn)
        if not (operand.uneven[dim] or updates.uneven[into] or (where is not None and indices.uneven[where]))
    }
    shape = shape_of(eqn.outvars[0])
    return [Shared(tuple(size > 1 and dim not in even for dim, size in enumerate(shape)))]


def gather(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """The result is even where the indices are."""
    operand, indices = states
    numbers, shape = eqn.params["dimension_numbers"], shape_of(eqn.outvars[0])
    uneven = [size > 1 for size in shape]
    batching = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    of_batch = [dim for dim in range(len(shape)) if dim not in numbers.offset_dims]
    for where, dim in enumerate(of_batch):
        uneven[dim] = indices.uneven[where] or (where in batching and operand.uneven[batching[where]])
    return [Shared(tuple(uneven))]


# Sums over positions. Each tile applies to its part what is applied to the sum, which must be linear.

ZEROS_STAY = {"broadcast_in_dim", "convert_element_type", "reshape", "transpose", "neg", "copy"}
_LINEAR = {"add", "sub", "add_any", "neg", "mul", "div", "convert_element_type", "copy", "reduce_precision"}


def sum_refused(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    raise reason(eqn, "uses a sum over positions")


def sum_moved(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    return [Summed()]


def sum_concatenate(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    return [Summed()] if all(_summed(states)) else sum_refused(walk, eqn, states)


def sum_product(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    return [Summed()] if sum(_summed(states)) == 1 and not _has_positions(states) else sum_refused(walk, eqn, states)


def sum_padded(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    return [Summed()] if is_zero(eqn.invars[1], states[1]) else sum_refused(walk, eqn, states)


def sum_elementwise(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    name, summed = primitive_name(eqn), _summed(states)
    zero = [is_zero(atom, state) for atom, state in zip(eqn.invars, states, strict=True)]
    if name in ("add", "add_any") and all(a or b for a, b in zip(summed, zero, strict=True)):
        return [Summed()]
    if name not in _LINEAR or _has_positions(states) or (name == "div" and summed[1]) or not _rounds_only(eqn, name):
        return sum_refused(walk, eqn, states)
    # A derivative rule adds its sums to zeros.
    if name in ("add", "sub", "add_any") and not all(summed) and not walk.is_backward:
        raise reason(eqn, "adds to a sum over positions what every tile would add again")
    if name == "mul" and all(summed):
        raise reason(eqn, "multiplies sums over positions")
    return [Summed()] * len(eqn.outvars)


def _rounds_only(eqn: Any, name: str) -> bool:
    """Whether an equation is linear but for rounding of floats. Quotients of integers, and floats made integers, are cut off."""
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    is_kind = lambda dtype, kind: jnp.issubdtype(dtype, kind)
    if name == "div":
        return is_kind(new, jnp.inexact)
    if name != "convert_element_type" or is_kind(old, jnp.inexact):
        return name != "convert_element_type" or is_kind(new, jnp.inexact)
    if is_kind(new, jnp.inexact):  # sums of narrow integers wrap around
        return is_kind(old, jnp.integer) and old.itemsize >= 4
    return is_kind(old, jnp.integer) and is_kind(new, jnp.integer) and new.itemsize <= old.itemsize


def _summed(states: list[State]) -> list[bool]:
    return [isinstance(state, Summed) for state in states]


def _has_positions(states: list[State]) -> bool:
    return any(isinstance(state, Positions) for state in states)
