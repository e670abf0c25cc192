"""The ways to run a step, and what they are predicted to hold and to take."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from memjax._core.program import costs
from memjax._jit.account import donated_results
from memjax._jit.batch.examples import Batch, batch_of
from memjax._jit.batch.microbatches import PASSES_OF_SUMS, counts, in_microbatches, sum_bytes
from memjax._jit.derivatives.body import Acting, Body
from memjax._jit.derivatives.inner import has_inner
from memjax._jit.fit import DoesNotFitError, Fit
from memjax._jit.step_plan import StepPlan, StepPoint
from memjax._plan.budget.search import OF_ONE
from memjax._plan.memory.layout import Layout
from memjax._plan.tile.passes import TileOn

_ABOUT = 1.03  # times as slow: predictions are no better
_TILES = 64  # the logits of a tile take such a part of the budget: beside them a tile has others as large
_PARTS = 5  # numbers of microbatches that a frontier has, at most


class Ways:
    """A step as it is written, in tiles, in microbatches: in each of these ways its derivatives may keep less.

    Args:
      traced: the step.
      allow: what plans may do.
      layout: of its inputs.
      device: one that it runs on.
      arguments, results: bytes of a device for them, about; results that are donated arguments do not count.
      compile_with: compiles the step with passes run otherwise than they are.

    Attributes:
      body, as_written: the step as it is written.
      beside: bytes of a device that no plan changes, about.
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
    ):
        self._traced, self._allow, self._layout, self._device = traced, allow, layout, device
        self.beside, self._results, self._compile_with = arguments + results, results, compile_with
        self.body = Body(traced.jaxpr)
        self.as_written = self._fit_of(self.body)

    def _fit_of(self, body: Body, sums: int = 0, seconds_of_sums: float = 0.0) -> Fit:
        note_donated(body, self._traced, self._device)
        allowed = {"compress": "compress" in self._allow, "offload": "offload" in self._allow}
        compile_with = lambda acting: self._compile_with(body, acting)
        return Fit(body, self._layout, compile_with, self.beside + sums, **allowed, seconds_of_sums=seconds_of_sums)

    def within(self, room: int | str) -> tuple[list[Fit], Iterator[Fit]]:
        """The ways that are worth a try for so many bytes of a device, and more for the case that none of these fits."""
        ways = [self.as_written, *self._changed(room)]
        batch = self._batch
        if batch is None:
            return ways, iter(())
        divisible = self.as_written.predicted_kept - self.beside
        first, others = counts(batch, divisible, room, self.beside + self._sums)
        return [*ways, *self._in_parts(first)], self._in_parts(others)

    def fastest(self, room: int | str) -> tuple[StepPlan, Any]:
        """The plan of the way that is predicted to be the fastest, and the step compiled with it; of the next if it does not fit.

        Ways that are predicted not to fit come last, the leanest first, until one is far from fitting; and with them those that
        turn out to take far more than was predicted.

        Raises:
          DoesNotFitError: no way fits; it is the one that takes the least.
        """
        refused: list[DoesNotFitError] = []
        lean: list[Fit] = []

        def tried(fit: Fit, thoroughly: bool) -> tuple[StepPlan, Any] | None:
            try:
                return fit.within(room, thoroughly)
            except DoesNotFitError as error:
                refused.append(error)
                return None

        for some in self.within(room):
            ranks = {fit: fit.rank(room) for fit in some}
            lean += [fit for fit, rank in ranks.items() if rank.cost == math.inf]
            best = min((rank.cost for rank in ranks.values()), default=math.inf)
            # What is about as fast as the best: rather what computes little again, of which more time is predicted wrongly.
            order = lambda fit, ranks=ranks, best=best: (
                ranks[fit].cost > _ABOUT * best and ranks[fit].cost,
                ranks[fit].again,
            )
            for fit in sorted(ranks, key=order):
                if ranks[fit].cost == math.inf:
                    continue
                if (found := tried(fit, thoroughly=False)) is not None:
                    return found
                lean.append(fit)
        least = {fit: fit.rank("min").cost for fit in lean}
        for fit in sorted(lean, key=lambda fit: least[fit]):
            if least[fit] > OF_ONE * min(least.values()):
                break
            if (found := tried(fit, thoroughly=True)) is not None:
                return found
            if isinstance(room, int) and refused[-1].plan.nbytes - self.beside > OF_ONE * (room - self.beside):
                break
        error = min(reversed(refused), key=lambda error: error.plan.nbytes)  # the last of equals knows most
        plan, program = self.as_written.least_of(error.plan, error.program)
        if isinstance(room, int) and plan.nbytes > room:
            raise DoesNotFitError(plan, program)
        return plan, program

    def frontier(self) -> list[StepPoint]:
        """Bytes that the step is predicted to hold, and its seconds, from the least memory to the least time."""
        ways = [self.as_written, *self._changed(sys.maxsize)]
        if self._batch is not None:
            possible = [count for count in range(2, self._batch.length + 1) if self._batch.length % count == 0]
            ways += self._in_parts(possible[:_PARTS])
        points = sorted((point for way in ways for point in way.frontier()), key=lambda point: point[:2])
        found: list[StepPoint] = []
        least = math.inf
        for point in points:
            if point.seconds < least:
                found.append(point)
                least = point.seconds
        return found

    @functools.cached_property
    def _batch(self) -> Batch | None:
        return batch_of(self._traced.jaxpr) if "microbatch" in self._allow and self._layout.devices == 1 else None

    @functools.cached_property
    def _sums(self) -> int:
        """Bytes of sums over microbatches that do not lie where results will."""
        return max(sum_bytes(self._batch) - self._results, 0) if self._batch is not None else 0

    def _changed(self, room: int | str) -> Iterator[Fit]:
        """The whole batch at once, by another program than as it is written."""
        closed = self._traced.jaxpr
        if "tile" in self._allow:
            nbytes = room // _TILES if isinstance(room, int) else 0
            tile_on = TileOn(self._device.platform, nbytes, self._layout.devices > 1)
            if (tiled := Body(closed, tile_on)).tiled:
                yield self._fit_of(tiled)
        if any(map(has_inner, self.body.every())):
            again = Body(closed, inner_again_on=costs.device(self._device))
            if again.inner_again:
                yield self._fit_of(again)

    def _in_parts(self, numbers: Sequence[int]) -> Iterator[Fit]:
        """The step in these numbers of microbatches, where it has them."""
        assert self._batch is not None
        rates = costs.device(self._device)
        for count in numbers:
            parts = in_microbatches(self._traced.jaxpr, self._batch, count, self._device.platform)
            if parts is not None:
                seconds = count * PASSES_OF_SUMS * sum_bytes(self._batch) / rates.nbytes
                yield self._fit_of(Body(parts, microbatches=count), self._sums, seconds)


def note_donated(body: Body, traced: Any, device: Any) -> None:
    """Donated arguments lend no memory.

    On GPUs predictions are nearer without this: a decoder of 909M parameters took 53.5 GiB as it is written, where 53.3 were
    predicted; with this it would be about 56.6.
    """
    if device.platform == "cpu":
        body.put_in_use(donated_results(traced))
