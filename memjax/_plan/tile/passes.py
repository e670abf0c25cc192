"""A traced step in which what lies between a forward and its backward pass runs tile by tile: a loss of logits and its gradient.

The gradient of a sum over positions is known up to a factor that does not depend on the sum. So a tile goes through the loss
forwards and backwards at once, and no product is computed twice.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from memjax._core.compat import derivatives, is_backward, name_stack, primitive_name, varying
from memjax._core.positions.regions import Region, regions
from memjax._core.positions.walk import Mixed
from memjax._core.program.costs import array_bytes
from memjax._core.program.dataflow import made_by, variables
from memjax._core.program.jaxpr import Program, calls_in_place, trace, without_dead_equations
from memjax._core.program.scopes import place_of
from memjax._plan.result import Tiled
from memjax._plan.tile.region import TiledPasses
from memjax._plan.tile.rewrite import in_order, tiled_of


class TileOn(NamedTuple):
    """How large tiles are.

    Attributes:
      platform: of the device, as JAX calls it.
      nbytes: what a tile of logits may take, where that is more than usual.
      on_mesh: whether arrays lie on several devices: tiles of a program for all of them would send sums for each tile.
      chunks: in how many chunks of time loops run, with what leads to them and follows; 0: in none, and losses in tiles.
    """

    platform: str
    nbytes: int = 0
    on_mesh: bool = False
    chunks: int = 0


def with_tiles(program: Program, on: TileOn, axes: dict[str, int]) -> tuple[Program, list[Tiled]]:
    """The program with all such parts run tile by tile, and what they are, the largest first.

    Args:
      program: straight lines of equations, with JAX's marks of derivatives.
      on: how large tiles are.
      axes: sizes of the named axes around it.
    """
    given, program = program, _metrics_first(program)
    found = _found(program, on, axes)
    if not found:
        return given, []
    picked = [run for run, _ in found]
    eqns: list[Any] = []
    constvars, consts = [*program.constvars], [*program.consts]
    for step in in_order(program, picked):
        if isinstance(step, TiledPasses):
            inside = _as_program(step, axes)
            eqns += inside.eqns
            constvars += inside.constvars
            consts += inside.consts
        else:
            eqns.append(step)
    return dataclasses.replace(program, constvars=constvars, consts=consts, eqns=eqns), [what for _, what in found]


def kept_whole(program: Program, on: TileOn, axes: dict[str, int]) -> list[str]:
    """Why logits are whole, as sentences: what reads them besides the loss. Arguments are those of `with_tiles`."""
    program = _metrics_first(program)
    tiled = {what.what for _, what in _found(program, on, axes)}
    behind: set[Any] = set()
    for eqn in program.eqns:
        if is_backward(name_stack(eqn)) or not behind.isdisjoint(variables(eqn.invars)):
            behind.update(eqn.outvars)
    without = without_dead_equations(
        dataclasses.replace(program, outvars=[var for var in variables(program.outvars) if var in behind])
    )
    told = [_besides(program, without, run.region, what.what) for run, what in _found(without, on, axes)]
    return [text for text in told if text and not any(name in text for name in tiled)]


def _besides(program: Program, without: Program, region: Region, what: str) -> str:
    """What keeps the result of a region's product whole, that is in the program and not `without`; nothing if nothing does."""
    least = array_bytes(region.product.outvars[0]) // 2
    known = set(map(id, without.eqns))
    large = {var for var in made_by(region.eqns) if array_bytes(var) >= least}
    reader = None
    for eqn in program.eqns:
        if id(eqn) not in known and not large.isdisjoint(variables(eqn.invars)):
            reader = eqn
            large.update(var for var in eqn.outvars if array_bytes(var) >= least)
    if not large.isdisjoint(variables(program.outvars)):
        return f"the step returns {what}, or an array as large: return what you need of it, such as its argmax"
    if reader is None:
        return ""
    where = f"`{primitive_name(reader)}` at {place_of(reader)}"
    return f"{where} reads {what} outside of the loss: leave that out of the step, or make it for each token alone"


def _found(program: Program, on: TileOn, axes: dict[str, int]) -> list[tuple[TiledPasses, Tiled]]:
    """The parts of a program that run tile by tile, and what they are, the largest first."""
    found = []
    for region in regions(program, gradients=True):
        what = tiled_of(program, region, on.platform, on.nbytes)
        marks = {is_backward(name_stack(eqn)) for eqn in region.eqns}
        if what.tile < what.length and marks == {False, True} and (run := _tiled(region, what.tile, axes, on.platform)):
            found.append((run, what))
    return found


def _metrics_first(program: Program) -> Program:
    """The program with what follows from a forward pass alone before the backward pass.

    A step that returns logits with its loss, and makes metrics of them once it has the gradient, is then one that makes them in
    the loss: a region grows along the equations, and metrics behind the backward pass would keep logits whole.
    """
    stacks = [name_stack(eqn) for eqn in program.eqns]
    start = next((i for i, stack in enumerate(stacks) if is_backward(stack)), len(stacks))
    first, rest = program.eqns[:start], list[Any]()
    behind: set[Any] = set()
    for eqn, stack in zip(program.eqns[start:], stacks[start:], strict=True):
        stays = derivatives(stack) or eqn.effects or not behind.isdisjoint(variables(eqn.invars))
        (rest if stays else first).append(eqn)
        behind.update(eqn.outvars if stays else ())
    return dataclasses.replace(program, eqns=[*first, *rest])


def _tiled(region: Region, tile: int, axes: dict[str, int], platform: str) -> TiledPasses | None:
    if any(varying(var.aval) for var in made_by(region.eqns)):
        return None  # such types are known within their `jax.shard_map` alone
    try:
        return TiledPasses(region, tile, axes, platform)
    except Mixed:
        return None


def _as_program(run: TiledPasses, axes: dict[str, int]) -> Program:
    """The equations that run a region, of its own variables, marked as a part of the backward pass."""
    region, inputs = run.region, run.reads
    call = lambda *values: run(list(values))
    inside = calls_in_place(trace(call, [var.aval for var in inputs], axes), differentiable=False)
    info = next(eqn.source_info for eqn in reversed(region.eqns) if is_backward(name_stack(eqn)))
    return inside.between(inputs, region.outs, source_info=info)
