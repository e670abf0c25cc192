"""Parts of a program that may run tile by tile: from a large product on, as far as positions do not mix.

A product whose result is large beside what goes in is a seed: logits, the hidden values of a feed-forward layer. For each of
its dimensions the region grows along the equations in which the walk of this package keeps positions apart, up to where the
fewest bytes come out: a sum over positions, or one array of the width of the residual stream. Operands from outside hold
positions too where that is the only way for an equation to keep them apart (labels, a mask). Large ones that follow cheaply
from small ones (one-hot labels) are made inside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from memjax._core.compat import is_backward, name_stack, primitive_name
from memjax._core.positions.growth import Growth, Sources
from memjax._core.positions.walk import Positions, State, Summed, shape_of, shared
from memjax._core.program.costs import array_bytes
from memjax._core.program.dataflow import is_literal, made_by, read_by, variables
from memjax._core.program.jaxpr import Program
from memjax._core.program.primitives import VIEWS, expensive

# A seed's result must be at least 4 times as large as one operand, the one that the positions come from. A region is used only if
# the seed's result has at least 4 / 2 times the bytes with positions that go in and come out. Less is not worth a loop.
_LARGE = 4
_SMALL = 8  # times smaller than the seed: not worth making inside
_LEAST_LENGTH = 4
_LARGEST_SUM = 1024  # elements
_TRANSPOSES = VIEWS - {"convert_element_type", "copy"}


class Region(NamedTuple):
    """A part of a program that may run tile by tile.

    Attributes:
      seed: number of the equation whose result is large.
      dim: of that result, which holds positions.
      length: how many.
      eqns: of the region, in order.
      shared: variables that all tiles read.
      mapped: variables of which each tile reads its positions, and in which dimension these are. None is in both.
      outs: variables that are read outside.
      axes: where these have their positions; None: sums.
    """

    seed: int
    dim: int
    length: int
    eqns: list[Any]
    shared: list[Any]
    mapped: list[tuple[Any, int]]
    outs: list[Any]
    axes: list[int | None]

    @property
    def product(self) -> Any:
        """The equation whose result is large."""
        return next(eqn for eqn in self.eqns if primitive_name(eqn) == "dot_general")

    @property
    def moved(self) -> int:
        """Bytes with positions that go in and come out."""
        return sum(array_bytes(var) for var, _ in self.mapped) + sum(map(array_bytes, self.outs))


def regions(program: Program, *, gradients: bool = False) -> list[Region]:
    """The regions of a program that do not overlap, the largest first.

    Args:
      program: straight lines of equations.
      gradients: it has gradients in it, which are sums over positions of any size: those of what tiles share.
    """
    flow, leading = program.flow, None
    if gradients:
        backward = [i for i, eqn in enumerate(program.eqns) if is_backward(name_stack(eqn))]
        leading = read_by(flow.needed((), always=backward))
    sources, taken = Sources(program), set[int]()
    found: list[Region] = []
    products = [i for i, eqn in enumerate(program.eqns) if primitive_name(eqn) == "dot_general"]
    for seed in sorted(products, key=lambda i: -array_bytes(program.eqns[i].outvars[0])):
        if seed in taken:
            continue
        growths = (Growth(program, sources, seed, dim, leading) for dim in _free_dims(program.eqns[seed]))
        grown = [region for growth in growths if (region := _Cut(growth).region())]
        if grown:
            best = min(grown, key=lambda region: (region.moved, -region.length))
            places = {flow.place[eqn.outvars[0]] for eqn in best.eqns}
            if taken.isdisjoint(places):
                taken |= places
                found.append(best)
    return found


def _free_dims(eqn: Any) -> Iterator[int]:
    """The dimensions of a product that come from an operand that is small beside the result."""
    (contracted, _), batch = eqn.params["dimension_numbers"]
    left, right = eqn.invars
    if any(batch):
        return
    first = len(shape_of(left)) - len(contracted)
    for dim, size in enumerate(shape_of(eqn.outvars[0])):
        operand = left if dim < first else right
        if size >= _LEAST_LENGTH and array_bytes(eqn.outvars[0]) >= _LARGE * array_bytes(operand):
            yield dim


Mapped = dict[tuple[Any, int], None]


class _Cut:
    """The part of a growth that the fewest bytes leave.

    These are its first equations, and those that make some of their operands inside.
    """

    def __init__(self, growth: Growth):
        self._growth, self._program, self._flow = growth, growth.program, growth.program.flow
        self._seed_bytes = array_bytes(self._program.eqns[growth.seed].outvars[0])
        self._before: dict[int, None] = {}  # equations that make operands inside

    def region(self) -> Region | None:
        """None where it is no loop, or not worth one."""
        growth, inside = self._growth, self._narrowest()
        outs = self._read_outside(inside)
        states = [growth.states[var] for var in outs]
        if not outs or any(isinstance(state, Positions) and state.inner != 1 for state in states):
            return None
        axes = [state.dim if isinstance(state, Positions) else None for state in states]
        # Otherwise the features of a hidden layer would be mistaken for positions, and its result for a sum over them.
        large = (axis is None and var.aval.size > _LARGEST_SUM for var, axis in zip(outs, axes, strict=True))
        if growth.leading is None and any(large):
            return None
        pairs = zip(outs, axes, strict=True)
        if any(axis is not None and shape_of(var)[axis] != growth.length for var, axis in pairs):
            return None
        if not all(self._split(var, state) for var, state in self._merged(inside)):
            return None
        mapped, common = self._operands(inside, set(inside))
        mapped = {key: None for key in mapped if not self._make_inside(*key)}
        common = [var for var in common if not self._absorb_view(var, self._before)]
        more_mapped, more = self._operands(self._before, self._before)
        mapped, common = mapped | more_mapped, [*common, *more]
        constants: dict[int, None] = {}
        common = [var for var in common if not (growth.is_constant(var) and self._absorb_view(var, constants))]
        self._before |= constants
        numbers = {*inside, *self._before}
        for i in constants:  # the number that is repeated
            common += [var for var in self._flow.reads[i] if self._flow.place.get(var) not in numbers]
        common = list(dict.fromkeys(common))
        if len({var for var, _ in mapped}) < len(mapped) or {var for var, _ in mapped}.intersection(common):
            return None
        eqns = [self._program.eqns[i] for i in sorted(numbers)]
        region = Region(growth.seed, growth.dim, growth.length, eqns, common, list(mapped), outs, axes)
        return None if region.moved * _LARGE > self._seed_bytes * 2 else region

    def _narrowest(self) -> list[int]:
        """The prefix of the growth's equations for which the bytes that go in, plus those that come out, are fewest."""
        growth, flow, inside = self._growth, self._flow, self._growth.inside
        end, results = len(inside), set(variables(self._program.outvars))
        order = {i: k for k, i in enumerate(inside)}
        last: dict[Any, int] = {}
        for i in inside:
            for out in self._program.eqns[i].outvars:
                readers = flow.readers.get(out, [])
                last[out] = end if out in results else max((order.get(one, end) for one in readers), default=-1)
        best, count = self._seed_bytes, 0
        alive, values = 0, 0  # bytes, and how many of them are no sums
        ends: dict[int, list[Any]] = {}
        for k, i in enumerate(inside):
            outs = [out for out in self._program.eqns[i].outvars if last[out] > k]
            for out in outs:
                ends.setdefault(last[out], []).append(out)
            for sign, some in ((1, outs), (-1, ends.get(k, ()))):
                alive += sign * sum(map(array_bytes, some))
                values += sign * sum(not isinstance(growth.states[out], Summed) for out in some)
            total = alive + growth.entered[k]
            # What is done to a sum alone, a division by a count, belongs to it: gradients are rounded once then.
            if total < best or (total == best and not values):
                best, count = total, k + 1
        return inside[:count]

    def _read_outside(self, inside: Collection[int]) -> list[Any]:
        """What equations make that others read, or that are results of the program; what is read first comes first."""
        chosen, results = set(inside), set(variables(self._program.outvars))
        first: dict[Any, int] = {}
        for var in made_by(self._program.eqns[i] for i in inside):
            reader = next((one for one in self._flow.readers.get(var, ()) if one not in chosen), None)
            if reader is not None or var in results:
                first[var] = len(self._program.eqns) if reader is None else reader
        return sorted(first, key=lambda var: first[var])

    def _operands(self, numbers: Iterable[int], within: Collection[int]) -> tuple[Mapped, list[Any]]:
        """What equations read that those `within` do not make: with positions and in which dimension, and without."""
        mapped: Mapped = {}
        common = []
        for i in numbers:
            for atom, state in zip(self._program.eqns[i].invars, self._growth.operands[i], strict=True):
                if not is_literal(atom) and self._flow.place.get(atom) not in within:
                    if not isinstance(state, Positions):
                        common.append(atom)
                    elif state.inner == 1:  # others are made inside
                        mapped[atom, state.dim] = None
        return mapped, common

    def _merged(self, inside: Collection[int]) -> list[tuple[Any, Positions]]:
        """Operands from outside that have positions merged with other dimensions."""
        return [
            (atom, state)
            for i in inside
            for atom, state in zip(self._program.eqns[i].invars, self._growth.operands[i], strict=True)
            if isinstance(state, Positions) and state.inner != 1 and self._flow.place.get(atom) not in inside
        ]

    def _split(self, var: Any, state: Positions) -> bool:
        """Make an operand inside, from what has positions in a dimension of their own."""
        i = self._flow.place[var]
        if i in self._before:
            return self._growth.states[var] == state
        if len(self._program.eqns[i].outvars) > 1 or (found := self._growth.kept_apart(i, state)) is None:
            return False
        self._growth.operands[i], (self._growth.states[var],) = found
        self._before[i] = None
        return all(self._split(atom, one) for atom, one in self._merged([i]))

    def _make_inside(self, var: Any, dim: int) -> bool:
        """Make an operand inside if what that reads with positions is much smaller."""
        trial = dict(self._before)
        if not self._absorb(var, Positions(dim, 1), trial):
            return False
        read = {var for var, _ in self._operands(trial, trial)[0]}
        largest = max(map(array_bytes, made_by(self._program.eqns[i] for i in trial)))
        if 2 * sum(map(array_bytes, read)) > largest:
            return False
        self._before = trial
        return True

    def _absorb(self, var: Any, state: State, before: dict[int, None]) -> bool:
        """Make an operand inside that is large, or is made from what is, if it follows cheaply from what is small."""
        i = self._flow.place.get(var)
        if i is None or not self._may_be_made(i, var):
            return False
        if i in before:
            return self._growth.states[var] == state
        if len(self._program.eqns[i].outvars) > 1 or (found := self._growth.kept_apart(i, state)) is None:
            return False
        self._growth.operands[i], (self._growth.states[var],) = found
        before[i] = None
        for atom, one in zip(self._program.eqns[i].invars, found[0], strict=True):
            if isinstance(one, Positions):
                self._absorb(atom, one, before)
        return True

    def _may_be_made(self, i: int, var: Any) -> bool:
        """Whether an equation may run inside, and its result, or what that follows cheaply from, is large beside the seed."""
        eqn = self._program.eqns[i]
        if expensive(eqn):  # unless nothing outside of the region reads a product: the gate of a feed-forward layer
            readers = self._flow.readers.get(eqn.outvars[0], [])
            if primitive_name(eqn) != "dot_general" or not set(self._growth.inside).issuperset(readers):
                return False
        return any(array_bytes(one) * _SMALL >= self._seed_bytes for one, _ in self._growth.sources.behind(var))

    def _absorb_view(self, var: Any, before: dict[int, None]) -> bool:
        """Make a shared operand inside that is a constant, or a transpose, which the compiler makes part of the product."""
        i = self._flow.place.get(var)
        if i is None:
            return False
        eqn = self._program.eqns[i]
        if not (self._growth.is_constant(var) or primitive_name(eqn) in _TRANSPOSES):
            return False
        self._growth.operands[i] = [shared(shape_of(atom)) for atom in eqn.invars]
        before[i] = None
        if not is_literal(eqn.invars[0]):
            self._absorb_view(eqn.invars[0], before)
        return True
