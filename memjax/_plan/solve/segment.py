"""A stretch of a program with its part of the backward pass, and the ways to keep or run again what that part reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from memjax._core.program import costs
from memjax._core.program.costs import array_bytes
from memjax._core.program.dataflow import Dataflow, aliases, made_by, variables
from memjax._core.program.working import Moment, fullest_moment, hoisted_bytes, lent_to
from memjax._plan.codes import Codes
from memjax._plan.schedule.execute import LoopPlan
from memjax._plan.solve.order import as_compiled, freeing_first, in_time
from memjax._plan.solve.subsets import Problem, Subset, coded_subsets, exact_subsets


class Segment(NamedTuple):
    """A stretch of the forward pass and what of the backward pass has its turn with it.

    Attributes:
      eqns: of the forward pass.
      backward: of the backward pass, in order.
      wanted: what `backward` reads that `eqns` make.
      crossing: what later stretches read of this one: always kept.
      entering, leaving: cotangents alive before and after.
      results: cotangents of the program's inputs.
      primal: those of `eqns` that run in the forward pass whatever is kept.
      lost: inputs of `eqns` that are gone in the backward pass: what a loop carries.
      outputs: of the forward pass.
      places: bytes of arrays that may lie in the memory of results.
      gathered: what it reads of inputs that are gathered for it.
      slices: of a turn of a loop, its inputs that are slices of what the loop scans over.
    """

    eqns: Sequence[Any]
    backward: Sequence[Any]
    wanted: Sequence[Any]
    crossing: Sequence[Any]
    entering: Sequence[Any]
    leaving: Sequence[Any]
    results: Sequence[Any]
    primal: Sequence[Any]
    lost: Sequence[Any] = ()
    outputs: Sequence[Any] = ()
    places: Sequence[int] = ()
    gathered: Sequence[Any] = ()
    slices: Sequence[Any] = ()


class Option(NamedTuple):
    """What to keep of a segment.

    Attributes:
      kept: variables, besides what crosses to later segments.
      nbytes: of these and of what crosses, but for what is lent.
      lent: bytes of these in the memory of results that are not there yet.
      moved: variables of a loop's body that are kept in the memory of the host.
      seconds: spent on running again, and on keeping.
      working: the most bytes alive in the backward pass of the segment, on CPUs also in its forward pass, what is kept of it
        included.
      coded: variables that are kept in codes.
      coded_nbytes: of these codes.
      parts: of a loop, for each part of its turns how many they are, in the order of what is scanned over, and the option for its
        body.
      in_blocks: of a loop, the plan by which its turns run again in blocks; None: they do not.
      states_nbytes: of a loop that does, the bytes of the states that are kept for it.
    """

    kept: tuple[Any, ...]
    nbytes: int
    seconds: float
    working: int
    parts: tuple[tuple[int, Option], ...] = ()
    coded: tuple[Any, ...] = ()
    coded_nbytes: int = 0
    lent: int = 0
    moved: tuple[Any, ...] = ()
    in_blocks: LoopPlan | None = None
    states_nbytes: int = 0

    @property
    def kept_nbytes(self) -> int:
        """Bytes of what is kept on the device besides what crosses, codes included; in a loop of all turns."""
        inside = self.parts or ((1, self),)
        if self.in_blocks is not None:
            inside = tuple((self.in_blocks.tail, one) for _, one in inside)
        return self.states_nbytes + sum(
            turns * (one.coded_nbytes + sum(map(array_bytes, one.kept))) for turns, one in inside
        )


def options(
    segment: Segment, rates: costs.Device, free: set[Any], codes: Codes | None = None, *, is_loop: bool = False
) -> list[Option]:
    """The options of which none takes more of both bytes and seconds than another; the fewest bytes first.

    With `codes` such options with something in few bits are among them, too; the exact ones stay.

    What `free` has, and what earlier stretches make, is there anyhow; but not what is `lost`, which can only be kept.
    """
    turn = BackwardTurn(segment, rates, free, is_loop=is_loop)
    flow, is_known, wanted = turn.flow, turn.is_known, turn.wanted
    again = flow.needed(wanted, is_known)
    in_memory = costs.stored(
        [*again, *segment.backward], [*is_known, *segment.results, *segment.leaving], rates.platform
    )
    seconds = {id(eqn): costs.seconds(eqn, rates, in_memory.__contains__) for eqn in again}
    written = costs.stored(segment.primal, segment.crossing, rates.platform, writes_shared=True)

    copying = lambda nbytes: costs.stacking_seconds(nbytes, rates) if is_loop else 0.0

    def to_keep(var: Any) -> float:
        """It is read, and, unless the forward pass does so anyway, written."""
        return array_bytes(var) * (1 if var in written else 2) / rates.nbytes + copying(array_bytes(var))

    def to_code(var: Any, nbytes: int) -> float:
        return costs.coding_seconds(array_bytes(var), rates) + copying(nbytes)

    crossing = sum(map(array_bytes, turn.handed_on)) + turn.hoisted_nbytes

    def option(subset: Subset) -> Option:
        kept, coded = subset.kept, subset.coded
        rerun = turn.again(subset)
        time = sum(seconds[id(eqn)] for eqn in rerun) + sum(map(to_keep, kept))
        time += sum(to_code(code.of, code.nbytes) for code in coded)
        coded_nbytes = sum(code.nbytes for code in coded)
        lent = turn.lent(subset)
        nbytes = crossing + sum(map(array_bytes, kept)) + coded_nbytes - lent
        coded_vars = tuple(code.of for code in coded)
        return Option(
            tuple(kept), nbytes, time, turn.peak(subset, rerun).nbytes - lent, (), coded_vars, coded_nbytes, lent
        )

    problem = Problem(Dataflow(again), wanted, is_known, seconds, to_keep, to_code, flow.names)
    found = [option(subset) for subset in exact_subsets(problem)]
    if codes is not None:
        fastest = min((one.seconds for one in found), default=0.0)
        for subset in coded_subsets(problem, codes):
            # Where everything fits nothing is in codes: these take longer than keeping what is in them.
            more = sum(to_code(code.of, code.nbytes) - to_keep(code.of) for code in subset.coded)
            one = option(subset)
            found += [one._replace(seconds=max(one.seconds, fastest + more))] if subset.coded else []
        found.sort(key=lambda one: (one.nbytes, one.seconds))
    return found


class BackwardTurn:
    """The turn of a segment in the backward pass, for any way to keep something of it.

    Args:
      segment, rates, free, is_loop: as for `options`.

    Attributes:
      flow: of the segment's equations of the forward pass.
      is_known: variables that the backward pass has without keeping them.
      wanted: what else the backward pass reads of the segment.
      handed_on: what crosses to later segments. Of several names for the same bytes one counts; none where an earlier stretch
        makes these.
      hoisted_nbytes: of what the compiler makes at the start of the program.
    """

    def __init__(self, segment: Segment, rates: costs.Device, free: set[Any], *, is_loop: bool = False):
        self._segment, self._platform, self._is_loop = segment, rates.platform, is_loop
        self.flow = flow = Dataflow(segment.eqns)
        made = flow.place.keys()
        self.is_known = {*(free & made), *segment.crossing, *flow.outside} - set(segment.lost)
        self.wanted = [var for var in dict.fromkeys(segment.wanted) if var not in self.is_known]
        self.handed_on = [*({flow.names.get(var, var) for var in segment.crossing} & made)]
        self.hoisted_nbytes = hoisted_bytes(segment.backward, rates.platform)
        self._backward = as_compiled(segment.backward, rates.platform)
        self._names = aliases(self._backward, flow.names)
        self._reads = {id(eqn): variables(eqn.invars) for eqn in self._backward}
        self._reads |= zip(map(id, flow.eqns), flow.reads, strict=True)
        self._forwards: dict[tuple[int, ...], Dataflow] = {}

    def again(self, subset: Subset) -> list[Any]:
        """The equations that run again."""
        return self.flow.needed(self.wanted, {*self.is_known, *subset.kept, *(code.of for code in subset.coded)})

    def lent(self, subset: Subset) -> int:
        """Bytes of what is kept that lie in the memory of results."""
        return lent_to([*map(array_bytes, self.handed_on), *map(array_bytes, subset.kept)], self._segment.places)

    def peak(self, subset: Subset, again: Sequence[Any]) -> Moment:
        """The moment with the most bytes alive, `again` running again; on CPUs that of the forward pass if that has more."""
        segment, platform = self._segment, self._platform
        # A code is read where what it decodes to is.
        again = [*(code.decode for code in subset.coded), *again]
        # XLA:CPU runs an operator as soon as its operands are there. So recomputation does not wait until it is needed.
        run = self._flow([*again, *self._backward] if platform == "cpu" else in_time(again, self._backward))
        in_codes = [code.variable for code in subset.coded]
        here = [var for var in (*subset.kept, *in_codes, *segment.crossing, *segment.gathered) if var in run.read]
        elsewhere = run.outside.keys() - set(here) - set(segment.entering)
        entering = [*segment.entering, *here]
        of = lambda order: fullest_moment(
            *(order, elsewhere, entering, segment.leaving, segment.results, platform, self._names),
            is_loop=self._is_loop,
        )
        found = of(run)
        if platform == "cpu":
            return max(found, self._in_forward(subset), key=lambda moment: moment.nbytes)
        # Of several schedules the compiler takes the one of the least memory.
        stays = [*segment.leaving, *elsewhere]
        return min(*(found, of(freeing_first(run, segment.results, stays, platform))), key=lambda moment: moment.nbytes)

    def _flow(self, eqns: Sequence[Any]) -> Dataflow:
        """The dependences of equations, which are looked at for each subset."""
        found = Dataflow(eqns)
        found.reads = [self._reads.get(id(eqn)) or variables(eqn.invars) for eqn in eqns]
        return found

    def _in_forward(self, subset: Subset) -> Moment:
        """The moment with the most bytes alive in the forward pass of the segment, besides what was there before."""
        segment, flow = self._segment, self.flow
        kept, coded = subset
        stays = [*segment.crossing, *kept, *(code.of for code in coded)]
        chosen = {id(eqn) for eqn in (*segment.primal, *flow.needed(stays))}
        eqns = [eqn for eqn in segment.eqns if id(eqn) in chosen]
        if coded:
            encodes = {code.of: code.encode for code in coded}
            eqns = [encodes[var] for var in encodes.keys() - flow.place.keys()] + [
                one for eqn in eqns for one in (eqn, *(encodes[out] for out in made_by([eqn]) if out in encodes))
            ]
            stays = [*segment.crossing, *kept, *(code.variable for code in coded)]
        numbers = tuple(map(id, eqns))
        if numbers not in self._forwards:  # most subsets have it in common
            self._forwards[numbers] = self._flow(eqns)
        run = self._forwards[numbers]
        resident = run.read.keys() - flow.place.keys() - set(segment.gathered)
        return fullest_moment(run, resident, segment.gathered, stays, segment.outputs, self._platform)
