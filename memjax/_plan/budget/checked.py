"""A plan from outside, as from JSON, is checked against the program before it is acted on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from memjax._core.program.dataflow import is_literal, read_by, variables
from memjax._plan.budget.stretches import loop_plan, variable_of
from memjax._plan.derivative import LoopPair, can_be_split
from memjax._plan.result import Kept, Plan, Stretch, Tiled
from memjax._plan.solve.chain import Chain


def check_stretches(chain: Chain, plan: Plan) -> None:
    """Raises ValueError unless the stretches cover the forward pass once, and keep what it makes."""
    position, end = 0, len(chain.derivative.forward.eqns)
    for (start, stop), same in itertools.groupby(plan.stretches, lambda one: (one.start, one.stop)):
        parts = list(same)
        if start != position or stop not in chain.cuts or (stop <= start and end):
            raise _damaged(f"equations {start} to {stop} for those from {position} to one of {chain.cuts[1:]}")
        position = stop
        _check_parts(chain, parts)
    if plan.stretches and position != end:
        raise _damaged(f"stretches that end at equation {position} of {end}")


def check_tiles(found: Sequence[Tiled], plan: Plan) -> None:
    """Raises ValueError unless the parts that run tile by tile are among those of the program."""
    known = {(one.equation, one.dim, one.length, one.loop) for one in found}
    for one in plan.tiled:
        if (one.equation, one.dim, one.length, one.loop) not in known or not 1 <= one.tile <= one.length:
            raise _damaged(f"tiles of {one.tile} of {one.length} positions at equation {one.equation}")


def _check_parts(chain: Chain, parts: Sequence[Stretch]) -> None:
    """Raises ValueError unless the records of one stretch, or of one loop, fit the program."""
    start = parts[0].start
    loop = chain.loops.get(start)
    turns = [one.turns for one in parts]
    if loop is None:
        if turns != [None]:
            raise _damaged(f"turns {turns} of equation {start}, which is no loop that can be planned")
    else:
        length = loop.forward.params["length"]
        few = [one for one in turns if one is not None and one >= 1]
        if any(one.in_blocks is not None for one in parts) or loop.early is not None:
            _check_blocks(parts, loop)
        if len(few) < len(turns) or sum(few) != length or (len(turns) > 1 and not can_be_split(loop)):
            raise _damaged(f"turns {turns} of a loop of {length}")
    for part in parts:
        for kept in part.kept:
            _check_kept(chain, part, kept, loop)
        if loop is not None:
            _check_turn(part, loop)


def _check_blocks(parts: Sequence[Stretch], loop: LoopPair) -> None:
    """Turns run again in blocks in one part, with nothing on the host."""
    if len(parts) > 1 or not can_be_split(loop) or any(kept.on_host for kept in parts[0].kept):
        raise _damaged(f"{len(parts)} parts of a loop at equation {parts[0].start} that runs in blocks")
    try:
        if loop_plan(parts[0], is_early=loop.early is not None) is None and loop.early is not None:
            raise ValueError("no blocks")
    except ValueError as error:
        raise _damaged(f"{error} of a loop at equation {parts[0].start}") from None


def _check_turn(part: Stretch, loop: LoopPair) -> None:
    """All that the backward pass reads of a turn is kept, or follows from what is."""
    program, made = loop.program, loop.program.flow.place
    known = {variable_of(program, one) for one in part.kept}.union(loop.free)
    wanted = [*loop.pull.flow.read, *variables(loop.pull.outvars)]
    wanted = [var for var in wanted if var in made or var in set(program.invars)]
    reads = [*wanted, *read_by(program.flow.needed(wanted, known))]
    if any(var not in known and var not in made for var in reads):
        raise _damaged(f"a loop at equation {part.start} that does not keep what it carries")


def _check_kept(chain: Chain, part: Stretch, kept: Kept, loop: Any) -> None:
    program = chain.derivative.forward if loop is None else loop.program
    first, last = (part.start, part.stop) if loop is None else (-1, len(program.eqns))
    outs: Sequence[Any] = ()
    if first <= kept.equation < last:
        outs = program.eqns[kept.equation].outvars if kept.equation >= 0 else program.invars
    if not 0 <= kept.output < len(outs) or is_literal(outs[kept.output]):
        raise _damaged(f"output {kept.output} of equation {kept.equation}, which is not among those of its stretch")
    if kept.bits is not None:
        _, codes = chain.of_loop(loop)
        if codes is None or kept.bits != codes.bits(outs[kept.output]):
            raise _damaged(f"{kept.bits} bits of output {kept.output} of equation {kept.equation}")
    if kept.on_host and loop is None:
        raise _damaged(f"equation {kept.equation} on the host, which is in no loop")


def _damaged(what: str) -> ValueError:
    return ValueError(f"plan must be what memjax.plan made for this program, got {what}: make it again")
