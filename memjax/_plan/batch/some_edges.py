"""Two passes in which messages between the nodes of a graph run for some edges at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memjax._core.compat import derivatives, name_stack
from memjax._core.positions.walk import Mixed
from memjax._core.program.costs import array_bytes
from memjax._core.program.jaxpr import Program, without_dead_equations
from memjax._core.program.scopes import place_of
from memjax._plan.batch.edges import Edges, edges_of
from memjax._plan.batch.microbatches import Microbatches, run_as_program
from memjax._plan.result import Tiled
from memjax._plan.tile.rewrite import in_order

_TILES = (16, 15, 17, 14, 18, 13, 19, 12, 20)
"""How many tiles the edges have: the first number that divides them, or the first. The rest would be a program of its own."""


def with_some_edges(
    program: Program, stages: Sequence[int], platform: str, tile: int = 0
) -> tuple[Program, list[int], list[Tiled]]:
    """The program with its edges in tiles, the stages of its equations, and what runs so: nothing, or one thing.

    Args:
      program: straight lines of equations.
      stages: of these: see `edges_of`.
      platform: of the device, as JAX calls it.
      tile: how many edges run at a time; 0: by `_TILES`.
    """
    edges = edges_of(program, stages)
    if edges is None:
        return program, list(stages), []
    count = next((one for one in _TILES if edges.length % one == 0), _TILES[0])
    tile = tile or -(-edges.length // count)
    try:
        runs = [Microbatches(part, tile, platform) for part in edges.parts]
        inside = {id(run): run_as_program(run) for run in runs}
        order = in_order(program, runs)
    except (
        Mixed,
        TypeError,
        ValueError,
    ):  # sizes that an equation names in a way not known here, or parts without an order
        return program, list(stages), []
    stage_of = {id(eqn): stage for eqn, stage in zip(program.eqns, stages, strict=True)}
    stage_of |= {id(run): stage for run, stage in zip(runs, edges.stages, strict=True)}
    eqns, new_stages = [], []
    constvars, consts = [*program.constvars], [*program.consts]
    for step in order:
        stage = stage_of[id(step)]
        if (loop := inside.get(id(step))) is None:
            eqns.append(step)
            new_stages.append(stage)
            continue
        mine = [eqn for eqn in step.region.eqns if stage_of[id(eqn)] == stage]
        info = next((eqn for eqn in reversed(mine) if derivatives(name_stack(eqn))), mine[-1]).source_info
        eqns += [eqn.replace(source_info=info) for eqn in loop.eqns]
        new_stages += [stage] * len(loop.eqns)
        constvars += loop.constvars
        consts += loop.consts
    found = dataclasses.replace(program, constvars=constvars, consts=consts, eqns=eqns)
    needed = set(map(id, without_dead_equations(found).eqns))
    new_stages = [stage for eqn, stage in zip(eqns, new_stages, strict=True) if id(eqn) in needed]
    found = dataclasses.replace(found, eqns=[eqn for eqn in eqns if id(eqn) in needed])
    return found, new_stages, [_described(program, edges, tile)]


def _described(program: Program, edges: Edges, tile: int) -> Tiled:
    seed = program.flow.place[edges.largest]
    what = f"{edges.largest.aval.str_short()} over edges {place_of(program.eqns[seed])}".strip()
    return Tiled(seed, 0, tile, edges.length, array_bytes(edges.largest), what)
