"""A program with some of its regions run tile by tile, in both passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from memjax._core.arrays import is_float
from memjax._core.check import readable_bytes
from memjax._core.lists import Arrays, pick
from memjax._core.positions.regions import Region, regions
from memjax._core.positions.walk import Mixed, shape_of
from memjax._core.program.costs import array_bytes, rows_of_tile
from memjax._core.program.dataflow import Dataflow, made_by, read_by, variables
from memjax._core.program.jaxpr import (
    Program,
    as_closed,
    calls_in_place,
    evaluate_in,
    read,
    trace,
    without_dead_equations,
)
from memjax._core.program.scopes import place_of
from memjax._plan.derivative import without_checkpoints
from memjax._plan.result import Tiled
from memjax._plan.tile.chunks import InChunks
from memjax._plan.tile.recurrences import Recurrence, recurrences
from memjax._plan.tile.region import TiledPasses, TiledRegion
from memjax._plan.tile.views import with_early_views

Part = TiledPasses | InChunks
"""What of a program runs in parts."""


class Tiling:
    """A program and its regions.

    Args:
      closed: the program. Its constants and inputs together are the inputs here.
      types: of the inputs.
      outs: which outputs are differentiated.
      axes: sizes of the named axes that its collectives run over.
      platform: of the device, as JAX calls it.
      wrt: which inputs it is differentiated with respect to; all, if that is not given.
      is_body: whether it is the body of a loop; loops inside of it are left as they are.

    Attributes:
      found: the regions that can run tile by tile, the largest first.
      recurrences: what can run in chunks of time, in order.
    """

    def __init__(
        self,
        closed: Any,
        types: Sequence[Any],
        outs: Sequence[bool],
        axes: dict[str, int],
        platform: str,
        *,
        wrt: Sequence[bool] | None = None,
        is_body: bool = False,
    ):
        self._closed, self._types, self._axes = closed, list(types), axes
        self._platform = platform
        inner = calls_in_place(without_checkpoints(closed), differentiable=True)
        program = inner.with_inputs(len(closed.consts))
        self._program = with_early_views(without_dead_equations(program))
        self._wanted = [atom for atom, out in zip(self._program.outvars, outs, strict=True) if out]
        self._regions: dict[tuple[int, int], Region] = {}
        self.found: list[Tiled] = []
        for region in regions(self._program):
            what = tiled_of(self._program, region, platform)
            self._regions[what.equation, what.dim] = region
            if what.tile < what.length and self._tiled(what) is not None:
                self.found.append(what)
        moving = self._program.flow.depending(pick(self._program.invars, wrt or [True] * len(self._types)))
        self._fixed = {var for var in (*self._program.invars, *made_by(self._program.eqns)) if var not in moving}
        self._recurrences = {} if is_body else {one.seed: one for one in recurrences(self._program)}
        self.recurrences = [one for one in map(self._in_chunks, self._recurrences.values()) if one is not None]
        self._bodies = {} if is_body else self._tilings_of_bodies()
        self.found += [one._replace(loop=loop) for loop, body in self._bodies.items() for one in body.found]
        self.found.sort(key=lambda one: -one.nbytes)

    def _tilings_of_bodies(self) -> dict[int, Tiling]:
        """By number of an equation that is a scan on the way to what is differentiated: its body, where it can be tiled."""
        leading = {id(eqn) for eqn in self._program.flow.needed(self._wanted)}
        found = {}
        for i, eqn in enumerate(self._program.eqns):
            if eqn.primitive.name == "scan" and id(eqn) in leading:
                closed = as_closed(eqn.params["jaxpr"])
                types = [*map(jax.typeof, closed.consts), *closed.in_avals]
                outs = [is_float(aval) for aval in closed.out_avals]
                tiling = Tiling(closed, types, outs, self._axes, self._platform, is_body=True)
                if tiling.found:
                    found[i] = tiling
        return found

    def _in_chunks(self, region: Recurrence) -> Tiled | None:
        """A recurrence in the largest chunks, as data; None where it has none, or mixes steps."""
        chunk = next(iter(region.chunks), None)
        seed = self._program.eqns[region.seed]
        what = f"a loop over time with what leads to it and follows {place_of(seed)}".strip()
        found = Tiled(region.seed, 0, chunk or region.length, region.length, region.nbytes, what)
        return None if chunk is None or self._chunked(found) is None else found

    def chunks_of(self, what: Tiled) -> list[int]:
        """Turns of a chunk of a recurrence that are worth a try, the largest first."""
        return self._recurrences[what.equation].chunks

    def loops_of(self, what: Tiled) -> list[Any]:
        """The loops of a recurrence."""
        return self._recurrences[what.equation].loops

    def _chunked(self, what: Tiled) -> InChunks | None:
        if (region := self._recurrences.get(what.equation)) is None:
            return None
        try:
            return InChunks(region, what.tile, self._platform, fixed=self._fixed)
        except Mixed:
            return None

    def _tiled(self, what: Tiled) -> TiledRegion | None:
        """The function of a region; None if there is none, or it is not differentiated, or its derivative mixes positions."""
        region = self._regions.get((what.equation, what.dim))
        if region is None:
            return None
        mine = {id(eqn) for eqn in region.eqns}
        others = Dataflow([eqn for eqn in self._program.eqns if id(eqn) not in mine])
        reached = {*variables(self._wanted), *read_by(others.needed(self._wanted))}
        has_cotangent = [var in reached and is_float(var.aval) for var in region.outs]
        if not any(has_cotangent):
            return None
        try:
            return TiledRegion(region, has_cotangent, what.tile, self._axes, self._platform)
        except Mixed:
            return None

    def rewritten(self, chosen: Sequence[Tiled]) -> Any:
        """The closed jaxpr with the chosen regions run tile by tile; others are as they were."""
        here = [one for one in chosen if one.loop is None]
        picked = [run for one in here if (run := self._chunked(one) or self._tiled(one)) is not None]
        changed = {}
        for loop, tiling in self._bodies.items():
            if inside := [one._replace(loop=None) for one in chosen if one.loop == loop]:
                eqn = self._program.eqns[loop]
                changed[id(eqn)] = eqn.replace(params=eqn.params | {"jaxpr": tiling.rewritten(inside)})
        n = len(self._closed.consts)
        traced = trace(lambda *inputs: self._run(inputs, picked, changed), self._types, self._axes)
        jaxpr = traced.jaxpr
        constvars = [*jaxpr.invars[:n], *jaxpr.constvars]
        debug = self._closed.jaxpr.debug_info
        rest = core.Jaxpr(constvars, jaxpr.invars[n:], jaxpr.outvars, jaxpr.eqns, jaxpr.effects, debug)
        return core.ClosedJaxpr(rest, [*self._closed.consts, *traced.consts])

    def _run(self, inputs: Sequence[Any], picked: Sequence[Part], changed: dict[int, Any]) -> Arrays:
        program = self._program
        env = program.given(inputs)
        for step in in_order(program, picked):
            if isinstance(step, Part):
                env |= zip(step.makes, step(read(env, step.reads)), strict=True)
            else:
                evaluate_in([changed.get(id(step), step)], env)
        return read(env, program.outvars)


def tiled_of(program: Program, region: Region, platform: str, nbytes: int = 0) -> Tiled:
    """What running a region of the program tile by tile means, as data; the last arguments are as for `positions_per_tile`."""
    seed = program.eqns[region.seed]
    what = f"{seed.outvars[0].aval.str_short()} {place_of(seed)}".strip()
    tile = positions_per_tile(region, platform, nbytes)
    return Tiled(region.seed, region.dim, tile, region.length, array_bytes(seed.outvars[0]), what)


def positions_per_tile(region: Region, platform: str, nbytes: int = 0) -> int:
    """As many that a tile of the product takes half of the sums of the shared values' gradients, which are in float32.

    Args:
      region: to be tiled.
      platform: of the device, as JAX calls it.
      nbytes: what a tile of the product may take, if that is more: fewer tiles read and write the sums less often.
    """
    product, usual = region.product, rows_of_tile(platform)
    (contracted, _), left = product.params["dimension_numbers"][0], product.invars[0]
    shape, first = shape_of(product.outvars[0]), len(shape_of(left)) - len(contracted)
    rows = math.prod(shape[:first] if region.dim < first else shape[first:])
    sums = sum(4 * var.aval.size for var in region.shared if is_float(var.aval))
    of_row = max(array_bytes(product.outvars[0]) // rows, 1)
    wanted = max(sums // 2 // of_row, usual.least, min(nbytes // of_row, usual.enough))
    positions = max(wanted * region.length // rows, 1)
    return int(min(1 << (positions.bit_length() - 1), region.length))


def described(chosen: Sequence[Tiled]) -> str:
    """What is tiled, for people."""
    return ", ".join(f"{readable_bytes(one.nbytes)} of {one.what}" for one in chosen)


def in_order(program: Program, picked: Sequence[Any]) -> list[Any]:
    """The equations of a program outside of regions, and the regions, each after what it reads; in their order otherwise.

    Raises:
      ValueError: regions read each other.
    """
    makers, parts = dict(program.flow.makers), set(map(id, picked))
    inside: set[int] = set()
    for one in picked:
        inside.update(id(eqn) for eqn in one.region.eqns)
        makers |= dict.fromkeys(one.makes, one)
    # What is made inside and read by nobody outside but through the region's outputs is made there alone; cheap
    # equations that others read as well stay outside, too.
    done: set[int] = set()
    waiting: set[int] = set()  # for what they read
    order: list[Any] = []

    def add(step: Any) -> None:
        stack = [(step, False)]
        while stack:
            one, ready = stack.pop()
            if id(one) in done:
                continue
            if ready:
                done.add(id(one))
                order.append(one)
                continue
            waiting.add(id(one))
            stack.append((one, True))
            reads = variables(one.reads if id(one) in parts else one.invars)
            needed = [makers[var] for var in reads if var in makers and id(makers[var]) not in done]
            if not waiting.isdisjoint(map(id, needed)):
                raise ValueError("these regions read each other")
            stack += [(maker, False) for maker in needed]

    for eqn in program.eqns:
        if id(eqn) not in inside or eqn.effects:
            add(eqn)
    for var in variables(program.outvars):
        if var in makers:
            add(makers[var])
    return order
