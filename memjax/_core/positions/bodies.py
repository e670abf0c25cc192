"""Rules for what holds programs: calls, loops and branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memjax._core.compat import bodies, scan_counts
from memjax._core.positions.walk import UNKNOWN, Mixed, Positions, Shared, State, Walk, reason
from memjax._core.program.scopes import place_of


def call(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    body = next(iter(bodies(eqn)), None)
    if body is None or len(body.invars) != len(states):
        raise reason(eqn, UNKNOWN)
    try:
        return walk.program(body, states)
    except Mixed as mixed:  # inside a function of JAX, whose caller is the user
        raise Mixed(mixed.what, mixed.where or place_of(eqn)) from None


def linear_solve(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    """The program that solves, and the one that solves with the transpose, for the backward pass."""
    counts, programs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    constants, first = [], 0
    for count in counts:
        constants.append(states[first : first + count])
        first += count
    of = dict(zip(counts._fields, constants, strict=True))
    outs = walk.program(programs.solve.jaxpr, [*of["solve"], *states[first:]])
    if programs.transpose_solve is None:
        raise reason(eqn, UNKNOWN)
    walk.program(programs.transpose_solve.jaxpr, [*of["transpose_solve"], *outs])
    return outs


def scan(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    """Positions stay where they are while another axis is scanned over."""
    (body,) = bodies(eqn)
    constants, carried = scan_counts(eqn)
    stacks = states[constants + carried :]
    if any(isinstance(state, Positions) and state.dim == 0 for state in stacks):
        raise reason(eqn, "is over positions")
    rows = [_row(state) for state in stacks]
    turn = lambda carry: walk.program(body, [*states[:constants], *carry, *rows])
    carry, outs = _settled(eqn, states[constants : constants + carried], turn)
    return [*carry, *map(_stacked, outs[carried:])]


def while_(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    tested, looped = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    constants = states[tested : tested + looped]
    turn = lambda carry: walk.program(eqn.params["body_jaxpr"].jaxpr, [*constants, *carry])
    carry, _ = _settled(eqn, states[tested + looped :], turn)
    (predicate,) = walk.program(eqn.params["cond_jaxpr"].jaxpr, [*states[:tested], *carry])
    if not isinstance(predicate, Shared):
        raise reason(eqn, "ends by what depends on positions")
    return carry


def cond(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    if not isinstance(states[0], Shared):
        raise reason(eqn, "chooses by what depends on positions")
    joined, *others = (walk.program(branch.jaxpr, states[1:]) for branch in eqn.params["branches"])
    for other in others:
        joined = [_join(eqn, a, b) for a, b in zip(joined, other, strict=True)]
    return joined


def _settled(
    eqn: Any, carry: list[State], turn: Callable[[list[State]], list[State]]
) -> tuple[list[State], list[State]]:
    """The states of a loop's carry that a turn of the loop leaves as they are, and all outputs of that turn."""
    for _ in range(len(carry) + 2):
        outs = turn(carry)
        joined = [_join(eqn, before, after) for before, after in zip(carry, outs[: len(carry)], strict=True)]
        if joined == carry:
            return carry, outs
        carry = joined
    raise reason(eqn, UNKNOWN)


def _row(state: State) -> State:
    """The state of a row of a stack."""
    if isinstance(state, Positions):
        return Positions(state.dim - 1, state.inner)
    return Shared(state.uneven[1:]) if isinstance(state, Shared) else state


def _stacked(state: State) -> State:
    """The state of a stack of rows."""
    if isinstance(state, Positions):
        return Positions(state.dim + 1, state.inner)
    return Shared((True, *state.uneven)) if isinstance(state, Shared) else state


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
    raise reason(eqn, UNKNOWN)
