"""A traced step in which updates of stacked weights run in the loop of their backward pass.

The loop carries the stacked weights and state, and each turn writes its slice. So donated arguments are updated in place, and the
gradients of one turn exist at a time. A turn reads slices of these arrays before it writes them: they are still as they were.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from memjax._core.arrays import is_on_host
from memjax._core.barriers import barrier, joint_barrier
from memjax._core.check import readable_bytes
from memjax._core.compat import derivatives, eval_jaxpr, name_stack, scan_counts
from memjax._core.lists import Arrays
from memjax._core.program.dataflow import Dataflow, is_literal, made_by, read_by, variables
from memjax._core.program.jaxpr import (
    Program,
    as_closed,
    calls_in_place,
    inside,
    nbytes,
    read,
    trace,
    without_dead_equations,
)
from memjax._jit.updates.fetches import fetches_of
from memjax._jit.updates.found import TURNS, Update, elements_of_turn, updates
from memjax._jit.updates.loops import backward_loops, gradients_of
from memjax._jit.updates.ready import ready, with_others
from memjax._jit.updates.reasons import reasons
from memjax._jit.updates.twice import twice
from memjax._plan.tile.rewrite import in_order
from memjax.compress._state.kernel_call import UPDATE, arithmetic, call_for_turn, can_run_turns

_SMALL = 2**16  # bytes
_PROPOSAL = (
    'with "two_passes" in allow the derivative is taken twice, first for what is read of all, and no gradients are kept'
)


class Moved(NamedTuple):
    """A step with updates in loops.

    Attributes:
      closed: the step, a closed jaxpr; None if no update could be moved.
      notes: what keeps gradients that are still stacked.
    """

    closed: Any | None
    notes: list[str]


def with_updates_in_loops(closed: Any, donated: Mapping[int, int], platform: str, *, two_passes: bool = False) -> Moved:
    """The traced step, a closed jaxpr, with updates in the loops of backward passes where they can be.

    A loop that accumulates gradients has them as well: each of its turns adds to what it carries, as donated arguments are.

    Args:
      closed: the step.
      donated: by number of a result, that of the argument whose memory it gets.
      platform: of the device, as JAX calls it.
      two_passes: take the derivative twice where updates need numbers of all gradients first: see `twice`.
    """
    program, within = _with_bodies(calls_in_place(closed, differentiable=False), platform)
    program = without_dead_equations(ready(without_dead_equations(program)))
    is_changed = any(one.closed is not None for one in within)
    moved = _moved(closed, program, donated, platform, is_changed)
    notes = [note for one in within for note in one.notes]
    other = twice(program, {program.invars[k] for k in donated.values()}) if moved.notes else None
    both = None if other is None else _moved(closed, other, donated, platform, is_changed)
    if both is None or both.closed is None or both.notes:
        return Moved(moved.closed, [*notes, *moved.notes])
    if two_passes:
        return Moved(both.closed, notes)
    return Moved(moved.closed, [*notes, *(f"{note}; {_PROPOSAL}" for note in moved.notes)])


def _moved(closed: Any, program: Program, donated: Mapping[int, int], platform: str, is_changed: bool) -> Moved:
    """The same for the step as this program, which may be changed already."""
    pairs = {program.outvars[i]: program.invars[k] for i, k in donated.items() if not is_literal(program.outvars[i])}
    failed: dict[int, str] = {}  # by loop, why
    while True:
        program, found = _found(program, pairs, platform, failed)
        try:
            moved = _rewritten(closed, program, found, platform) if found or is_changed else None
        except _NotMovedError as error:
            failed[id(error.loop)] = str(error)
            continue
        return Moved(moved, [*failed.values(), *reasons(program, found, failed, pairs, platform)])


def _with_bodies(program: Program, platform: str) -> tuple[Program, list[Moved]]:
    """The program with updates moved in the bodies of loops that take derivatives; what was moved in each of these."""
    eqns, within = [], []
    for eqn in program.eqns:
        if eqn.primitive.name == "scan" and not derivatives(name_stack(eqn)):
            consts, carried = scan_counts(eqn)
            body = as_closed(eqn.params["jaxpr"])
            moved = with_updates_in_loops(body, {i: consts + i for i in range(carried)}, platform)
            within.append(moved)
            if moved.closed is not None:
                eqn = eqn.replace(params=eqn.params | {"jaxpr": moved.closed})
        eqns.append(eqn)
    return dataclasses.replace(program, eqns=eqns), within


class _NotMovedError(Exception):
    """An update cannot run for one turn of this loop."""

    def __init__(self, loop: Any, error: Exception):
        size = readable_bytes(sum(nbytes(var.aval) for var in gradients_of(loop)))
        said = str(error).partition("\n")[0]
        super().__init__(f"keeps {size} of gradients: their update is not known to run for one turn of a loop ({said})")
        self.loop = loop


def _rewritten(closed: Any, program: Program, found: Sequence[Update], platform: str) -> Any:
    parts = [_InLoop(update, platform, program) for update in found]
    eqns: list[Any] = []
    constvars, consts = [*program.constvars], [*program.consts]
    for step in in_order(program, parts):
        if not isinstance(step, _InLoop):
            eqns.append(step)
            continue
        loop = calls_in_place(step.traced(), differentiable=False).between(step.reads, step.makes)
        eqns += loop.eqns
        constvars += loop.constvars
        consts += loop.consts
    debug = closed.jaxpr.debug_info
    jaxpr = core.Jaxpr(constvars, program.invars, program.outvars, eqns, closed.jaxpr.effects, debug)
    return core.ClosedJaxpr(jaxpr, consts)


def _found(
    program: Program, donated: Mapping[Any, Any], platform: str, failed: Collection[int]
) -> tuple[Program, list[Update]]:
    """The updates but those of loops that failed, and the program in which they are.

    Kernels in it that cannot move as they are, are arithmetic, if that can.
    """
    kernels = [eqn for eqn in program.eqns if eqn.primitive is UPDATE]
    whole = [eqn for eqn in kernels if can_run_turns(eqn.params["region"])]
    opened = [eqn for eqn in kernels if eqn not in whole]
    while True:
        changed = _with_arithmetic(program, opened)
        all_found = [one for one in updates(changed, donated, platform) if id(one.loop) not in failed]
        found = _apart(changed, all_found, platform)
        moved = made_by(eqn for one in found for eqn in one.eqns)
        stays = lambda eqn, moved=moved: not moved.keys() >= set(eqn.outvars)
        if stuck := [*filter(stays, whole)]:  # those that are arithmetic have another try with these
            whole, opened = [eqn for eqn in whole if eqn not in stuck], [*opened, *stuck]
        elif any(map(stays, opened)):
            opened = [eqn for eqn in opened if not stays(eqn)]
        else:
            return changed, found


def _apart(program: Program, found: Sequence[Update], platform: str) -> list[Update]:
    """Takes updates in order, and leaves out each that cannot be moved together with those taken.

    If two loops contribute to one gradient, the first loop has its update. No two updates may need each other's results.
    """
    taken: list[Update] = []
    for one in found:
        is_new = all(set(one.makes).isdisjoint(other.makes) for other in taken)
        if is_new and _has_order(program, [_InLoop(update, platform, program) for update in (*taken, one)]):
            taken.append(one)
    return taken


def _has_order(program: Program, parts: Sequence[_InLoop]) -> bool:
    try:
        in_order(program, parts)
    except ValueError:
        return False
    return True


def _with_arithmetic(program: Program, kernels: Sequence[Any]) -> Program:
    """The program in which these equations are what their kernels compute."""
    chosen = set(map(id, kernels))
    run = lambda eqn: lambda *values: arithmetic(eqn.params["region"], values)
    return with_others(program, lambda eqn: run(eqn) if id(eqn) in chosen else None)


class _InLoop:
    """The loop of a backward pass with an update in it.

    Attributes:
      region: the equations that it stands for.
      reads, makes: what these read and make.
    """

    def __init__(self, update: Update, platform: str, program: Program):
        self._update, loop = update, update.loop
        self.region = Program([], [], [], [], [loop, *update.eqns])
        self._left = [var for var in loop.outvars if var not in update.gradients or var in update.stays]
        self.makes = [*self._left, *update.makes]
        self._written = {old: out for old, out in zip(update.old, update.makes, strict=True) if old is not None}
        self._first = _first(program, self.region.eqns, self._written)
        self.reads = [*dict.fromkeys([*variables(loop.invars), *update.reads, *self._first])]
        # XLA:CPU copies what one fusion writes and another reads. It compiles a small loop as one function, without barriers.
        self._waits = platform == "cpu" and sum(nbytes(var.aval) for var in self._written) >= _SMALL
        of_turns = [var for var, state in zip(update.reads, update.states, strict=True) if state == TURNS]
        self._slices = [var for var in of_turns if var not in self._written]
        self._number: Any = 0  # of the turn that is being traced
        self._fetches = fetches_of(update, platform)
        for eqn in self._fetches.moves if self._fetches is not None else ():
            update.run.calls[eqn.outvars[0]] = functools.partial(self._fetched, eqn.outvars[0])
        for eqn in update.eqns:
            if inner := elements_of_turn(eqn, loop.params["length"]):
                update.run.calls[eqn.outvars[0]] = functools.partial(self._count, eqn.outvars[0].aval, inner)
            elif eqn.primitive is UPDATE:
                update.run.calls[eqn.outvars[0]] = functools.partial(self._by_kernel, eqn.params["region"])

    def _by_kernel(self, region: Any, values: Arrays, size: int) -> Arrays:
        return call_for_turn(region, jnp.asarray(self._number), values)

    def _fetched(self, out: Any, values: Arrays, size: int) -> Arrays:
        assert self._fetches is not None
        return [self._fetches.moved[out]]

    def _count(self, aval: Any, inner: int, values: Arrays, size: int) -> Arrays:
        first = jnp.asarray(self._number).astype(aval.dtype) * jnp.asarray(inner, aval.dtype)
        return [first + lax.broadcasted_iota(aval.dtype, (inner * size, *aval.shape[1:]), 0)]

    def traced(self) -> Any:
        """The loop as a closed jaxpr, from what it reads to what it makes."""
        with inside(self._update.loop, marked=True):
            return trace(
                lambda *values: self._run(dict(zip(self.reads, values, strict=True))), [v.aval for v in self.reads], {}
            )

    def _run(self, env: dict[Any, Any]) -> Arrays:
        loop = self._update.loop
        consts, carried = scan_counts(loop)
        fixed, begin, rows = (
            read(env, some)
            for some in (
                loop.invars[:consts],
                loop.invars[consts : consts + carried],
                [atom for atom in loop.invars[consts + carried :] if not self._is_written(atom)],
            )
        )
        begin = [
            lax.full((), v, var.aval.dtype) if is_literal(var) else v
            for v, var in zip(begin, loop.invars[consts:], strict=False)
        ]
        begin = _waiting(begin, read(env, self._first))
        state = begin, read(env, [*self._written])
        numbers = jnp.arange(loop.params["length"], dtype=jnp.uint32)  # of signed ones a slice would ask the sign
        # Those of slices on the host are other ones, as they become constants: see `LoopPair.counts`.
        counts = [jnp.arange(loop.params["length"], dtype=jnp.uint32)] if any(map(_is_on_host, self._written)) else []

        def turn(state: Any, row: Any) -> Any:
            return self._turn(env, fixed, state, row)

        (carry, written), (left, others) = lax.scan(
            turn,
            state,
            (numbers, counts, rows, read(env, self._slices)),
            length=loop.params["length"],
            reverse=loop.params["reverse"],
            unroll=loop.params["unroll"],
        )
        made = dict(zip(self._written.values(), written, strict=True))
        made |= zip((out for out in self._update.makes if out not in made), others, strict=True)
        return [*carry, *left, *(made[out] for out in self._update.makes)]

    def _is_written(self, atom: Any) -> bool:
        return not is_literal(atom) and atom in self._written

    def _turn(self, env: dict[Any, Any], fixed: Arrays, state: Any, row: Any) -> Any:
        """One turn: the state that the loop carries and the stacked arrays, and slices of what is stacked."""
        update, loop = self._update, self._update.loop
        (carry, stacks), (self._number, counts, rows, slices) = state, row
        consts, carried = scan_counts(loop)
        places = [
            _place(b, counts[0] if _is_on_host(var) else self._number)
            for var, b in zip(self._written, stacks, strict=True)
        ]
        here = {
            var: lax.dynamic_slice(b, place, (1, *b.shape[1:]))
            for var, b, place in zip(self._written, stacks, places, strict=True)
        }
        here |= zip(self._slices, (one[None] for one in slices), strict=True)
        others = iter(rows)
        rows = [here[atom][0] if self._is_written(atom) else next(others) for atom in loop.invars[consts + carried :]]
        if self._fetches is not None:
            outs = self._fetches.run([*fixed, *carry, *rows], here)
        else:
            body = as_closed(loop.params["jaxpr"])
            outs = eval_jaxpr(body.jaxpr, body.consts, [*fixed, *carry, *rows])
        made = dict(zip(loop.outvars, outs, strict=True))
        operands = [here[var] if var in here else env[var] for var in update.reads]
        try:
            results = update.run([*(made[var][None] for var in update.gradients), *operands])
        except (TypeError, ValueError) as error:  # sizes that an equation names in a way not known there
            raise _NotMovedError(loop, error) from error
        new = dict(zip(update.makes, barrier(results) if self._waits else results, strict=True))
        stacks = [
            lax.dynamic_update_slice(b, new[out], place)
            for b, out, place in zip(stacks, self._written.values(), places, strict=True)
        ]
        left = [made[var] for var in self._left[carried:]]
        kept = {*self._written.values()}
        return (outs[:carried], stacks), (left, [new[out][0] for out in update.makes if out not in kept])


def _first(program: Program, inside: Sequence[Any], written: Collection[Any]) -> list[Any]:
    """What is made of arrays before the loop writes them: a norm of old weights. Read later, they would be copied before.

    What leads to the loop comes before it anyway, and what depends on a loop of a backward pass comes after.
    """
    flow, own = program.flow, set(map(id, inside))
    after = flow.depending(made_by(backward_loops(program)))
    before = set(map(id, flow.needed(read_by(inside))))
    others = [eqn for eqn in program.eqns if id(eqn) not in own and id(eqn) not in before]
    others = [eqn for eqn in others if after.isdisjoint(eqn.outvars)]
    made = Dataflow(others).depending(written).intersection(made_by(others))
    kept = {*variables(program.outvars), *read_by(eqn for eqn in program.eqns if made.isdisjoint(eqn.outvars))}
    return [var for var in made_by(others) if var in made and var in kept]


def _waiting(begin: Arrays, first: Arrays) -> Arrays:
    """What a loop begins with, so that it waits for `first`."""
    if not begin or not first:
        return begin
    waited, *_ = joint_barrier([begin[0], *first])
    return [waited, *begin[1:]]


def _is_on_host(var: Any) -> bool:
    return is_on_host(var.aval)


def _place(stack: Any, number: Any) -> list[Any]:
    """Where the slice of a turn begins."""
    return [number, *(jnp.uint32(0) for _ in stack.shape[1:])]
