"""The rules of `positions`: what each kind of primitive does to the dimension that holds positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import jaxprs_in_params

from memjax._core.compat import primitive_name, scan_counts, source_line
from memjax._core.positions import Mixed, Positions, Shared, State, Summed, Walk, reason, shared
from memjax._core.primitives import ALIASES, CALLS_OF_ONE_BODY, CUSTOM_CALLS, ELEMENTWISE

_TABLE_OF_TILE = (
    "meets values that differ from position to position but are made without the arguments (an arange, random numbers, a "
    "table): a tile would get those of the first positions. Pass them as an argument with an axis of its own"
)
_SUM = "uses a sum over positions"
_LINEAR = {"add", "sub", "add_any", "neg", "mul", "div", "convert_element_type", "copy", "reduce_precision"}

Rule = Callable[[Walk, Any, list[State]], list[State]]


def walk(jaxpr: Any, states: Sequence[State], length: int, may_sum: bool) -> list[State]:
    """The states of a program's outputs, the program being traced for `length` positions.

    Args:
      jaxpr: without constants that hold positions.
      states: of its inputs.
      length: at least 2.
      may_sum: whether sums over positions are of use.

    Raises Mixed.
    """
    return Walk(length, may_sum, _apply_rule).program(jaxpr, states)


def _apply_rule(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    """The states of an equation's outputs. Raises Mixed."""
    name = primitive_name(eqn)
    if all(isinstance(state, Shared) for state in states):
        rule: Rule = _RULES_OF_SHARED.get(name, _shared)
        return rule(walk, eqn, states)
    if name in ELEMENTWISE:
        return _elementwise(walk, eqn, states)
    if name in ALIASES - {"reshape", "squeeze", "expand_dims"} | {"sharding_constraint", "psum", "psum_invariant"}:
        return list(states)
    if name in CALLS_OF_ONE_BODY or name in CUSTOM_CALLS:
        return _call(walk, eqn, states)
    if any(isinstance(state, Summed) for state in states):
        return _of_sum(walk, eqn, states)
    if name not in _RULES:
        raise reason(eqn, "is not known to keep positions apart")
    return _RULES[name](walk, eqn, states)


# What is the same for every position.


