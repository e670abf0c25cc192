"""Message passing in rounds: which parts of two passes can run for some edges of a graph at a time.

The walk of `memjax._core.positions` follows the edges. A sum over edges is complete when all of them are there: what reads it
belongs to the next round. So the passes come apart into rounds: in each, edges read nodes, and add to nodes. What rounds hand on
to each other is stored for all edges. What a backward pass reads of a round it computes again, for the same edges. An operation
that mixes edges otherwise, such as a maximum over neighbours, is in no round: it reads all edges, whose values are stored for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from memjax._core.positions.walk import Mixed, Positions, Shared, State, Summed, Walk, shape_of, shared
from memjax._core.program.dataflow import is_literal, made_by, read_by, variables
from memjax._core.program.jaxpr import Program
from memjax._core.program.primitives import ELEMENTWISE, REPLICATIONS
from memjax._plan.batch.examples import Batch, rule

_MOST_SETTLED = 4  # times that equations of a backward pass are put off until they agree
VIEWS = ELEMENTWISE | {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "convert_element_type", "copy"}
_MADE_INSIDE = REPLICATIONS | ELEMENTWISE | {"broadcast_in_dim", "iota", "reshape", "convert_element_type"}


def roots(program: Program, atoms: Sequence[Any], length: int) -> set[Any]:
    """What values of edges follow from edge by edge: inputs, and what is made in another way."""
    found, pending, seen = set(), variables(atoms), set()
    while pending:
        var = pending.pop()
        if var in seen or shape_of(var)[:1] != (length,):
            continue
        seen.add(var)
        eqn = program.flow.makers.get(var)
        reads = () if eqn is None else [one for one in variables(eqn.invars) if shape_of(one)[:1] == (length,)]
        if eqn is None or eqn.primitive.name not in VIEWS or not reads:
            if eqn is None or not all(is_literal(atom) for atom in eqn.invars):
                found.add(var)
        else:
            pending += reads
    return found


class Rounds:
    """A walk through a program: which equations keep edges apart, and in which round they are.

    Args:
      program, stages: as for `memjax._plan.batch.edges.edges_of`.
      length: the number of edges.
      sources: variables that have one row for each of them.

    Attributes:
      states: of variables; of sums that are complete, too.
      sources: as given, with what turned out to have rows of edges as well.
    """

    def __init__(self, program: Program, stages: Sequence[int], length: int, sources: set[Any]):
        self.program, self.stages, self.length, self.sources = program, list(stages), length, set(sources)
        self._walk, self._results = Walk(length, True, rule), set(variables(program.outvars))
        self._stored: set[Any] = set()  # variables of edges that parts hand on
        self._cheap: set[Any] = set()  # others, which follow cheaply from these
        self.states: dict[Any, State] = {var: shared(shape_of(var)) for var in (*program.constvars, *program.invars)}
        self._whole: dict[Any, int] = {}  # the round from which on all of a variable can be read
        self._round: dict[int, int] = {}  # of the equations that keep edges apart
        for var in sources:
            self.states[var] = Positions(0, 1)
        base = 0
        for stage in sorted(set(stages)):
            numbers = [i for i, one in enumerate(stages) if one == stage]
            self._add(numbers, base)
            if stage % 2:
                self._put_off(numbers, base)
            else:
                self._draw_late(numbers)
            base = 1 + max((*self._whole.values(), *self._round.values(), base), default=base)

    def _add(self, numbers: Sequence[int], base: int) -> None:
        for i in numbers:
            eqn, reads = self.program.eqns[i], self.program.flow.reads[i]
            found = None if eqn.effects or self.sources.issuperset(eqn.outvars) else self._apart(i)
            if found is not None:
                self._round[i] = max([base, *(self._ready(var, found[0]) for var in reads)])
                self.states |= zip(eqn.outvars, found[1], strict=True)
                continue
            at = max([base, *(self._complete(var) for var in reads)])
            has_edges = any(isinstance(self.states[var], Positions) for var in reads)
            for out in eqn.outvars:
                self._whole[out] = at
                rows = has_edges and shape_of(out)[:1] == (self.length,)
                self.states[out] = Positions(0, 1) if rows or out in self.sources else self._shared(eqn, out)

    def _shared(self, eqn: Any, out: Any) -> State:
        """The state of what is made for all edges at once."""
        read = [_complete_state(atom, self.states) for atom in eqn.invars]
        try:
            outs = rule(self._walk, eqn, read) if all(isinstance(one, Shared) for one in read) else None
        except Mixed:
            outs = None
        state = outs[eqn.outvars.index(out)] if outs is not None else None
        return state if isinstance(state, Shared) else shared(shape_of(out))

    def _apart(self, i: int) -> tuple[bool, list[State]] | None:
        """Whether an equation reads sums that are not complete, and the states of its results; None if it is in no part."""
        eqn = self.program.eqns[i]
        states = [self._state(atom) for atom in eqn.invars]
        if any(isinstance(state, Summed) for state in states):
            outs = self._of_sums(eqn, states)
            if outs is not None:
                return True, outs
            states = [_complete_state(atom, self.states) for atom in eqn.invars]
        if not any(isinstance(state, Positions) for state in states):
            outs = self._outs(eqn, states) if eqn.primitive.name == "random_bits" else None
            return (False, outs) if outs and isinstance(outs[0], Positions) else None
        outs = self._outs(eqn, states)
        if outs is None:
            outs = self._with_more_edges(eqn, states)
        return None if outs is None else (False, outs)

    def _state(self, atom: Any) -> State:
        return shared(np.shape(atom.val)) if is_literal(atom) else self.states[atom]

    def _of_sums(self, eqn: Any, states: Sequence[State]) -> list[State] | None:
        """What an equation makes of sums over edges of one round, which it only moves or adds; None if it needs them complete."""
        place = self.program.flow.place
        pairs = [(atom, state) for atom, state in zip(eqn.invars, states, strict=True) if not is_literal(atom)]
        rounds = {self._round[place[atom]] for atom, state in pairs if isinstance(state, Summed)}
        others = [self._complete(atom) for atom, state in pairs if not isinstance(state, Summed)]
        if (
            len(rounds) != 1
            or max(others, default=0) > min(rounds)
            or any(isinstance(one, Positions) for one in states)
        ):
            return None
        outs = self._outs(eqn, states)
        return outs if outs is not None and all(isinstance(out, Summed) for out in outs) else None

    def _outs(self, eqn: Any, states: Sequence[State]) -> list[State] | None:
        try:
            return rule(self._walk, eqn, list(states))
        except Mixed:
            return None

    def _with_more_edges(self, eqn: Any, states: Sequence[State]) -> list[State] | None:
        """The states of results if what an equation reads besides has rows of edges, too."""
        is_row = lambda atom, state: (
            isinstance(state, Shared)
            and not is_literal(atom)
            and shape_of(atom)[:1] == (self.length,)
            and state.uneven[0]
        )
        more = [atom for atom, state in zip(eqn.invars, states, strict=True) if is_row(atom, state)]
        if not more:
            return None
        again = [
            Positions(0, 1) if is_row(atom, state) else state for atom, state in zip(eqn.invars, states, strict=True)
        ]
        outs = self._outs(eqn, again)
        if outs is not None:
            self.states |= dict.fromkeys(more, Positions(0, 1))
            inputs = {*self.program.invars, *self.program.constvars}
            self.sources |= {var for var in roots(self.program, more, self.length) if var in inputs}
            self.sources |= inputs.intersection(more)
        return outs

    # In which round

    def _complete(self, var: Any) -> int:
        """The round from which on all of a variable can be read."""
        maker = self.program.flow.place.get(var)
        return self._round[maker] + 1 if maker in self._round else self._whole.get(var, 0)

    def _ready(self, var: Any, sums: bool = False) -> int:
        """The round in which a variable can be read, edge by edge if it has edges."""
        maker = self.program.flow.place.get(var)
        if maker in self._round and (sums or isinstance(self.states[var], Positions)):
            return self._round[maker]
        return self._complete(var)

    def _draw_late(self, numbers: Sequence[int]) -> None:
        """Random numbers, and what follows from them alone, are made in the round that reads them."""
        drawn: set[int] = set()
        place, states = self.program.flow.place, self.states
        for i in numbers:
            reads = [var for var in self.program.flow.reads[i] if isinstance(states[var], Positions | Summed)]
            if i in self._round and drawn.issuperset(map(place.get, reads)):
                drawn.add(i)
        for i in sorted(drawn, reverse=True):
            readers = (one for out in self.program.eqns[i].outvars for one in self.program.flow.readers.get(out, ()))
            self._round[i] = min((self._round[one] for one in readers if one in self._round), default=self._round[i])

    def _put_off(self, numbers: Sequence[int], base: int) -> None:
        """Equations of a backward pass that read the same round of the forward pass are in one round, the last of theirs.

        Otherwise both parts would compute that round again.
        """
        for _ in range(_MOST_SETTLED):
            self._store()
            last: dict[int, int] = {}
            for i in numbers:
                for source in self._forward_rounds(i):
                    last[source] = max(last.get(source, 0), self._round[i])
            before = dict(self._round)
            for i in numbers:
                eqn, reads = self.program.eqns[i], self.program.flow.reads[i]
                if any(isinstance(self.states[var], Positions) for var in (*reads, *eqn.outvars)):
                    least = [last[source] for source in self._forward_rounds(i)]
                else:  # sums that are in different rounds now are added when they are complete
                    states = [self._state(atom) for atom in eqn.invars]
                    if i in self._round and self._of_sums(eqn, states) is None:
                        del self._round[i]
                        self.states |= {out: shared(shape_of(out)) for out in eqn.outvars}
                    least = []
                sums = i in self._round and not any(isinstance(self.states[var], Positions) for var in reads)
                at = max([base, *least, *(self._ready(var, sums) for var in reads)])
                if i in self._round:
                    self._round[i] = at
                else:
                    at = max([base, *(self._complete(var) for var in reads)])
                    self._whole |= dict.fromkeys(eqn.outvars, at)
            if before == self._round:
                return

    def _forward_rounds(self, i: int) -> set[int]:
        """The rounds of the forward pass that an equation of the backward pass computes again."""
        if i not in self._round:
            return set()
        made = {var: self.program.flow.place.get(var) for var in self.program.flow.reads[i]}
        return {
            self._round[maker]
            for var, maker in made.items()
            if maker in self._round
            and self.stages[maker] + 1 == self.stages[i]
            and isinstance(self.states[var], Positions)
            and var not in self._stored
            and var not in self._cheap
        }

    def _store(self) -> None:
        """Decides what parts hand on to each other: what is stored, and what follows from that so cheaply that it is not."""
        self._stored, self._cheap = set(), set()
        for i, eqn in enumerate(self.program.eqns):
            if i not in self._round:
                continue
            edges = [var for var in self.program.flow.reads[i] if isinstance(self.states[var], Positions)]
            there = all(
                var in self._stored or var in self._cheap or self.program.flow.place.get(var) not in self._round
                for var in edges
            )
            is_cheap = there and bool(edges) and eqn.primitive.name in VIEWS and len(eqn.outvars) == 1
            for out in eqn.outvars:
                if isinstance(self.states[out], Positions):
                    uses = self._uses_elsewhere(out)
                    if None in uses or (uses and not is_cheap):
                        self._stored.add(out)
                    elif is_cheap:
                        self._cheap.add(out)

    def _uses_elsewhere(self, var: Any) -> set[int | None]:
        """The rounds that read what a part makes and do not compute it again; None: all of it is read at once."""
        maker = self.program.flow.place[var]
        at, stage = self._round[maker], self.stages[maker]
        found: set[int | None] = {None} if var in self._results else set()
        for i in self.program.flow.readers.get(var, ()):
            again = not stage % 2 and self.stages[i] == stage + 1
            if i not in self._round or (self._round[i] != at and not again):
                found.add(self._round.get(i))
        return found

    # The parts

    def parts(self) -> tuple[list[Batch], list[int]]:
        """The parts in order, and the stage of each."""
        self._store()
        found, of_parts = [], []
        groups: dict[tuple[int, int], list[int]] = {}
        for i, at in self._round.items():
            groups.setdefault((self.stages[i], at), []).append(i)
        for (stage, _), numbers in sorted(groups.items()):
            part = self._part(stage, numbers)
            if part is not None:
                found.append(part)
                of_parts.append(stage)
        return found, of_parts

    def _part(self, stage: int, numbers: Sequence[int]) -> Batch | None:
        program, mine = self.program, set(numbers)
        makes = []
        for out in made_by(program.eqns[i] for i in sorted(numbers)):
            readers = program.flow.readers.get(out, ())
            is_read = out in self._results or not mine.issuperset(readers)
            if is_read if isinstance(self.states[out], Summed) else out in self._stored:
                makes.append(out)
        if not makes:
            return None
        chosen: set[int] = set()
        pending = list(makes)
        while pending:
            i = program.flow.place.get(pending.pop())
            if i is None or i in chosen or not self._is_inside(i, stage, mine):
                continue
            chosen.add(i)
            pending += program.flow.reads[i]
        eqns = [program.eqns[i] for i in sorted(chosen)]
        made = made_by(eqns)
        reads = [var for var in read_by(eqns) if var not in made]
        states = {var: _complete_state(var, self.states) for var in reads} | {var: self.states[var] for var in makes}
        return Batch(self.length, program, states, eqns, reads, makes)

    def _is_inside(self, i: int, stage: int, mine: set[int]) -> bool:
        """Whether an equation that leads to what a part makes is in it."""
        if i in mine:
            return True
        eqn = self.program.eqns[i]
        if i not in self._round:  # one number, repeated
            return eqn.primitive.name in _MADE_INSIDE and all(
                is_literal(atom) or self._is_number(atom) for atom in eqn.invars
            )
        again = bool(stage % 2) and self.stages[i] == stage - 1
        return all(
            isinstance(self.states[out], Positions) and out not in self._stored and (again or out in self._cheap)
            for out in eqn.outvars
        )

    def _is_number(self, var: Any) -> bool:
        eqn = self.program.flow.makers.get(var)
        return (
            eqn is not None
            and eqn.primitive.name in _MADE_INSIDE
            and all(is_literal(atom) or self._is_number(atom) for atom in eqn.invars)
        )


def _complete_state(atom: Any, states: dict[Any, State]) -> State:
    """The state of a value when it is complete."""
    if is_literal(atom):
        return shared(np.shape(atom.val))
    state = states[atom]
    return shared(shape_of(atom)) if isinstance(state, Summed) else state
