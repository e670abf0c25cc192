"""Whether a plan runs parts of the program tile by tile: where it does not fit otherwise, or takes no longer so."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from memjax._plan.batch.passes import with_edges_of
from memjax._plan.budget.decide import decide
from memjax._plan.budget.stretches import loop_plan
from memjax._plan.derivative import Derivative, Passes
from memjax._plan.memory.free import free_bytes
from memjax._plan.memory.layout import Layout
from memjax._plan.result import Plan, Tiled
from memjax._plan.tile.fission import may_be_divided
from memjax._plan.tile.rewrite import Tiling, described

_PAYS = 1.002  # times the time of keeping everything: a plan that takes less than this has nothing to gain from tiles

_TWICE = 2.05  # runs of a loop, about two


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
        """What can be tiled: edges; the largest alone, and all; and the first recurrence in chunks of several sizes."""
        found, edges = tuple(self.tiling.found), tuple(self.edges) if devices == 1 else ()
        chunks = [(one,) for one in self.chunks]
        return list(dict.fromkeys(part for part in (edges, found[:1], found, *chunks) if part))

    @property
    def chunks(self) -> list[Tiled]:
        """The alternatives for the first recurrence: one for each chunk size, the largest first."""
        return [one._replace(tile=tile) for one in self.tiling.recurrences[:1] for tile in self.tiling.chunks_of(one)]

    @functools.cached_property
    def is_faster_in_chunks(self) -> bool:
        """Whether a loop of the first recurrence may be divided in chunks, which may take less time than the whole then."""
        return any(may_be_divided(loop, self._platform) for loop in self.tiling.loops_of(self.chunks[0]))


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

    def attempt(tiled: Sequence[Tiled]) -> tuple[Plan | None, str]:
        derivative, compress, offload = program.derivative(tiled), "compress" in allow, "offload" in allow
        try:
            return decide(derivative, program.types, layout, budget, compress=compress, offload=offload), ""
        except ValueError as error:
            return None, str(error)

    measure = lambda plan: plan.nbytes if budget == "min" else plan.seconds
    best, refused = attempt(())
    if "tile" not in allow:
        if best is not None:
            return best
        raise ValueError(f"{refused}{_hint(program, allow)}")
    for tiled in program.choices(layout.devices):
        if best is not None and budget != "min" and best.seconds <= _PAYS * best.plain_seconds:
            may_be_faster = bool(best.stretches) and tiled[0] in program.chunks and program.is_faster_in_chunks
            if not may_be_faster:
                continue
        plan, message = attempt(tiled)
        refused = message or refused
        if plan is not None and (best is None or measure(plan) < measure(best)):
            best = dataclasses.replace(plan, tiled=tiled)
            if tiled[0] in program.chunks and budget != "min" and not _runs_more_than_twice(best):
                break  # smaller chunks take longer
    if best is None:
        raise ValueError(refused)
    return best


def _runs_more_than_twice(plan: Plan) -> bool:
    """Whether a loop runs forwards more than twice: of chunks, the states between them are too many for the budget."""
    loops = [loop_plan(stretch, is_early=False) for stretch in plan.stretches if stretch.in_blocks is not None]
    return any(loop is not None and loop.forward_runs > _TWICE for loop in loops)


def _hint(program: Program, allow: Sequence[str]) -> str:
    found = program.choices()
    names = ", ".join(f'"{name}"' for name in dict.fromkeys(("recompute", *allow, "tile")))
    return f"; allow=({names}) takes {described(found[-1])} away" if found else ""
