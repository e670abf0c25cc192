"""Recurrences in a program: a loop over time, with what is computed for each step before and after it.

Steps mix through what the loop carries alone. So all of that may run for some steps at a time, and then for the next ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from memjax._core.compat import derivatives, name_stack, scan_counts
from memjax._core.positions.growth import Growth, Sources
from memjax._core.positions.walk import Positions, State, Summed, shape_of, shared
from memjax._core.program.costs import array_bytes
from memjax._core.program.dataflow import is_literal, made_by, variables
from memjax._core.program.jaxpr import Program
from memjax._core.program.primitives import ELEMENTWISE

_FEWEST_TURNS = 8
_FEWEST_STEPS = 32
_FEWEST_IN_CHUNK = 8  # steps
_SHORTER = 2  # times at most, for chunks that divide the length
_WORTH = 2  # times what goes in and comes out: less is not worth chunks
CHUNKS = (4, 16, 32, 64)
"""How many there are."""
_OF_CONSTANTS = ELEMENTWISE | {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"}


class Recurrence(NamedTuple):
    """A part of a program that may run chunk by chunk.

    Attributes:
      seed: number of its first loop.
      length: turns of its loops.
      reverse: whether they begin with the last row.
      eqns: in order.
      shared: variables that all chunks read.
      mapped: variables of which each chunk reads its steps, and in which dimension these are: one for a turn of the loops, or as
        many for each.
      outs: variables that are read outside. The states that its loops end with are not among them.
      axes: where these have their steps; None: sums.
      nbytes: of what it makes.
    """

    seed: int
    length: int
    reverse: bool
    eqns: list[Any]
    shared: list[Any]
    mapped: list[tuple[Any, int]]
    outs: list[Any]
    axes: list[int | None]
    nbytes: int

    @property
    def loops(self) -> list[Any]:
        return [eqn for eqn in self.eqns if is_loop(eqn, self.length)]

    @property
    def of_turn(self) -> int:
        """Steps of a turn: a loop may go through a sequence in pieces."""
        outs = [(var, dim) for var, dim in zip(self.outs, self.axes, strict=True) if dim is not None]
        return max((shape_of(var)[dim] // self.length for var, dim in (*self.mapped, *outs)), default=1)

    def chunk(self, count: int) -> int:
        """Turns of a chunk where there are about so many; 0: there are too few steps, or as many as for a smaller count."""
        fewer = [self._turns(one) for one in CHUNKS if one < count]
        turns = self._turns(count)
        return turns if self.length * self.of_turn >= _FEWEST_STEPS and turns not in (self.length, *fewer) else 0

    def _turns(self, count: int) -> int:
        """Turns of a chunk, with no fewer steps than are worth a loop. If they divide the length, arrays need not be copied to
        have the last chunk for itself, whose program would be another one."""
        fewest = -(-_FEWEST_IN_CHUNK // self.of_turn)
        turns = min(max(self.length // count, fewest), self.length)
        least = max(fewest, -(-turns // _SHORTER))
        return next((one for one in range(turns, least - 1, -1) if self.length % one == 0), turns)

    @property
    def chunks(self) -> list[int]:
        """Turns of a chunk that are worth a try, the largest first."""
        return [turns for count in CHUNKS if (turns := self.chunk(count))]


def recurrences(program: Program) -> list[Recurrence]:
    """Those of a program, straight lines of equations, that do not overlap; in order."""
    found: list[Recurrence] = []
    sources, taken = Sources(program), set[int]()
    for i, eqn in enumerate(program.eqns):
        if id(eqn) in taken or not is_loop(eqn):
            continue
        region = Grown(program, sources, eqn, range(len(program.eqns)), first=i).recurrence()
        if region is None or not taken.isdisjoint(map(id, region.eqns)):
            continue
        moved = sum(array_bytes(var) for var, _ in region.mapped) + sum(map(array_bytes, region.outs))
        if is_worth_chunks(region.nbytes, moved):
            taken.update(map(id, region.eqns))
            found.append(region)
    return found


def is_worth_chunks(nbytes: int, moved: int) -> bool:
    """Whether a recurrence makes enough bytes for its steps, compared with the bytes that go in and come out."""
    return nbytes >= _WORTH * moved


def is_loop(eqn: Any, length: int | None = None) -> bool:
    """Whether the equation is a loop over arrays, of so many turns."""
    if eqn.primitive.name != "scan" or eqn.effects or eqn.params["length"] < _FEWEST_TURNS:
        return False
    return len(eqn.invars) > sum(scan_counts(eqn)) and length in (None, eqn.params["length"])


def is_outermost(var: Any, state: State, length: int) -> bool:
    """Whether the dimension that has steps has nothing but these, one turn after another; sums have none."""
    return not isinstance(state, Positions) or shape_of(var)[state.dim] == length * state.inner


def carried(eqn: Any, length: int) -> range:
    """Which operands of an equation are what a loop over steps starts from."""
    if not is_loop(eqn, length):
        return range(0)
    consts, count = scan_counts(eqn)
    return range(consts, consts + count)


class Grown(Growth):
    """The equations around loops that keep steps apart: those that follow from one, then those that lead to these alone.

    Args:
      program: straight lines of equations.
      sources: what follows from what there.
      loop: its length and its direction are those of all loops taken in.
      numbers: of the equations that may be taken in, in order. What others read is kept as a whole.
      first: the first of them that may follow; it is the seed.
      known: what has steps already, from another part of the program; then there is no seed.
      left_out: numbers of equations that run before.

    Attributes:
      behind: variables that follow from the part, outside of it.
    """

    def __init__(
        self,
        program: Program,
        sources: Sources,
        loop: Any,
        numbers: Collection[int],
        *,
        first: int = -1,
        known: Mapping[Any, State] | None = None,
        left_out: Collection[int] = (),
    ):
        self._begin(program, sources, first, loop.params["length"])
        self._reverse = loop.params["reverse"]
        self._results = set(variables(program.outvars))
        self._mine = set(numbers).difference(left_out)
        self._of_gradients = known is not None
        self.states |= known or {}
        self.behind: set[Any] = set()
        for i in numbers:
            if i >= first and i in self._mine:
                self._follow(i)

    def _follow(self, i: int) -> None:
        eqn, reads = self.program.eqns[i], self.program.flow.reads[i]
        if not self.behind.isdisjoint(reads):
            self.behind.update(eqn.outvars)
        elif i == self.seed or any(var in self.states for var in reads):
            is_mine = is_loop(eqn, self.length) and eqn.params["reverse"] == self._reverse
            if is_mine and self._add_loop(i):
                self.behind.update(eqn.outvars[: scan_counts(eqn)[1]])
            elif is_mine or self._is_update(i) or not self._add(i, None):
                self.behind.update(eqn.outvars)

    def _is_update(self, i: int) -> bool:
        """Whether it makes something of gradients: they are what comes out."""
        states = [self.states[var] for var in self.program.flow.reads[i] if var in self.states]
        is_marked = bool(derivatives(name_stack(self.program.eqns[i])))
        return self._of_gradients and not is_marked and all(isinstance(state, Summed) for state in states)

    def _add_loop(self, i: int) -> bool:
        """Take a loop in, if it scans over steps and nothing else of it has steps."""
        eqn = self.program.eqns[i]
        first = sum(scan_counts(eqn))
        rows = Positions(0, 1)
        if any(not is_literal(atom) and atom in self.states for atom in eqn.invars[:first]):
            return False
        if any(self.states.get(atom, rows) != rows for atom in eqn.invars[first:] if not is_literal(atom)):
            return False
        others = [shared(shape_of(atom)) for atom in eqn.invars[:first]]
        self.operands[i] = [*others, *[rows] * (len(eqn.invars) - first)]
        self.states |= dict.fromkeys(eqn.outvars[scan_counts(eqn)[1] :], rows)
        self.inside.append(i)
        return True

    def add_what_leads_here(self, also: Collection[tuple[Any, Positions]] = ()) -> None:
        """Take in what makes operands with steps, where nothing else reads it.

        Args:
          also: operands of another part, with their steps.
        """
        leading = {self.program.flow.place[eqn.outvars[0]] for eqn in self._leading() if eqn.outvars}
        waiting = [*also, *self._operands(self.inside)]
        while waiting:
            atom, state = waiting.pop()
            i = None if is_literal(atom) else self.program.flow.place.get(atom)
            if i is not None and i in self._mine and i not in self.operands and isinstance(state, Positions):
                waiting += self._operands(self._added_with_readers(i, state, leading))

    def _leading(self) -> list[Any]:
        return self.program.flow.needed([var for i in self.inside for var in self.program.flow.reads[i]])

    def _operands(self, numbers: Collection[int]) -> list[tuple[Any, State]]:
        return [pair for i in numbers for pair in zip(self.program.eqns[i].invars, self.operands[i], strict=True)]

    def _added_with_readers(self, first: int, wanted: Positions, leading: Collection[int]) -> list[int]:
        """Take in an equation that makes what is `wanted`, and all that reads its steps; the numbers, none if it mixes steps."""
        new: list[int] = []
        waiting: list[tuple[int, State | None]] = [(first, wanted)]
        while waiting:
            i, state = waiting.pop()
            if i in self.operands:
                continue
            eqn = self.program.eqns[i]
            reads = [self.states[var] for var in self.program.flow.reads[i] if var in self.states]
            is_of_sums = i != first and all(isinstance(one, Summed) for one in reads)
            may = self.behind.isdisjoint(self.program.flow.reads[i]) and not (is_of_sums and self._is_update(i))
            found = self.kept_apart(i, state) if may else None
            if found is None and is_of_sums and i not in leading:
                continue  # it reads a sum when that is complete
            if found is None or not all(map(self._may_be, eqn.outvars, found[1])):
                for number in new:
                    del self.operands[number]
                    for out in self.program.eqns[number].outvars:
                        del self.states[out]
                return []
            self.operands[i] = found[0]
            self.states |= zip(eqn.outvars, found[1], strict=True)
            new.append(i)
            readers = {reader for out in eqn.outvars for reader in self.program.flow.readers.get(out, [])}
            waiting += [(reader, None) for reader in sorted(readers & self._mine)]
        self.inside += new
        return new

    def _may_be(self, var: Any, state: State) -> bool:
        """Whether a value may be made in chunks: it is no result for each step, and read as what it is."""
        readers = [i for i in self.program.flow.readers.get(var, ()) if i in self.operands]
        pairs = self._operands(readers)
        return not (isinstance(state, Positions) and var in self._results) and all(
            read is not var or one == state for read, one in pairs
        )

    def recurrence(self) -> Recurrence | None:
        """None where it is no more than a loop."""
        if not self.inside:
            return None
        self.add_what_leads_here()
        return self.region()

    def region(self) -> Recurrence | None:
        """What was taken in by now; None where chunks cannot read it."""
        numbers, program = sorted(self.operands), self.program
        made, chosen = made_by([program.eqns[i] for i in numbers]), set(numbers)
        is_read = lambda var: var in self._results or not chosen.issuperset(program.flow.readers.get(var, ()))
        outs = [var for var in made if var in self.states and is_read(var)]
        states = [self.states[var] for var in outs]
        mapped: dict[tuple[Any, int], None] = {}
        common: dict[Any, None] = {}
        for i in numbers:
            starts = carried(program.eqns[i], self.length)
            for k, (atom, state) in enumerate(zip(program.eqns[i].invars, self.operands[i], strict=True)):
                if not is_literal(atom) and atom not in made and k not in starts:
                    if isinstance(state, Positions):
                        mapped[atom, state.dim] = None
                    else:
                        common[atom] = None
        if not all(is_outermost(var, state, self.length) for var, state in zip(outs, states, strict=True)):
            return None
        if len({var for var, _ in mapped}) < len(mapped) or not common.keys().isdisjoint(var for var, _ in mapped):
            return None
        constants = self._constants(common)
        read = variables(atom for i in constants.values() for atom in program.eqns[i].invars)
        common = {var: None for var in (*common, *read) if var not in constants}
        eqns = [program.eqns[i] for i in sorted({*numbers, *constants.values()})]
        axes = [state.dim if isinstance(state, Positions) else None for state in states]
        inside = sum(array_bytes(var) for var in made if isinstance(self.states.get(var), Positions))
        seed = next((i for i in numbers if is_loop(program.eqns[i], self.length)), self.seed)
        return Recurrence(seed, self.length, self._reverse, eqns, list(common), list(mapped), outs, axes, inside)

    def _possible(self, atom: Any) -> Iterator[State]:
        yield from super()._possible(atom)
        if not is_literal(atom) and not self.is_constant(atom):
            for dim, size in enumerate(shape_of(atom)):
                if size > self.length and size % self.length == 0:
                    yield Positions(dim, size // self.length)

    def is_constant(self, atom: Any) -> bool:
        """Whether it is one number, repeated, or made of such."""
        if super().is_constant(atom):
            return True
        eqn = None if is_literal(atom) else self.program.flow.makers.get(atom)
        if eqn is None or not shape_of(atom) or eqn.primitive.name not in _OF_CONSTANTS or len(eqn.outvars) > 1:
            return False
        return all(self.is_constant(one) for one in eqn.invars if shape_of(one))

    def _constants(self, common: Collection[Any]) -> dict[Any, int]:
        """What chunks make for themselves: constants with steps among what they share, with the numbers of the equations."""
        waiting, found = [var for var in common if self.is_constant(var)], dict[Any, int]()
        for var in waiting:
            if var not in found and self.is_constant(var):
                found[var] = self.program.flow.place[var]
                waiting += variables(self.program.eqns[found[var]].invars)
        return found
