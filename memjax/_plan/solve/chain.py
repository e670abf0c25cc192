"""The program as a chain of stretches, and the frontier of time against memory over all ways to divide and keep.

From the last piece to the first: R(i), the frontier of what pieces i, ... take, is the best of R(j) after each option for the
stretch from i to j. With bytes b and seconds t of the rest, an option takes max(working, kept + b) bytes and its own seconds
more. All of the frontier is kept, so that one solution answers for every budget.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from memjax._core.program import costs
from memjax._core.program.costs import array_bytes
from memjax._core.program.dataflow import Dataflow, is_literal, made_by, read_by, variables
from memjax._core.program.jaxpr import Program
from memjax._core.program.primitives import RENAMING, expensive
from memjax._plan.blocks import ends_of_blocks
from memjax._plan.codes import Codes, codes_of, codes_of_loop
from memjax._plan.derivative import LoopPair, Passes
from memjax._plan.early.inside import loops_of
from memjax._plan.memory.lent import lent_to_pieces
from memjax._plan.solve.loops import loop_options
from memjax._plan.solve.phases import available_anywhere, backward_turns, cut_points, gathered
from memjax._plan.solve.segment import Option, Segment, options

_LONGEST = 4  # pieces in a stretch
_MOST_POINTS = 1500


class Choice(NamedTuple):
    """One stretch of a plan: equations `start` to `stop` of the forward pass, and what is kept of them."""

    start: int
    stop: int
    option: Option


class Chain:
    """What a derivative can keep and run again.

    Args:
      derivative: the passes; the attribute is what they are in plans.
      rates: of the device.
      compress, offload: whether something may be kept in codes, or on the host.
      pack: whether booleans may be kept as bits.
      solved: whether the frontier is wanted.
      whole: the chain of the whole passes, if these are a device's part of them. Both are cut alike.

    Attributes:
      cuts: where the pieces begin, as numbers of equations.
      turns: for each equation of the backward pass the piece in whose turn it runs.
      base_seconds: predicted time of a step that runs nothing again.
      loops: by number of an equation of the forward pass that is a loop, the pair of loops.
      codes: of the forward pass, if something may be kept in codes.
    """

    def __init__(
        self,
        derivative: Passes,
        rates: costs.Device,
        *,
        compress: bool = False,
        offload: bool = False,
        pack: bool = False,
        solved: bool = True,
        whole: Chain | None = None,
    ):
        self.derivative, self.rates = derivative, rates = derivative.in_plans(rates.platform), rates
        self._offload, self._compress = offload, compress
        program, backward = derivative.forward, derivative.backward
        self.free = available_anywhere(program, program.invars)
        self._gathered = gathered(program, self.free)
        pairs = {id(pair.forward): pair for pair in loops_of(derivative)}
        self.loops: dict[int, LoopPair] = {i: pairs[id(e)] for i, e in enumerate(program.eqns) if id(e) in pairs}
        self.codes = codes_of(derivative, self.free, compress=compress) if compress or pack else None
        alone = [pair.forward for pair in self.loops.values()]
        if whole is None:
            cuts, n = cut_points(program, derivative.outputs, self.free, alone), len(program.eqns)
            self.cuts = [0, *sorted({*cuts, *ends_of_blocks(program)} - {0, n}), n]
            self.turns = backward_turns(program, backward, self.cuts, self.free)
        else:
            self.cuts, self.turns = whole.cuts, whole.turns
        self._index()
        self._frontiers: dict[Any, list[Option]] = {}  # by signature of a stretch, of places instead of variables
        self._texts: dict[int, str] = {}
        self._types: dict[Any, str] = {}
        self._codes_of_loops: dict[int, Codes] = {}
        if solved:
            self._solve()

    def _index(self) -> None:
        """Where variables are made and read."""
        program, backward, n = self.derivative.forward, self.derivative.backward, len(self.cuts) - 1
        self.last_turn: dict[Any, int] = {}
        made = dict.fromkeys([*backward.invars, *backward.constvars], n)
        read: dict[Any, int] = {}
        for eqn, reads, turn in zip(backward.eqns, backward.flow.reads, self.turns, strict=True):
            made |= dict.fromkeys(eqn.outvars, turn)
            for var in reads:
                self.last_turn[var] = max(self.last_turn.get(var, -1), turn)
                read[var] = min(read.get(var, n), turn)
        # Cotangents alive between the turns of pieces `k` and `k` - 1. Not scalars: optimizers make some early for each layer, so
        # that each would have other bytes passing by, and be solved by itself.
        arrays = [(var, turn) for var, turn in made.items() if math.prod(getattr(var.aval, "shape", ())) > 1]
        self.alive = [[var for var, turn in arrays if turn >= k > read.get(var, k)] for k in range(n + 1)]
        flow = program.flow
        self.primal = flow.needed(self.derivative.outputs, always=flow.acting)
        self._is_primal = set(map(id, self.primal))
        self.by_turn: list[list[Any]] = [[] for _ in range(n)]
        for eqn, turn in zip(backward.eqns, self.turns, strict=True):
            self.by_turn[turn].append(eqn)
        self.places: list[list[int]] = [[] for _ in range(n)]  # `_places` asks for segments
        self.places = self._places(n)

    @functools.cached_property
    def _results(self) -> list[Any]:
        """Cotangents of the inputs, and what these are other names of: both are in the memory of results."""
        backward = self.derivative.backward
        found = dict.fromkeys(variables(backward.outvars))
        for eqn in reversed(backward.eqns):
            if eqn.primitive.name in RENAMING and eqn.outvars[0] in found:
                found |= {var: None for var in variables(eqn.invars) if var in backward.flow.place}
        return list(found)

    def _places(self, n: int) -> list[list[int]]:
        """For each piece the bytes of the arrays that may lie in the memory of results."""
        results = set(variables(self.derivative.backward.outvars)) - self.derivative.in_use
        names = self.derivative.forward.flow.names
        made = [[array_bytes(var) for var in made_by(eqns) if var in results] for eqns in self.by_turn]
        pieces = [self.segment(a, a + 1) for a in range(n)]
        handed_on = [{names.get(var, var) for var in piece.crossing} for piece in pieces]
        wanted = [{names.get(v, v) for v in one.wanted} - there for one, there in zip(pieces, handed_on, strict=True)]
        sizes = lambda groups: [list(map(array_bytes, group)) for group in groups]
        return lent_to_pieces(made, sizes(handed_on), sizes(wanted))

    def segment(self, a: int, b: int) -> Segment:
        """The stretch of pieces `a` to `b` - 1."""
        start, stop = self.cuts[a], self.cuts[b]
        eqns, last = self.derivative.forward.eqns[start:stop], self.derivative.forward.flow.last_reader
        made = [out for out in made_by(eqns) if out not in self.free]
        late = lambda var: last(var) >= stop or self.last_turn.get(var, -1) >= b
        backward = [eqn for turns in reversed(self.by_turn[a:b]) for eqn in turns]
        inside = set(made)
        return Segment(
            eqns=eqns,
            backward=backward,
            wanted=[var for var in read_by(backward) if var in inside],
            crossing=[var for var in made if late(var)],
            entering=self.alive[b],
            leaving=self.alive[a],
            results=self._results,
            primal=[eqn for eqn in eqns if id(eqn) in self._is_primal],
            outputs=variables(self.derivative.outputs),
            places=sorted(size for piece in self.places[a:b] for size in piece),
            gathered=[var for var in read_by([*eqns, *backward]) if var in self._gathered],
        )

    def between(self, start: int, stop: int) -> Segment:
        """The stretch of equations `start` to `stop` - 1. A program without equations has one piece, too."""
        return self.segment(*self._pieces(start, stop))

    def _pieces(self, start: int, stop: int) -> tuple[int, int]:
        return self.cuts.index(start), len(self.cuts) - 1 - self.cuts[::-1].index(stop)

    def options(self, a: int, b: int) -> list[Option]:
        """The options for the stretch of pieces `a` to `b` - 1; equal stretches share them."""
        segment = self.segment(a, b)
        if (pair := self.loops.get(self.cuts[a])) is not None and b == a + 1:
            return loop_options(pair, segment, self.rates, self.free, self.codes_of_loop(pair), offload=self._offload)
        key = self._signature(segment)
        if key not in self._frontiers:
            found = [
                one
                for one in options(segment, self.rates, self.free, self.codes)
                if not self._divides(a, b, segment, one)
            ]
            place = {out: (i, k) for i, eqn in enumerate(segment.eqns) for k, out in enumerate(eqn.outvars)}
            self._frontiers[key] = [_renamed(option, place.__getitem__) for option in found]
        here = lambda place: segment.eqns[place[0]].outvars[place[1]]
        return [_renamed(option, here) for option in self._frontiers[key]]

    def _divides(self, a: int, b: int, segment: Segment, option: Option) -> bool:
        """Whether an option keeps all that is alive at a cut inside the stretch, or what that follows from cheaply.

        Two stretches take no more then, and the second has had its turn before anything of the first runs again.
        """
        flow, last = Dataflow(segment.eqns), self.derivative.forward.flow.last_reader
        root = lambda var: flow.names.get(var, var)
        kept = set(map(root, (*option.kept, *segment.crossing)))
        before = flow.outside.keys() - kept
        there = flow.following(kept | before, lambda eqn: not expensive(eqn), flow.roots) - before
        for cut in self.cuts[a + 1 : b]:
            made = made_by(self.derivative.forward.eqns[self.cuts[a] : cut]).keys() - self.free
            if there.issuperset(root(var) for var in made if last(var) >= cut):
                return True
        return False

    def of_loop(self, pair: LoopPair | None) -> tuple[Program, Codes | None]:
        """The body of a loop, or the forward pass, and its codes."""
        return (self.derivative.forward, self.codes) if pair is None else (pair.program, self.codes_of_loop(pair))

    def codes_of_loop(self, pair: LoopPair) -> Codes | None:
        """The codes of the body of a loop, if something may be kept in codes."""
        if self.codes is None:
            return None
        if id(pair) not in self._codes_of_loops:
            free = available_anywhere(pair.program, pair.free)
            self._codes_of_loops[id(pair)] = codes_of_loop(self.derivative, pair, free, compress=self._compress)
        return self._codes_of_loops[id(pair)]

    def _signature(self, segment: Segment) -> Any:
        """Equal for stretches that are the same up to names."""
        number: dict[Any, int] = {}
        roles: dict[Any, str] = {}
        for role, members in zip("wcel", segment[2:6], strict=True):
            for var in members:
                roles[var] = roles.get(var, "") + role
        results = set(segment.results)
        need = (lambda var: None) if self.codes is None else self.codes.need
        parts: list[Any] = []
        for eqn in (*segment.eqns, *segment.backward):
            parts.append(self._text(eqn))
            for atom in (*eqn.invars, *eqn.outvars):
                if not is_literal(atom):
                    if atom not in number:
                        number[atom] = len(number)
                        same = roles.get(atom), atom in self.free, atom in self._gathered, atom in results
                        if atom not in self._types:
                            self._types[atom] = atom.aval.str_short()
                        parts.append((*same, need(atom), self._types[atom]))
                    parts.append(number[atom])
        passing = [array_bytes(v) for v in segment.entering if v not in number]
        return (len(segment.eqns), len(segment.primal), sum(passing), tuple(segment.places), *parts)

    def _text(self, eqn: Any) -> str:
        if id(eqn) not in self._texts:
            # Not what literals are: the keys of two layers' dropout differ in these, and cost the same.
            literals = [atom.aval.str_short() for atom in eqn.invars if is_literal(atom)]
            self._texts[id(eqn)] = f"{eqn.primitive.name} {eqn.params} {literals}"
        return self._texts[id(eqn)]

    def _solve(self) -> None:
        n = len(self.cuts) - 1
        self._least: list[tuple[float, float, float, tuple[Choice, ...]]] = [(0.0, 0.0, 0.0, ())] * (n + 1)
        empty = np.zeros(1)
        self._bytes, self._seconds = [empty] * (n + 1), [empty] * (n + 1)
        self._from: list[list[tuple[int, Option]]] = [[] for _ in range(n + 1)]
        self._which: list[np.ndarray] = [np.zeros((1, 2), np.int64)] * (n + 1)
        for i in range(n - 1, -1, -1):
            nbytes, seconds, which = [], [], []
            least = []
            for j in range(i + 1, min(n, i + _LONGEST) + 1):
                if j > i + 1 and any(cut in self.loops for cut in self.cuts[i:j]):
                    break
                for option in self.options(i, j):
                    nbytes.append(np.maximum(option.working, option.nbytes + self._bytes[j]))
                    seconds.append(option.seconds + self._seconds[j])
                    rest = np.arange(len(self._bytes[j]))
                    which.append(np.stack([np.full_like(rest, len(self._from[i])), rest], 1))
                    self._from[i].append((j, option))
                    rest_bytes, kept, rest_seconds, choices = self._least[j]
                    kept += option.kept_nbytes
                    peak = max(option.working, option.nbytes + rest_bytes)
                    choice = Choice(self.cuts[i], self.cuts[j], option)
                    least.append((peak, kept, rest_seconds + option.seconds, (choice, *choices)))
            self._least[i] = min(least, key=lambda found: found[:3])
            self._bytes[i], self._seconds[i], self._which[i] = _frontier(
                np.concatenate(nbytes), np.concatenate(seconds), np.concatenate(which)
            )

    @functools.cached_property
    def base_seconds(self) -> float:
        program, outputs = self.derivative.forward, self.derivative.outputs
        read = {*variables(outputs), *read_by(self.primal)}
        eqns = [eqn for eqn in self.primal if not read.isdisjoint(eqn.outvars)]
        primal = dataclasses.replace(program, outvars=outputs, eqns=eqns)
        return sum(costs.program_seconds(one, self.rates) for one in (primal, self.derivative.backward))

    @property
    def frontier(self) -> list[tuple[int, float]]:
        """(bytes, seconds) of the ways that none of the others beats in both; the fewest bytes first."""
        return list(zip(self._bytes[0].astype(int).tolist(), self._seconds[0].tolist(), strict=True))

    def least_choices(self) -> list[Choice]:
        """The way of the least memory that keeps least: the model may be wrong about what is kept for nothing."""
        choices = list(self._least[0][3])
        # The least of a stretch and what follows it need not keep the least, where another stretch takes more.
        peak = peak_of(choices)
        for at in range(len(choices) - 1, -1, -1):
            one = choices[at]
            for option in sorted(self.options_of(one), key=lambda option: (option.kept_nbytes, option.seconds)):
                if option.kept_nbytes >= one.option.kept_nbytes:
                    break
                changed = [*choices[:at], one._replace(option=option), *choices[at + 1 :]]
                if peak_of(changed) <= peak:
                    choices = changed
                    break
        return choices

    def options_of(self, choice: Choice) -> list[Option]:
        """The options for the stretch of a choice."""
        start, stop = self._pieces(choice.start, choice.stop)
        return [option for j, option in self._from[start] if j == stop]

    def choices(self, nbytes: float) -> list[Choice]:
        """The fastest way within so many bytes, or that of the least memory if there is none."""
        point = max(int(np.searchsorted(self._bytes[0], nbytes, side="right")) - 1, 0)
        found, i, n = [], 0, len(self.cuts) - 1
        while i < n:
            number, point = self._which[i][point]
            j, option = self._from[i][number]
            found.append(Choice(self.cuts[i], self.cuts[j], option))
            i = j
        return found


def peak_of(choices: Sequence[Choice]) -> float:
    """The bytes of a way through the chain."""
    peak = 0.0
    for choice in reversed(choices):
        peak = max(choice.option.working, choice.option.nbytes + peak)
    return peak


def _renamed(option: Option, name: Callable[[Any], Any]) -> Option:
    """The option of variables that are called otherwise."""
    return option._replace(kept=tuple(map(name, option.kept)), coded=tuple(map(name, option.coded)))


def _frontier(nbytes: np.ndarray, seconds: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    order = np.lexsort((seconds, nbytes))
    nbytes, seconds, which = nbytes[order], seconds[order], which[order]
    least = np.minimum.accumulate(np.concatenate([[np.inf], seconds[:-1]]))
    better = seconds < least - 1e-9 * seconds[:1]
    nbytes, seconds, which = nbytes[better], seconds[better], which[better]
    if len(nbytes) > _MOST_POINTS:  # of points that are close the fastest, and always the least
        width = max((nbytes[-1] - nbytes[0]) / _MOST_POINTS, 1.0)
        bucket = ((nbytes - nbytes[0]) / width).astype(np.int64)
        stays = np.concatenate([bucket[1:] != bucket[:-1], [True]])
        stays[0] = True
        nbytes, seconds, which = nbytes[stays], seconds[stays], which[stays]
    return nbytes, seconds, which
