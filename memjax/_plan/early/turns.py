"""Loops that end early: scans whose turns leave the state as it is once a predicate of it is false.

JAX has no reverse derivative of a loop of unknown length. With a bound on its length it is written as such a scan, or as scans
inside of scans, so that whole blocks of turns that do nothing are left out (`equinox.internal.while_loop(kind="bounded")`, the
solves of diffrax). `in_one` makes these one scan, whose turn is a `cond`; `early` finds out what its turn does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from memjax._core.compat import bodies, is_tracer, scan_counts
from memjax._core.program.dataflow import is_literal, read_by, renamed, variables
from memjax._core.program.jaxpr import Program, as_closed, calls_in_place, same_program


class Early(NamedTuple):
    """A turn of a loop that ends early.

    Attributes:
      asks: from what a turn reads to the number of the branch that runs.
      running: the branch in which the state changes.
      turn: what the turn does in that branch, from what it reads to what it makes.
    """

    asks: Program
    running: int
    turn: Program


def early(turn: Program, consts: int, carried: int) -> Early | None:
    """The turn of a scan, if it is a `cond` of which one branch leaves the state as it is; or None.

    Args:
      turn: the body of the scan, calls in place.
      consts, carried: how many of its inputs are constants, and how many are carried.
    """
    state = turn.invars[consts : consts + carried]
    conds = [eqn for eqn in turn.eqns if eqn.primitive.name == "cond" and set(eqn.outvars) & set(_made(turn, carried))]
    conds = [eqn for eqn in conds if len(eqn.params["branches"]) == 2 and not eqn.effects]
    for eqn in conds:
        ways = [_with_branch(turn, eqn, number) for number in range(2)]
        resting = [_rests(way, state) for way in ways]
        if not is_literal(eqn.invars[0]) and sum(resting) == 1:
            running = resting.index(False)
            before = turn.flow.needed([eqn.invars[0]])
            asks = Program(turn.constvars, turn.consts, turn.invars, [eqn.invars[0]], before)
            return Early(asks, running, ways[running])
    return None


def _made(turn: Program, carried: int) -> list[Any]:
    """What the turn makes of the state, and what that is a sum of: a loop backwards adds to gradients of its constants."""
    outs = [out for out in turn.outvars[:carried] if not is_literal(out)]
    makers = [turn.flow.makers[out] for out in outs if out in turn.flow.makers]
    return [*outs, *read_by(eqn for eqn in makers if eqn.primitive.name == "add_any")]


def _with_branch(turn: Program, cond: Any, number: int) -> Program:
    """The turn with a branch of its `cond` in place of that."""
    branch = calls_in_place(as_closed(cond.params["branches"][number]), differentiable=False, checkpoints=True)
    inside = dict(zip(branch.invars, cond.invars[1:], strict=True))
    names = dict(zip(cond.outvars, renamed(branch.outvars, inside), strict=True))
    eqns = []
    for eqn in turn.eqns:
        if eqn is cond:
            eqns += [one.replace(invars=renamed(one.invars, inside)) for one in branch.eqns]
        else:
            eqns.append(eqn.replace(invars=renamed(eqn.invars, names)))
    consts = [*turn.constvars, *branch.constvars], [*turn.consts, *branch.consts]
    return Program(*consts, turn.invars, renamed(turn.outvars, names), eqns)


def _rests(turn: Program, state: list[Any]) -> bool:
    """Whether the turn gives the state as it got it: nothing happens to it, but for zeros that are added."""
    zeros, same = set[Any](), dict[Any, Any]()
    is_zero = lambda atom: atom.val == 0 if is_literal(atom) and not atom.aval.shape else atom in zeros
    for eqn in turn.eqns:
        if eqn.primitive.name == "broadcast_in_dim" and is_zero(eqn.invars[0]):
            zeros.update(eqn.outvars)
        elif eqn.primitive.name == "add_any" and any(map(is_zero, eqn.invars)):
            one, other = eqn.invars
            [same[eqn.outvars[0]]] = renamed([other if is_zero(one) else one], same)
    return all(out is var for out, var in zip(renamed(turn.outvars, same), state, strict=False))


def states_again(program: Program, pull: Program, consts: int, carried: int) -> list[int]:
    """Positions of what is carried that turns which run again need: not a stack that they only write, nor a sum over turns.

    Args:
      program: a turn of the loop.
      pull: a turn of the backward pass, which reads variables of that.
      consts, carried: of the loop.
    """
    state = program.invars[consts : consts + carried]
    wanted = {*pull.flow.read, *variables(pull.outvars)}
    found: set[int] = set()
    while True:
        reads = _leading_to(wanted, program.eqns)
        more = {i for i, var in enumerate(state) if var in reads} - found
        if not more:
            return sorted(found)
        found |= more
        wanted.update(variables(program.outvars[i] for i in more))


def _leading_to(wanted: Iterable[Any], eqns: Sequence[Any]) -> set[Any]:
    """The variables, and what equations read to make them; of what a loop carries no more than that needs."""
    found = set(wanted)
    for eqn in reversed(eqns):
        if not found.isdisjoint(eqn.outvars):
            found |= _read_for(eqn, found)
    return found


def _read_for(eqn: Any, wanted: set[Any]) -> set[Any]:
    if eqn.primitive.name != "while":
        return set(variables(eqn.invars))
    asks, turn = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    asked = _leading_to(variables(asks.outvars), asks.eqns)
    live = {i for i, var in enumerate(asks.invars[first:]) if var in asked}
    live |= {i for i, out in enumerate(eqn.outvars) if out in wanted}
    while True:
        read = _leading_to(variables(turn.outvars[i] for i in live), turn.eqns)
        more = {i for i, var in enumerate(turn.invars[second:]) if var in read} - live
        if not more:
            break
        live |= more
    consts = [*eqn.invars[:first], *(a for a, var in zip(eqn.invars[first:], turn.invars[:second]) if var in read)]  # noqa: B905
    return set(variables([*consts, *(eqn.invars[first + second + i] for i in live)]))


def in_one(closed: Any) -> Any:
    """The closed jaxpr with each loop that ends early as one scan where it is scans inside of scans."""
    if not _has_branches_in_loops(closed.jaxpr):
        return closed
    program = calls_in_place(closed, differentiable=True)
    same = _equal_scalars(program)
    eqns = []
    for eqn in program.eqns:
        if eqn.primitive.name == "scan":
            while (inner := _of_inner(eqn, same)) is not None:
                eqn = inner
            eqn = eqn.replace(params=eqn.params | {"jaxpr": in_one(as_closed(eqn.params["jaxpr"]))})
        elif eqn.primitive.name == "cond":
            eqn = eqn.replace(params=eqn.params | {"branches": tuple(map(in_one, eqn.params["branches"]))})
        eqns.append(eqn)
    debug = closed.jaxpr.debug_info
    jaxpr = core.Jaxpr(program.constvars, program.invars, program.outvars, eqns, closed.jaxpr.effects, debug)
    return core.ClosedJaxpr(jaxpr, program.consts)


def _has_branches_in_loops(jaxpr: Any, *, in_loop: bool = False) -> bool:
    return any(
        (in_loop and eqn.primitive.name == "cond")
        or any(_has_branches_in_loops(body, in_loop=in_loop or eqn.primitive.name == "scan") for body in bodies(eqn))
        for eqn in jaxpr.eqns
    )


def _equal_scalars(program: Program) -> dict[Any, Any]:
    """By constant that is one number the first that is the same: a predicate that is traced twice has its own twice."""
    first: dict[Any, Any] = {}
    found = {}
    for var, value in zip(program.constvars, program.consts, strict=True):
        if var.aval.size == 1 and not is_tracer(value) and not jnp.issubdtype(var.aval.dtype, jax.dtypes.extended):
            found[var] = first.setdefault((var.aval, np.asarray(value).tobytes()), var)
    return found


def _of_inner(eqn: Any, same: Mapping[Any, Any]) -> Any | None:
    """Two loops as one, if the scan's turn is a scan and both end early for the same reason; or None.

    Where the predicate of the state is false, all turns of both leave that as it is. So it is asked in turns of the inner loop
    alone. Of constants that are the `same` the first stands for all.
    """
    outer, counts = _turn_of(eqn)
    found = None if outer is None else early(outer, *counts)
    if outer is None or found is None:
        return None
    [*needed] = found.turn.flow.needed(found.turn.outvars)
    if len(needed) != 1 or needed[0].primitive.name != "scan" or list(found.turn.outvars) != list(needed[0].outvars):
        return None
    [inner] = needed
    turn, (consts, carried) = _turn_of(inner)
    again = None if turn is None else early(turn, consts, carried)
    is_there = [is_literal(atom) or atom in outer.invars[: counts[0]] for atom in inner.invars[:consts]]
    if turn is None or again is None or carried != counts[1] or not all(is_there):
        return None
    if any(a is not b for a, b in zip(inner.invars[consts:], outer.invars[counts[0] :], strict=True)):
        return None
    outside = dict(zip(outer.invars[: counts[0]], eqn.invars, strict=False))
    first = dict(zip(outer.invars, [*renamed(eqn.invars[: counts[0]], same), *outer.invars[counts[0] :]], strict=True))
    reads = [*dict.fromkeys(variables(first.values()))]
    asked = _of_others(found.asks, first, reads)
    asked_again = _of_others(again.asks, dict(zip(turn.invars, renamed(inner.invars, first), strict=True)), reads)
    if found.running != again.running or not same_program(asked, asked_again):
        return None
    operands = renamed(inner.invars, outside)
    length = eqn.params["length"] * inner.params["length"]
    operands = [*operands[:consts], *eqn.invars[counts[0] :]]
    return eqn.replace(invars=operands, params=inner.params | {"length": length})


def _of_others(program: Program, names: Mapping[Any, Any], reads: Sequence[Any]) -> Program:
    """The program that reads other variables, or literals, in place of its inputs."""
    eqns = [eqn.replace(invars=renamed(eqn.invars, names)) for eqn in program.eqns]
    return Program(program.constvars, program.consts, [*reads], renamed(program.outvars, names), eqns)


def _turn_of(eqn: Any) -> tuple[Program | None, tuple[int, int]]:
    """The turn of a scan that scans over nothing and stacks nothing; None: it is another."""
    counts = scan_counts(eqn)
    turn = calls_in_place(as_closed(eqn.params["jaxpr"]), differentiable=False, checkpoints=True)
    is_plain = sum(counts) == len(turn.invars) and counts[1] == len(turn.outvars) and not turn.constvars
    return (turn if is_plain else None), counts
