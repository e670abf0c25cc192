"""Rules for equations that contain programs: calls, derivative rules, loops and branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memjax._core.arrays import is_float
from memjax._core.backward.passes import vjp
from memjax._core.compat import bodies, scan_counts
from memjax._core.lists import pick
from memjax._core.positions.walk import UNKNOWN, Mixed, Positions, Shared, State, Walk, fits, reason, shared
from memjax._core.program.jaxpr import axis_sizes, bind, trace
from memjax._core.program.scopes import place_of


def call(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    body = next(iter(bodies(eqn)), None)
    if body is None or len(body.invars) != len(states):
        raise reason(eqn, UNKNOWN)
    try:
        return walk.program(body, states)
    except Mixed as mixed:  # inside a function of JAX, whose caller is the user
        raise Mixed(mixed.what, mixed.where or place_of(eqn)) from None


def custom_call(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """The states of a call with a custom derivative rule. Raises Mixed if the rule mixes positions, too."""
    outs = call(walk, eqn, states)
    if walk.is_backward:
        return outs
    try:
        _check_backward(walk, eqn, states, outs)
    except Mixed as mixed:
        if UNKNOWN not in mixed.what:  # kernels, and loops that add up the gradients of parameters
            raise Mixed(f"the derivative rule, where {mixed.what}", mixed.where or place_of(eqn)) from None
    return outs


def _check_backward(walk: Walk, eqn: Any, states: list[State], outs: list[State]) -> None:
    """Raises Mixed if a position's cotangent depends on other positions, or a shared value's is not a sum over positions."""
    types, out_types = ([atom.aval for atom in atoms] for atoms in (eqn.invars, eqn.outvars))
    wrt, floats = list(map(is_float, types)), list(map(is_float, out_types))
    inputs = pick(states, wrt)
    if not any(isinstance(state, Positions) for state in inputs):
        return

    def pull(values: list[Any], cotangents: list[Any]) -> Any:
        return vjp(lambda inputs: pick(bind(eqn, inputs), floats), values, wrt)[1](cotangents)[0]

    cotangents = [aval.to_ct_aval().update(weak_type=False) for aval in pick(out_types, floats)]
    program = trace(pull, [types, cotangents], axis_sizes(eqn)).jaxpr
    walk.seen.backward.append(program)
    pairs = zip(pick(outs, floats), cotangents, strict=True)
    given = [state if isinstance(state, Positions) else shared(aval.shape) for state, aval in pairs]
    for wanted, found in zip(inputs, walk.backward().program(program, [*states, *given]), strict=True):
        if isinstance(wanted, Positions) and not fits(found, wanted):
            raise Mixed("the cotangent of a position depends on other positions")
        if not isinstance(wanted, Positions) and isinstance(found, Positions):
            raise Mixed("the cotangent of a shared value has positions")


def linear_solve(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """Walks the program that solves, and for the backward pass the one that solves with the transpose."""
    counts, programs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    rest = list(states)
    of = {name: [rest.pop(0) for _ in range(count)] for name, count in counts._asdict().items()}
    outs = walk.program(programs.solve.jaxpr, [*of["solve"], *rest])
    if programs.transpose_solve is None:
        raise reason(eqn, UNKNOWN)
    walk.program(programs.transpose_solve.jaxpr, [*of["transpose_solve"], *outs])
    return outs


def scan(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """The states of a scan's outputs. Raises Mixed if it scans over the positions."""
    (body,) = bodies(eqn)
    constants, carried = scan_counts(eqn)
    stacks = states[constants + carried :]
    if any(isinstance(state, Positions) and state.dim == 0 for state in stacks):
        raise reason(eqn, "is over positions")
    rows = [row(state) for state in stacks]
    turn = lambda carry: walk.program(body, [*states[:constants], *carry, *rows])
    carry, outs = _settled(eqn, states[constants : constants + carried], turn)
    return [*carry, *map(stacked, outs[carried:])]


def while_(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    tested, looped = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    constants = states[tested : tested + looped]
    turn = lambda carry: walk.program(eqn.params["body_jaxpr"].jaxpr, [*constants, *carry])
    carry, _ = _settled(eqn, states[tested + looped :], turn)
    (predicate,) = walk.program(eqn.params["cond_jaxpr"].jaxpr, [*states[:tested], *carry])
    if not isinstance(predicate, Shared):
        raise reason(eqn, "ends by what depends on positions")
    return carry


def cond(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    if not isinstance(states[0], Shared):
        raise reason(eqn, "chooses by what depends on positions")
    joined, *others = (walk.program(branch.jaxpr, states[1:]) for branch in eqn.params["branches"])
    for other in others:
        joined = [join(eqn, a, b) for a, b in zip(joined, other, strict=True)]
    return joined


def _settled(
    eqn: Any, carry: list[State], turn: Callable[[list[State]], list[State]]
) -> tuple[list[State], list[State]]:
    """Repeats an iteration until the states of the carry no longer change; returns these, and the states of its outputs."""
    for _ in range(len(carry) + 2):
        outs = turn(carry)
        joined = [join(eqn, before, after) for before, after in zip(carry, outs[: len(carry)], strict=True)]
        if joined == carry:
            return carry, outs
        carry = joined
    raise reason(eqn, UNKNOWN)


def row(state: State) -> State:
    """The state of one row of an array: removes the leading dimension."""
    if isinstance(state, Positions):
        return Positions(state.dim - 1, state.inner)
    return Shared(state.uneven[1:]) if isinstance(state, Shared) else state


def stacked(state: State) -> State:
    """The state of an array that stacks rows of state `state`: adds a leading dimension. `row` undoes it."""
    if isinstance(state, Positions):
        return Positions(state.dim + 1, state.inner)
    return Shared((True, *state.uneven)) if isinstance(state, Shared) else state


def join(eqn: Any, a: State, b: State) -> State:
    """The state of a value that is either of two values, whose states are `a` and `b`."""
    if isinstance(a, Shared) and isinstance(b, Shared):
        return Shared(tuple(x or y for x, y in zip(a.uneven, b.uneven, strict=True)))
    for one, other in ((a, b), (b, a)):
        if one == other or (isinstance(other, Positions) and fits(one, other)):
            return other
    raise reason(eqn, UNKNOWN)
