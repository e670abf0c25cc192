"""Whether a plan runs parts of the program tile by tile: where it does not fit otherwise, or takes no longer so."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from memjax._plan.batch.passes import with_edges_of
from memjax._plan.budget.decide import decide
from memjax._plan.budget.known import Allowed, known
from memjax._plan.derivative import Derivative, Passes
from memjax._plan.memory.free import free_bytes
from memjax._plan.memory.layout import Layout
from memjax._plan.result import Plan, Tiled
from memjax._plan.tile.fission import may_be_divided
from memjax._plan.tile.rewrite import Tiling, described

_PAYS = 1.002  # times the time of keeping everything: a plan that takes less than this has nothing to gain from tiles


class Program:
    """A program to differentiate, and what can be tiled in it.

    Args:
      closed: the program.
      types: of its constants and inputs together.
      wrt, outs: which of them, and which outputs, are differentiated.
      axes: sizes of the named axes around it.
      platform: of the device, as JAX calls it.

    Attributes:
      types: as given.
    """

    def __init__(
        self,
        closed: Any,
        types: Sequence[Any],
        wrt: Sequence[bool],
        outs: Sequence[bool],
        axes: dict[str, int],
        platform: str,
    ):
        self.types, self._arguments, self._platform = types, (closed, types, wrt, outs, axes), platform
        self._tiling: Tiling | None = None
        self._derivatives: dict[tuple[Tiled, ...], Passes] = {}

    @property
    def tiling(self) -> Tiling:
        if self._tiling is None:
            closed, types, wrt, outs, axes = self._arguments
            self._tiling = Tiling(closed, types, outs, axes, self._platform, wrt=wrt)
        return self._tiling

    def derivative(self, tiled: Sequence[Tiled] = ()) -> Passes:
        """The derivative, with these parts run tile by tile."""
        key = tuple(tiled)
        if key not in self._derivatives:
            closed, types, wrt, outs, axes = self._arguments
            others = [one for one in key if not self._is_edges(one)]
            found = Derivative(self.tiling.rewritten(others) if others else closed, types, wrt, outs, axes)
            of_edges = next((one.tile for one in key if self._is_edges(one)), None)
            tiled_edges = None if of_edges is None else with_edges_of(found, self._platform, of_edges)
            self._derivatives[key] = tiled_edges or found
        return self._derivatives[key]

    @functools.cached_property
    def edges(self) -> list[Tiled]:
        """The edges of a graph, if the program has some."""
        closed, types, wrt, outs, axes = self._arguments
        if axes:  # collectives over them would be in the tiles
            return []
        found = with_edges_of(Derivative(closed, types, wrt, outs, axes), self._platform)
        return [] if found is None or found.tiled is None else [found.tiled]

    def _is_edges(self, what: Tiled) -> bool:
        return any(what._replace(tile=one.tile) == one for one in self.edges)

    @property
    def every(self) -> list[Tiled]:
        """All that can run in parts."""
        return [*self.tiling.found, *self.tiling.recurrences, *self.edges]

    def choices(self, devices: int = 1) -> list[tuple[Tiled, ...]]:
        """What can be tiled, but for chunks of time: edges; the largest alone, and all."""
        found, edges = tuple(self.tiling.found), tuple(self.edges) if devices == 1 else ()
        return list(dict.fromkeys(part for part in (edges, found[:1], found) if part))

    @property
    def chunks(self) -> list[Tiled]:
        """The alternatives for the first recurrence: one for each chunk size, the largest first."""
        return [one._replace(tile=tile) for one in self.tiling.recurrences[:1] for tile in self.tiling.chunks_of(one)]

    @functools.cached_property
    def may_gain_from_chunks(self) -> bool:
        """Whether chunks may take less time than the whole: a loop of the first recurrence may be divided in them."""
        return any(
            may_be_divided(loop, self._platform) for one in self.chunks[:1] for loop in self.tiling.loops_of(one)
        )


def choose(program: Program, layout: Layout, budget: int | str, allow: Sequence[str]) -> Plan:
    """The plan of the program, or of what it is with parts of it tiled.

    Args:
      program: to be planned.
      layout: of its constants and inputs.
      budget: of bytes, "device" or "min".
      allow: what the plan may do.

    Raises:
      ValueError: no plan fits; the message says whether "tile" would help where that is not allowed.
    """
    if budget == "device":
        budget = free_bytes(program.types, program.derivative(), layout)
    search = _Search(program, layout, budget, Allowed("compress" in allow, "offload" in allow))
    search.attempt(())
    if "tile" in allow:
        for tiled in program.choices(layout.devices):
            if search.is_fast:
                break
            search.attempt(tiled)
        if not search.is_fast or (search.recomputes and program.may_gain_from_chunks):
            search.attempt_chunks()
    if search.best is None:
        raise ValueError(search.refused if "tile" in allow else f"{search.refused}{_hint(program, allow)}")
    return search.best


class _Search:
    """The search for the best plan, of the program or of what it is with parts of it tiled.

    Attributes:
      best: the plan so far.
      refused: why the last of those that do not fit does not.
    """

    def __init__(self, program: Program, layout: Layout, budget: int | str, allowed: Allowed):
        self._program, self._layout, self._budget, self._allowed = program, layout, budget, allowed
        self.best: Plan | None = None
        self.refused = ""

    @property
    def is_fast(self) -> bool:
        """Whether the plan takes about as long as keeping everything."""
        return self.best is not None and self._budget != "min" and self.best.seconds <= _PAYS * self.best.plain_seconds

    @property
    def recomputes(self) -> bool:
        return self.best is not None and bool(self.best.stretches)

    def attempt(self, tiled: tuple[Tiled, ...]) -> bool:
        """Make the plan with these parts tiled; whether it is better."""
        derivative = self._program.derivative(tiled)
        try:
            plan = decide(derivative, self._program.types, self._layout, self._budget, **self._allowed._asdict())
        except ValueError as error:
            self.refused = str(error)
            return False
        measure = lambda plan: plan.nbytes if self._budget == "min" else plan.seconds
        if self.best is not None and measure(plan) >= measure(self.best):
            return False
        self.best = dataclasses.replace(plan, tiled=tiled)
        return True

    def attempt_chunks(self) -> None:
        """Make plans for the first recurrence in chunks, those first that are predicted to fit and to be fast."""
        seconds = {one: 0.0 if self._budget == "min" else self._predicted((one,)) for one in self._program.chunks}
        for one in sorted(seconds, key=lambda one: seconds[one]):
            if self.best is not None and self._budget != "min" and seconds[one] >= self.best.seconds:
                break
            if self.attempt((one,)) and self._budget != "min":
                break  # others are predicted to take longer

    def _predicted(self, tiled: tuple[Tiled, ...]) -> float:
        """The seconds that a plan is predicted to take; infinite: none is predicted to fit."""
        one = known(self._program.derivative(tiled), self._program.types, self._layout, self._allowed)
        assert isinstance(self._budget, int)
        fitting = [more for nbytes, more in one.frontier if nbytes <= self._budget]
        return one.base_seconds + min(fitting, default=math.inf)


def _hint(program: Program, allow: Sequence[str]) -> str:
    found = [*program.choices(), *((one,) for one in program.chunks)]
    names = ", ".join(f'"{name}"' for name in dict.fromkeys(("recompute", *allow, "tile")))
    return f"; allow=({names}) takes {described(found[-1])} away" if found else ""
