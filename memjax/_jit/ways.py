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
from memjax._jit.fit import Fit
from memjax._jit.step_plan import StepPoint
from memjax._plan.memory.layout import Layout
from memjax._plan.tile.passes import TileOn

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
