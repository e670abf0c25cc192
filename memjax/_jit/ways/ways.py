"""The ways to run a step, and what they are predicted to hold and to take."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from memjax._core.compat import primitive_name
from memjax._core.positions.walk import Mixed
from memjax._core.program import costs
from memjax._jit.account import donated_results
from memjax._jit.candidates import DoesNotFitError
from memjax._jit.derivatives.body import Acting, Body
from memjax._jit.derivatives.inner import has_inner
from memjax._jit.fit import Fit
from memjax._jit.step_plan import StepPlan, StepPoint
from memjax._jit.updates.in_loop import Moved, with_updates_in_loops
from memjax._jit.ways.numbers import Numbers
from memjax._jit.ways.predictions import Predictions
from memjax._jit.ways.shapes import Lower, with_shapes
from memjax._plan.batch.examples import batch_of
from memjax._plan.batch.microbatches import PASSES_OF_SUMS, Sums, in_microbatches, sum_bytes
from memjax._plan.budget.search import OF_ONE
from memjax._plan.memory.layout import Layout
from memjax._plan.memory.rings import ring_notes
from memjax._plan.tile.passes import TileOn
from memjax._plan.tile.recurrences import CHUNKS

_IN_LOOPS: dict[str, Any] = {"updates_in_loops": True}
_ABOUT = 1.03  # times as slow: predictions are no better
_TILES = 64  # the logits of a tile take such a part of the budget: beside them a tile has others as large


class Ways:
    """A step as it is written, in tiles, in microbatches: in each of these ways its derivatives may keep less.

    Args:
      traced: the step.
      allow: what plans may do.
      layout: of its inputs.
      device: one that it runs on.
      arguments, results: bytes of a device for them, about; results that are donated arguments do not count.
      compile_with: compiles the step with passes run otherwise than they are.
      lower: lowers it; None: on a mesh all arrays are taken to be split evenly.

    Attributes:
      body, as_written: the step as it is written.
      beside: bytes of a device that no plan changes, about.
      way: which of at most how many ways is looked at for the least memory; None: none so far.
    """

    def __init__(
        self,
        traced: Any,
        allow: Sequence[str],
        layout: Layout,
        device: Any,
        arguments: int,
        results: int,
        compile_with: Callable[[Body, Acting], Any],
        lower: Lower | None = None,
    ):
        self._traced, self._allow, self._layout, self._device = traced, allow, layout, device
        self.beside, self._results, self._compile_with = arguments + results, results, compile_with
        self._lower = lower
        self._no_microbatches: str | None = None  # why
        self.way: tuple[int, int] | None = None
        self._predictions = Predictions(layout.devices)
        self.body = Body(traced.jaxpr)
        self.as_written = self._fit_of(self.body)

    def _fit_of(self, body: Body, sums: Sums = Sums()) -> Fit:  # noqa: B008 (it is immutable)
        note_memory(body, self._traced, self._device)
        allowed: dict[str, Any] = {"compress": "compress" in self._allow, "offload": "offload" in self._allow}
        compile_with = lambda acting: self._compile_with(body, acting)
        if sums.nbytes:  # they are all that the loop over microbatches returns
            for one in body.every():
                one.around = 0
        layout = functools.partial(self._layout_of, body)
        options = allowed | {"sums": sums, "predictions": self._predictions}
        return Fit(body, layout, compile_with, self.beside + sums.nbytes, **options)

    def _layout_of(self, body: Body) -> Layout:
        """The layout of the step's inputs, with the shapes of what is computed where it is on a mesh."""
        if body is self.body:
            return self._layout_as_written
        return self._layout if self._lower is None else with_shapes(self._layout, body, self._lower)

    @functools.cached_property
    def _layout_as_written(self) -> Layout:
        return self._layout if self._lower is None else with_shapes(self._layout, self.body, self._lower)

    def fastest(self, room: int | str) -> tuple[StepPlan, Any]:
        """The plan of the way that is predicted to be the fastest, and the step compiled with it; of the next if it does not fit.

        Where none of these fits, the step runs in more microbatches, and then in the way that takes the least.

        Raises:
          DoesNotFitError: no way fits; it is the one that takes the least.
        """
        ways = [self.as_written, *self._changed(room)]
        if isinstance(room, str):
            return self._leanest(ways, room, {})
        refused: dict[Fit, DoesNotFitError] = {}
        numbers = self._numbers
        for some in (ways + (numbers.worth_a_try(room) if numbers else []), self._in_more_parts(room)):
            fits = self._by_time(some, room)
            for fit, following in itertools.zip_longest(fits, fits[1:]):
                is_fast = following is not None and following.rank(room).cost > _ABOUT * fit.rank(room).cost
                try:
                    return fit.within(room, thoroughly=False, patiently=is_fast)
                except DoesNotFitError as error:
                    refused[fit] = error
        return self._leanest(ways, room, refused)

    def least_predicted(self, room: int) -> tuple[StepPlan, Any]:
        """The plan that is predicted to take the least, and the step compiled with it, and with no other: for a budget that what
        no plan changes is more than."""
        ways = [self.as_written, *self._changed("min"), *(self._numbers.most() if self._numbers else [])]
        found = min(ways, key=lambda fit: fit.rank("min").cost).least_predicted(room)
        # Where parameters outweigh the rest, the step as it is written may take less.
        return self.as_written.least_of(*found) if self.as_written.plain_nbytes < found[0].nbytes else found

    def _in_more_parts(self, room: int) -> Iterator[Fit]:
        """The step in so many microbatches that it fits, by what is compiled."""
        fit = self._numbers.that_fits(room) if self._numbers else None
        if fit is not None:
            yield fit

    def _by_time(self, ways: Iterable[Fit], room: int) -> list[Fit]:
        """Those that are predicted to fit, the fastest first.

        What is about as fast as that: rather what computes little again, of which more time is predicted wrongly.
        """
        ranks = {fit: fit.rank(room) for fit in ways}
        best = min((rank.cost for rank in ranks.values()), default=math.inf)
        order = lambda fit: (ranks[fit].cost > _ABOUT * best and ranks[fit].cost, ranks[fit].again)
        may_fit = lambda fit: ranks[fit].cost < math.inf or (fit.is_plain_compiled and fit.plain.nbytes <= room)
        return sorted(filter(may_fit, ranks), key=order)

    def _leanest(
        self, ways: Sequence[Fit], room: int | str, refused: Mapping[Fit, DoesNotFitError]
    ) -> tuple[StepPlan, Any]:
        """The plan that takes the least, or one that fits, and the step compiled with it.

        What is predicted to take more than the least that was compiled is not compiled. Of a way that was looked at thoroughly,
        what the search before that met by chance does not count: a search for so many bytes would not meet it.
        """
        parts = self._numbers.leanest() if self._numbers else None
        nbytes_of = {fit: fit.rank("min").cost for fit in ways}
        if parts is not None:
            nbytes_of[parts] = min(parts.plain.nbytes, parts.rank("min").cost)
        found: list[tuple[StepPlan, Any]] = []
        thorough = set[Fit]()
        for number, fit in enumerate(sorted(nbytes_of, key=lambda fit: nbytes_of[fit]), 1):
            self.way = number, len(nbytes_of)
            if found and nbytes_of[fit] > min(plan.nbytes for plan, _ in found):
                break
            thorough.add(fit)
            try:
                found.append(fit.within(room))
                if isinstance(room, int):
                    return found[-1]
            except DoesNotFitError as error:
                found.append((error.plan, error.program))
                assert isinstance(room, int)
                if error.plan.nbytes - self.beside > OF_ONE * (room - self.beside):
                    break
        found += [(error.plan, error.program) for fit, error in refused.items() if fit not in thorough]
        plan, program = self.as_written.least_of(*min(found, key=lambda one: one[0].nbytes))
        if isinstance(room, int) and plan.nbytes > room:
            raise DoesNotFitError(plan, program)
        return plan, program

    def frontier(self) -> list[StepPoint]:
        """Bytes that the step is predicted to hold, and its seconds, from the least memory to the least time."""
        ways = [self.as_written, *self._changed(sys.maxsize)]
        if self._numbers is not None:
            ways += self._numbers.for_frontier()
        points = sorted((point for way in ways for point in way.frontier()), key=lambda point: point[:2])
        found: list[StepPoint] = []
        least = math.inf
        for point in points:
            if point.seconds < least:
                found.append(point)
                least = point.seconds
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """Which of the ways that are allowed the step does not have, why, and what to change."""
        found, _ = [], self._numbers
        if "tile" in self._allow:
            tile_on = TileOn(self._device.platform, 0, self._layout.devices > 1)
            found += [f"tiles: {text}" for text in self.body.kept_whole(tile_on)]
        found += [self._no_microbatches] if self._no_microbatches else []
        moved = self._moved_twice or self._moved
        rings = ring_notes(self.body.every(), self._layout.shardings, lambda: self._layout_as_written)
        return (*found, *(moved.notes if moved else ()), *rings)

    @functools.cached_property
    def _numbers(self) -> Numbers | None:
        """The step in microbatches, where it has a batch."""
        if "microbatch" not in self._allow:
            return None
        if self._layout.devices > 1:
            self._no_microbatches = "microbatches: arrays lie on several devices; so far they are for one"
            return None
        try:
            batch = batch_of(self._traced.jaxpr)
        except Mixed as error:
            self._no_microbatches = no_microbatches(error)
            return None
        # Sums over microbatches lie where results will.
        sums = max(sum_bytes(batch) - self._results, 0)
        seconds = PASSES_OF_SUMS * sum_bytes(batch) / costs.device(self._device).nbytes

        def fit_in(count: int) -> Fit | None:
            try:
                parts = in_microbatches(self._traced.jaxpr, batch, count, self._device.platform)
            except Mixed as error:
                self._no_microbatches = no_microbatches(error)
                return None
            self._no_microbatches = None
            return self._fit_of(Body(parts, microbatches=count), Sums(sums, count * seconds))

        divisible = self.as_written.predicted_kept - self.beside
        return Numbers(batch.length, self.beside + sums, divisible, fit_in)

    @functools.cached_property
    def _moved(self) -> Moved | None:
        """The step with updates in loops of backward passes."""
        if self._layout.devices > 1:
            return None
        return with_updates_in_loops(self._traced.jaxpr, donated_results(self._traced), self._device.platform)

    @functools.cached_property
    def _moved_twice(self) -> Moved | None:
        """The same where its derivative is taken twice for that."""
        if "two_passes" not in self._allow or self._moved is None or not self._moved.notes:
            return None
        donated = donated_results(self._traced)
        return with_updates_in_loops(self._traced.jaxpr, donated, self._device.platform, two_passes=True)

    def _changed(self, room: int | str) -> Iterator[Fit]:
        """The whole batch at once, by another program than as it is written."""
        closed = self._traced.jaxpr
        options: dict[str, Any] = {}
        if self._moved is not None and self._moved.closed is not None:
            closed, options = self._moved.closed, _IN_LOOPS
            yield self._fit_of(Body(closed, **options))
        yield from self._tiled(closed, room, options)
        if self._moved_twice is not None and self._moved_twice.closed is not None:
            twice, of_twice = self._moved_twice.closed, {**_IN_LOOPS, "two_passes": True}
            yield self._fit_of(Body(twice, **of_twice))
            yield from self._tiled(twice, room, of_twice)
        if any(map(has_inner, self.body.every())):
            again = Body(closed, inner_again_on=costs.device(self._device), **options)
            if again.inner_again:
                yield self._fit_of(again)

    def _tiled(self, closed: Any, room: int | str, options: dict[str, Any]) -> Iterator[Fit]:
        if "tile" in self._allow:
            nbytes = room // _TILES if isinstance(room, int) else 0
            tile_on = TileOn(self._device.platform, nbytes, self._layout.devices > 1)
            if (tiled := Body(closed, tile_on, **options)).tiled:
                yield self._fit_of(tiled)
            for count in CHUNKS:
                if not (chunks := Body(closed, tile_on._replace(nbytes=0, chunks=count), **options)).tiled:
                    break
                yield self._fit_of(chunks)