def _shared(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    return [shared(getattr(var.aval, "shape", ())) for var in eqn.outvars]


def _iota(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    shape = eqn.outvars[0].aval.shape
    return [Shared(tuple(dim == eqn.params["dimension"] and size > 1 for dim, size in enumerate(shape)))]


def _uneven(states: Sequence[State], shapes: Sequence[Sequence[int]], out: Sequence[int]) -> Shared:
    """The state of an elementwise result: it differs along the dimensions along which any operand differs."""
    uneven = [False] * len(out)
    for state, shape in zip(states, shapes, strict=True):
        if isinstance(state, Shared) and len(shape) == len(out):
            uneven = [a or b for a, b in zip(uneven, state.uneven, strict=True)]
    return Shared(tuple(uneven))


def _elementwise_shared(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    shapes = [_shape(atom) for atom in eqn.invars]
    return [_uneven(states, shapes, var.aval.shape) for var in eqn.outvars]


def _broadcast_shared(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    (state, *_), out = states, eqn.outvars[0].aval.shape
    assert isinstance(state, Shared)
    uneven = [False] * len(out)
    for dim, into in enumerate(eqn.params["broadcast_dimensions"]):
        uneven[into] = state.uneven[dim]
    return [Shared(tuple(uneven))]


def _reshape_shared(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    (state, *_), old, new = states, _shape(eqn.invars[0]), eqn.outvars[0].aval.shape
    assert isinstance(state, Shared)
    if not any(state.uneven):
        return [Shared((False,) * len(new))]
    if [size for size in old if size != 1] != [size for size in new if size != 1]:
        return [shared(new)]
    kept = iter([uneven for uneven, size in zip(state.uneven, old, strict=True) if size != 1])
    return [Shared(tuple(size != 1 and next(kept) for size in new))]


def _transpose_shared(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    (state,) = states
    assert isinstance(state, Shared)
    return [Shared(tuple(state.uneven[dim] for dim in eqn.params["permutation"]))]


def _call_shared(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    return _call(walk, eqn, states)


# What has positions.


def _elementwise(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    shapes = [_shape(atom) for atom in eqn.invars]
    if any(isinstance(state, Summed) for state in states):
        return _linear(walk, eqn, states)
    places = {state for state in states if isinstance(state, Positions)}
    if len(places) > 1:
        raise reason(eqn, "combines every position with every other")
    (place,) = places
    for state, shape in zip(states, shapes, strict=True):
        if isinstance(state, Shared) and shape and state.uneven[place.dim]:
            raise reason(eqn, _TABLE_OF_TILE)
    return [place] * len(eqn.outvars)


def _linear(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    """The state after an elementwise operation on sums over positions. It must be linear: each tile applies it."""
    name = primitive_name(eqn)
    summed = [isinstance(state, Summed) for state in states]
    positions = any(isinstance(state, Positions) for state in states)
    if name not in _LINEAR or positions or (name == "div" and summed[1:] == [True]):
        raise reason(eqn, _SUM)
    if name in ("add", "sub", "add_any") and not all(summed):
        raise reason(eqn, "adds to a sum over positions what every tile would add again")
    if name == "mul" and all(summed):
        raise reason(eqn, "multiplies sums over positions")
    return [Summed()] * len(eqn.outvars)


def _of_sum(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    name = primitive_name(eqn)
    moves = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose", "reduce_sum", "rev", "slice")
    if name in moves or (name == "concatenate" and all(isinstance(state, Summed) for state in states)):
        return [Summed()]
    if name == "dot_general" and sum(isinstance(state, Summed) for state in states) == 1:
        if any(isinstance(state, Positions) for state in states):
            raise reason(eqn, _SUM)
        return [Summed()]
    raise reason(eqn, _SUM)


def _broadcast(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    state, old, new = states[0], _shape(eqn.invars[0]), eqn.outvars[0].aval.shape
    assert isinstance(state, Positions)
    dim = eqn.params["broadcast_dimensions"][state.dim]
    if old[state.dim] != new[dim]:
        raise reason(eqn, "repeats a position")
    return [Positions(int(dim), state.inner)]


def _reshape(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    state, old, new = states[0], _shape(eqn.invars[0]), eqn.outvars[0].aval.shape
    assert isinstance(state, Positions)
    place = walk.regrouped(state, old, new)
    if place is None:
        raise reason(eqn, f"from {tuple(old)} to {tuple(new)} splits the positions")
    return [place]


def _transpose(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    (state,) = states
    assert isinstance(state, Positions)
    return [Positions(list(eqn.params["permutation"]).index(state.dim), state.inner)]


def _reduce(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    (state,), axes = states, eqn.params["axes"]
    assert isinstance(state, Positions)
    if state.dim not in axes:
        return [Positions(state.dim - sum(axis < state.dim for axis in axes), state.inner)]
    if primitive_name(eqn) != "reduce_sum" or not walk.may_sum:
        raise reason(eqn, "is over positions")
    return [Summed()]


def _along(parameter: str) -> Rule:
    """The rule for operations along one dimension, which leave the others alone."""

    def rule(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
        along = eqn.params[parameter]
        along = along if isinstance(along, tuple | list) else (along,)
        place = _one_place(walk, eqn, states)
        if place.dim in along:
            raise reason(eqn, "is along the positions")
        return [place] * len(eqn.outvars)

    return rule


def _last(count: int) -> Rule:
    """The rule for operations on the last dimensions."""

    def rule(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
        place = _one_place(walk, eqn, states)
        if place.dim >= len(_shape(eqn.invars[0])) - count:
            raise reason(eqn, "is along the positions")
        return [place] * len(eqn.outvars)

    return rule


def _top_k(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    return (_along("axis") if "axis" in eqn.params else _last(1))(walk, eqn, states)


def _one_place(walk: Walk, eqn: Any, states: Sequence[State]) -> Positions:
    """Where all operands have their positions; those that are shared must be the same for all of these."""
    places = {state for state in states if isinstance(state, Positions)}
    if len(places) != 1:
        raise reason(eqn, "combines every position with every other")
    (place,) = places
    for state in states:
        if isinstance(state, Shared) and len(state.uneven) > place.dim and state.uneven[place.dim]:
            raise reason(eqn, _TABLE_OF_TILE)
    return place


def _pad(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    if not isinstance(states[0], Positions) or tuple(eqn.params["padding_config"][states[0].dim]) != (0, 0, 0):
        raise reason(eqn, "is along the positions")
    return [states[0]]


def _slice(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    """The rule for slices, which must take all positions."""
    state = states[0]
    if any(not isinstance(index, Shared) for index in states[1:]) or not isinstance(state, Positions):
        raise reason(eqn, "is at a place that depends on the position")
    if _shape(eqn.invars[0])[state.dim] != eqn.outvars[0].aval.shape[state.dim]:
        raise reason(eqn, "takes some of the positions")
    return [state]


def _update_slice(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    if any(not isinstance(index, Shared) for index in states[2:]):
        raise reason(eqn, "is at a place that depends on the position")
    place = _one_place(walk, eqn, states[:2])
    if _shape(eqn.invars[0])[place.dim] != _shape(eqn.invars[1])[place.dim]:
        raise reason(eqn, "writes some of the positions")
    return [place]


def _dot(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    contracted, batch = eqn.params["dimension_numbers"]
    ranks = [len(_shape(atom)) for atom in eqn.invars]
    free = [
        [dim for dim in range(rank) if dim not in contracted[side] and dim not in batch[side]]
        for side, rank in enumerate(ranks)
    ]
    found: list[tuple[str, int, int]] = []
    for side, state in enumerate(states):
        if not isinstance(state, Positions):
            continue
        for kind, dims in (("contracted", contracted[side]), ("batch", batch[side]), ("free", free[side])):
            if state.dim in dims:
                index = list(dims).index(state.dim)
                found.append((kind if kind != "free" else f"free {side}", index, state.inner))
    if len(found) == 2 and found[0] != found[1]:
        raise reason(eqn, "combines every position with every other")
    kind, index, inner = found[0]
    if len(found) == 2 and kind.startswith("free"):
        raise reason(eqn, "combines every position with every other")
    if len(found) == 1 and kind in ("contracted", "batch"):
        side = next(side for side, state in enumerate(states) if isinstance(state, Shared))
        other = states[side]
        assert isinstance(other, Shared)
        if other.uneven[(contracted if kind == "contracted" else batch)[side][index]]:
            raise reason(eqn, _TABLE_OF_TILE)
    if kind == "contracted":
        if not walk.may_sum:
            raise reason(eqn, "sums over positions")
        return [Summed()]
    if kind == "batch":
        return [Positions(index, inner)]
    side = int(kind[-1])
    return [Positions(len(batch[0]) + (len(free[0]) if side else 0) + index, inner)]


def _convolution(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    numbers, (state, kernel) = eqn.params["dimension_numbers"], states
    if not isinstance(kernel, Shared) or not isinstance(state, Positions):
        raise reason(eqn, "has a kernel that depends on the position")
    if state.dim == numbers.lhs_spec[0] and eqn.params["batch_group_count"] == 1:
        return [Positions(numbers.out_spec[0], state.inner)]
    raise reason(eqn, "mixes positions")


def _windows(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    place = _one_place(walk, eqn, [state for state in states if not (isinstance(state, Shared) and not state.uneven)])
    strides = eqn.params.get("window_strides") or (1,) * len(eqn.params["window_dimensions"])
    if eqn.params["window_dimensions"][place.dim] != 1 or strides[place.dim] != 1:
        raise reason(eqn, "is over neighbouring positions")
    return [place] * len(eqn.outvars)


def _gather(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    (operand, indices), numbers = states, eqn.params["dimension_numbers"]
    out = eqn.outvars[0].aval.shape
    of_batch = [dim for dim in range(len(out)) if dim not in numbers.offset_dims]
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    places: set[Positions] = set()
    if isinstance(indices, Positions):
        if indices.dim == len(_shape(eqn.invars[1])) - 1:
            raise reason(eqn, "is along the positions")
        places.add(Positions(of_batch[indices.dim], indices.inner))
    if isinstance(operand, Positions):
        if operand.dim in numbers.operand_batching_dims:
            where = numbers.start_indices_batching_dims[list(numbers.operand_batching_dims).index(operand.dim)]
            if isinstance(indices, Shared) and indices.uneven[where]:
                raise reason(eqn, _TABLE_OF_TILE)
            places.add(Positions(of_batch[where], operand.inner))
        elif operand.dim in dropped or operand.dim in numbers.start_index_map:
            raise reason(eqn, "is along the positions")
        elif eqn.params["slice_sizes"][operand.dim] != _shape(eqn.invars[0])[operand.dim]:
            raise reason(eqn, "takes some of the positions")
        else:
            kept = [dim for dim in range(len(_shape(eqn.invars[0]))) if dim not in dropped]
            places.add(Positions(numbers.offset_dims[kept.index(operand.dim)], operand.inner))
    elif isinstance(indices, Positions) and numbers.operand_batching_dims:
        assert isinstance(operand, Shared)
        batching = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
        if indices.dim in batching and operand.uneven[batching[indices.dim]]:
            raise reason(eqn, _TABLE_OF_TILE)
    if len(places) != 1:
        raise reason(eqn, "combines every position with every other")
    return [places.pop()]


def _scatter(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    """Where each position has a part of the operand, of the indices and of the updates to itself."""
    (operand, indices, updates), numbers = states, eqn.params["dimension_numbers"]
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    into = [dim for dim in range(len(_shape(eqn.invars[2]))) if dim not in numbers.update_window_dims]
    for dim, where in batching.items():
        place = Positions(dim, 1)
        fits = [
            operand == place or (isinstance(operand, Shared) and not operand.uneven[dim]),
            indices == Positions(where, 1) or (isinstance(indices, Shared) and not indices.uneven[where]),
            updates == Positions(into[where], 1) or (isinstance(updates, Shared) and not updates.uneven[into[where]]),
        ]
        if all(fits) and _shape(eqn.invars[0])[dim] == walk.length:
            return [place]
    raise reason(eqn, "is not known to keep positions apart")


def _random(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    """The rule for keys, one for each position: dimensions are added or removed behind the positions."""
    (state,) = states
    assert isinstance(state, Positions)
    return [state]


def _bitcast(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    (state,), old, new = states, _shape(eqn.invars[0]), eqn.outvars[0].aval.shape
    assert isinstance(state, Positions)
    if state.dim >= min(len(old), len(new)) or old[: state.dim + 1] != new[: state.dim + 1]:
        raise reason(eqn, "splits the positions")
    return [state]


# What holds programs.


def _call(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    bodies = list(jaxprs_in_params(eqn.params))
    if len(bodies) < 1:
        raise reason(eqn, "is not known to keep positions apart")
    body = getattr(bodies[0], "jaxpr", bodies[0])
    if len(body.invars) != len(states):
        raise reason(eqn, "is not known to keep positions apart")
    try:
        return walk.program(body, states)
    except Mixed as mixed:  # inside a function of JAX, whose caller is the user
        raise Mixed(mixed.what, mixed.where or source_line(eqn)) from None


def _scan(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    """Positions stay where they are while another axis is scanned over."""
    body = eqn.params["jaxpr"]
    body = getattr(body, "jaxpr", body)
    constants, carried = scan_counts(eqn)
    rows: list[State] = []
    for state in states[constants + carried :]:
        if isinstance(state, Positions) and state.dim == 0:
            raise reason(eqn, "is over positions")
        rows.append(
            Positions(state.dim - 1, state.inner)
            if isinstance(state, Positions)
            else Shared(state.uneven[1:])
            if isinstance(state, Shared)
            else state
        )
    carry = states[constants : constants + carried]
    for _ in range(len(carry) + 2):
        outs = walk.program(body, [*states[:constants], *carry, *rows])
        joined = [_join(eqn, before, after) for before, after in zip(carry, outs[:carried], strict=True)]
        if joined == carry:
            break
        carry = joined
    else:
        raise reason(eqn, "is not known to keep positions apart")
    stacked: list[State] = []
    for state in outs[carried:]:
        if isinstance(state, Positions):
            stacked.append(Positions(state.dim + 1, state.inner))
        else:
            stacked.append(Shared((True, *state.uneven)) if isinstance(state, Shared) else state)
    return [*carry, *stacked]


def _while(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    tested, looped = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    constants, carry = states[tested : tested + looped], states[tested + looped :]
    for _ in range(len(carry) + 2):
        outs = walk.program(eqn.params["body_jaxpr"].jaxpr, [*constants, *carry])
        joined = [_join(eqn, before, after) for before, after in zip(carry, outs, strict=True)]
        if joined == carry:
            break
        carry = joined
    else:
        raise reason(eqn, "is not known to keep positions apart")
    (predicate,) = walk.program(eqn.params["cond_jaxpr"].jaxpr, [*states[:tested], *carry])
    if not isinstance(predicate, Shared):
        raise reason(eqn, "ends by what depends on positions")
    return carry


def _cond(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    if not isinstance(states[0], Shared):
        raise reason(eqn, "chooses by what depends on positions")
    outs = [walk.program(branch.jaxpr, states[1:]) for branch in eqn.params["branches"]]
    joined = outs[0]
    for other in outs[1:]:
        joined = [_join(eqn, a, b) for a, b in zip(joined, other, strict=True)]
    return joined


def _join(eqn: Any, a: State, b: State) -> State:
    """The state of a value that is one or the other."""
    if isinstance(a, Shared) and isinstance(b, Shared):
        return Shared(tuple(x or y for x, y in zip(a.uneven, b.uneven, strict=True)))
    if a == b:
        return a
    if isinstance(b, Shared):
        a, b = b, a
    if isinstance(a, Shared) and isinstance(b, Positions) and not a.uneven[b.dim]:
        return b
    raise reason(eqn, "is not known to keep positions apart")


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


_RULES_OF_SHARED: dict[str, Rule] = {
    "iota": _iota,
    "broadcast_in_dim": _broadcast_shared,
    "transpose": _transpose_shared,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape_shared),
    **dict.fromkeys(ELEMENTWISE, _elementwise_shared),
    **dict.fromkeys(("jit", "pjit", "closed_call", "custom_jvp_call"), _call_shared),
}

_RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
    "transpose": _transpose,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"), _reduce),
    **dict.fromkeys(("argmax", "argmin"), _reduce),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    "split": _along("axis"),
    **dict.fromkeys(("concatenate", "sort"), _along("dimension")),
    "rev": _along("dimensions"),
    "top_k": _top_k,
    **dict.fromkeys(("pmax", "pmin", "ppermute"), lambda walk, eqn, states: list(states)),
    "pad": _pad,
    **dict.fromkeys(("slice", "dynamic_slice"), _slice),
    "dynamic_update_slice": _update_slice,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), _windows),
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max"), _scatter),
    **dict.fromkeys(("random_bits", "random_split", "random_wrap", "random_unwrap", "random_seed"), _random),
    "bitcast_convert_type": _bitcast,
    "fft": lambda walk, eqn, states: _last(len(eqn.params["fft_lengths"]))(walk, eqn, states),
    **dict.fromkeys(("cholesky", "lu", "qr", "svd", "eigh", "eig", "triangular_solve"), _last(2)),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
