"""Finds the update that can run in the loop of a backward pass: what is elementwise along the axis of stacked gradients.

From each stacked gradient the update grows along the equations that depend on it, as far as the walk of `_core.positions` keeps
turns of the loop apart. What these read besides is made inside, if that keeps turns apart as well, such as decoded state; or it
is read slice by slice; or it is the same for all turns, a learning rate for instance. A clipped gradient depends on all others
by their norm: such an update stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from memjax._core.positions.rules import apply_rule
from memjax._core.positions.walk import Mixed, Positions, State, Summed, Walk, shape_of, shared
from memjax._core.program import dataflow
from memjax._core.program.dataflow import is_literal, made_by, read_by
from memjax._core.program.jaxpr import Program, nbytes
from memjax._core.program.primitives import TRANSFERS, expensive
from memjax._jit.updates.loops import backward_loops, gradients_of
from memjax._plan.tile.resized import Resized
from memjax.compress._state.kernel_call import UPDATE

TURNS = Positions(0, 1)
_LITTLE = 16  # times less than gradients


class Update(NamedTuple):
    """An update that runs in the loop of a backward pass.

    Attributes:
      loop: the equation.
      eqns: of the update, in order.
      gradients: what they read of what the loop stacks.
      stays: of these what others read as well.
      reads: what they read besides.
      states: of these: slices are read of what has `TURNS`, all of the others.
      makes: what they make that is read elsewhere, stacked.
      old: for each of these the array that it is written into, or None.
      run: the update as a function of gradients and reads, for any number of turns.
    """

    loop: Any
    eqns: list[Any]
    gradients: list[Any]
    stays: set[Any]
    reads: list[Any]
    states: list[State]
    makes: list[Any]
    old: list[Any]
    run: Resized


def updates(program: Program, donated: Mapping[Any, Any], platform: str) -> list[Update]:
    """The updates that can run in loops, one for each loop at most.

    Args:
      program: straight lines of equations.
      donated: by result of the program, the input whose memory it gets.
      platform: of the device, as JAX calls it.
    """
    found = (Growth(program, loop, donated, platform).update() for loop in backward_loops(program))
    return [one for one in found if one is not None]


def rule(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """The states of an equation's outputs. An iota along the axis of turns keeps them apart: it numbers places in a stack.

    So do the kernel of an update of stacks alone, and what moves them between the host and a device.
    """
    if eqn.primitive is UPDATE:
        stacks = [state for atom, state in zip(eqn.invars, states, strict=True) if shape_of(atom)]
        if any(state != TURNS for state in stacks) or any(shape_of(out)[0] != walk.length for out in eqn.outvars):
            raise Mixed("a kernel has all turns")
        return [TURNS] * len(eqn.outvars)
    if eqn.primitive.name in TRANSFERS:
        return states
    inner = elements_of_turn(eqn, walk.length)
    return [Positions(0, inner)] if inner else apply_rule(walk, eqn, states)


def elements_of_turn(eqn: Any, length: int) -> int:
    """How far an iota along the axis of turns, alone or merged with those that follow, counts in a turn; 0 for all else."""
    if eqn.primitive.name != "iota" or eqn.params["dimension"] != 0:
        return 0
    inner, rest = divmod(shape_of(eqn.outvars[0])[0], length)
    return 0 if rest else inner


class Growth:
    """What grows from the gradients that a loop stacks.

    Attributes:
      states: how variables that the equations here may read or make depend on turns.
      following: equations that follow from gradients and keep turns apart, in order.
      before: equations that make what these read, and may run in the loop as well.
    """

    def __init__(self, program: Program, loop: Any, donated: Mapping[Any, Any], platform: str):
        self._program, self._flow, self._loop = program, program.flow, loop
        self._donated, self._platform, self._length = donated, platform, loop.params["length"]
        self._walk = Walk(self._length, False, rule)
        self.states: dict[Any, State] = dict.fromkeys(gradients_of(loop), TURNS)
        self.following: list[int] = []
        self.before: set[int] = set()
        # What depends on the loop exists after it. So the update can read such a value only if it makes the value itself.
        after = self._flow.depending(loop.outvars)
        for i, eqn in enumerate(program.eqns):
            self._add(i, eqn, after)

    def _add(self, i: int, eqn: Any, after: set[Any]) -> None:
        follows = not after.isdisjoint(self._flow.reads[i])
        is_lost = any(var in after and var not in self.states for var in self._flow.reads[i])
        is_far = expensive(eqn) and eqn.primitive is not UPDATE
        if eqn is self._loop or is_lost or is_far or not (follows or self._is_of_stacks(eqn)):
            return
        try:
            outs = rule(self._walk, eqn, list(map(self._state, eqn.invars)))
        except Mixed:
            return
        if follows and all(out == TURNS for out in outs):
            self.following.append(i)
        elif not follows and not any(isinstance(out, Summed) for out in outs):
            self.before.add(i)
        else:
            return
        self.states |= zip(eqn.outvars, outs, strict=True)

    def _is_of_stacks(self, eqn: Any) -> bool:
        """Whether an equation makes a stacked array from stacked arrays and numbers alone. Then the update may make it by turns.

        Stacked arrays that are made from anything else stay outside, and the update reads slices of them.
        """
        is_known = lambda atom: is_literal(atom) or not shape_of(atom) or self._is_stacked(atom) or atom in self.states
        is_made = elements_of_turn(eqn, self._length) > 0 or all(map(self._is_stacked, eqn.outvars))
        return is_made and all(map(is_known, eqn.invars))

    def _is_stacked(self, atom: Any) -> bool:
        return shape_of(atom)[:1] == (self._length,)

    def _state(self, atom: Any) -> State:
        if not is_literal(atom) and atom in self.states:
            return self.states[atom]
        return TURNS if not is_literal(atom) and self._is_stacked(atom) else shared(shape_of(atom))

    def update(self) -> Update | None:
        """The update of all gradients that have one; None if none has."""
        parts = map(self._without_others, self._parts())
        good = [part for part in parts if self._is_worth_it(part) and self._of([part]) is not None]
        return self._of(good) if good else None

    def would_make(self) -> list[Any]:
        """What the update makes that gets no donated memory, if that alone keeps it out of the loop; else nothing."""
        parts = [part for part in self._parts() if any(self._is_read_by(var, part) for var in self._given(part))]
        makes = (out for part in parts if self._of([part]) is not None for out in self._makes(part))
        return [out for out in makes if out not in self._donated]

    def _parts(self) -> Iterable[list[int]]:
        """The equations that follow, in groups that share arrays: each has the update of one array of weights, mostly."""
        group: dict[Any, list[int]] = {}
        for i in self.following:
            merged = [i]
            for var in self._flow.reads[i]:
                other = group.get(var, merged)
                if other is not merged:
                    merged += other
                    group |= {var: merged for var, one in group.items() if one is other}
            gradients = [var for var in self._flow.reads[i] if var in self._loop.outvars]
            group |= dict.fromkeys([*gradients, *self._program.eqns[i].outvars], merged)
        return {id(one): one for one in group.values()}.values()

    def _without_others(self, part: Sequence[int]) -> list[int]:
        """Those that lead to donated arrays or to little, such as sums of turns, if any does: others are no part of an update."""
        own, needed = set(part), set[int]()
        little = sum(nbytes(var.aval) for var in self._given(part)) / _LITTLE
        walk = dataflow.Walk(out for out in self._makes(part) if out in self._donated or nbytes(out.aval) <= little)
        for var in walk:
            if (i := self._flow.place.get(var)) in own:
                needed.add(i)
                walk.add(self._flow.reads[i])
        return sorted(needed) or list(part)

    def _is_worth_it(self, part: Sequence[int]) -> bool:
        """Whether fewer bytes are stacked than were."""
        before = sum(nbytes(var.aval) for var in self._given(part) if self._is_read_by(var, part))
        after = sum(nbytes(var.aval) for var in self._makes(part) if var not in self._donated)
        return before > after

    def _given(self, part: Sequence[int]) -> list[Any]:
        read = {var for i in part for var in self._flow.reads[i]}
        return [var for var in self._loop.outvars if var in read]

    def _makes(self, part: Sequence[int]) -> list[Any]:
        made = (out for i in part for out in self._program.eqns[i].outvars)
        return [out for out in made if not self._is_read_by(out, part)]

    def _is_read_by(self, var: Any, part: Sequence[int]) -> bool:
        """Whether nothing else reads it."""
        return var not in self._program.outvars and set(part).issuperset(self._flow.readers.get(var, ()))

    def _of(self, parts: Sequence[Sequence[int]]) -> Update | None:
        """The update of these groups; None if it cannot run for one turn."""
        part = sorted(i for one in parts for i in one)
        given, makes = self._given(part), self._makes(part)
        eqns = [self._program.eqns[i] for i in sorted({*part, *self._behind(part)})]
        made = made_by(eqns)
        reads = [var for var in read_by(eqns) if var not in made and var not in given]
        states = list(map(self._state, reads))
        inner = Program([], [], [*given, *reads], makes, eqns)
        of_inputs, of_outputs = [TURNS] * len(given) + states, [TURNS] * len(makes)
        try:
            run = Resized(inner, of_inputs, of_outputs, self._length, self._platform, rule)
        except Mixed:
            return None
        slices = {var for var, state in zip(reads, states, strict=True) if state == TURNS}
        old = [self._donated.get(out) if self._donated.get(out) in slices else None for out in makes]
        stays = {var for var in given if not self._is_read_by(var, part)}
        return Update(self._loop, eqns, given, stays, reads, states, makes, old, run)

    def _behind(self, part: Sequence[int]) -> set[int]:
        """Equations that make what these read."""
        found: set[int] = set()
        walk = dataflow.Walk(var for i in part for var in self._flow.reads[i])
        for var in walk:
            i = self._flow.place.get(var)
            if i in self.before:
                found.add(i)
                walk.add(self._flow.reads[i])
        return found