def no_microbatches(mixed: Mixed) -> str:
    """Why there are none, where, and what to change, in a sentence."""
    if mixed.eqn is None:
        return f"microbatches: none, for {mixed}"
    name, where = primitive_name(mixed.eqn), mixed.where or "a place that is not known"
    if name.startswith("linear_cross_entropy"):
        fix = "Write the loss with its logits, which memjax.jit goes through in tiles"
        return f"microbatches: none, for memjax.linear_cross_entropy at {where} runs for all examples at once. {fix}"
    if "not known" in mixed.what or "is not run" in mixed.what:
        return f"microbatches: `{name}` at {where} is not known to keep examples apart: write it by operations of jax.numpy"
    fix, because = "compute that for each example alone", ""
    if "a sum over positions" in mixed.what:
        because = ": it reads a sum over all examples, which is known only after the last of them"
        fix = f"{fix} (in place of a batch norm, a norm over groups), or divide by a sum that does not depend on the parameters"
    if "batchnorm" in where.lower().replace("_", ""):
        fix = "take a norm over groups or features"
    return f"microbatches: none, for `{name}` at {where} mixes the batch{because}. To have them, {fix}"


def note_memory(body: Body, traced: Any, device: Any) -> None:
    """Notes for all passes what there is around them, and that donated arguments lend no memory.

    On GPUs donated arguments are not noted, as predictions are nearer then: a decoder of 909M parameters took 53.5 GiB as it is
    written, where 53.3 were predicted; otherwise it would be about 56.6.
    """
    body.note_around()
    if device.platform == "cpu":
        body.put_in_use(set(donated_results(traced)))
