"""A way through a chain as plain data, and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from memjax._core.program.costs import array_bytes
from memjax._core.program.jaxpr import Program
from memjax._core.program.scopes import maker_of
from memjax._plan.codes import BITS, codes_in
from memjax._plan.memory.layout import Layout
from memjax._plan.result import InBlocks, Kept, Stretch
from memjax._plan.schedule.execute import LoopPlan
from memjax._plan.schedule.schedule import schedule
from memjax._plan.solve.chain import Chain, Choice
from memjax._plan.solve.segment import Option


def stretches(chain: Chain, choices: Sequence[Choice], layout: Layout) -> tuple[Stretch, ...]:
    """The choices as data, with bytes and seconds of a device; a loop has a stretch for each of its parts."""
    return tuple(stretch for choice in choices for stretch in _stretches(chain, choice, layout))


def _stretches(chain: Chain, choice: Choice, layout: Layout) -> list[Stretch]:
    option, loop = choice.option, chain.loops[choice.start] if choice.option.parts else None
    program, codes = chain.of_loop(loop)
    handed_on = layout.local(option.nbytes + option.lent - option.kept_nbytes)

    def kept(var: Any, nbytes: int, bits: int | None = None, on_host: bool = False) -> Kept:
        equation = program.flow.place.get(var, -1)
        eqn = program.eqns[equation] if equation >= 0 else None
        output = (program.invars if eqn is None else eqn.outvars).index(var)
        made = "carried by the loop" if eqn is None else maker_of(eqn)
        return Kept(equation, output, layout.local(nbytes), f"{var.aval.str_short()} {made}", bits, on_host)

    found = []
    parts: Sequence[tuple[int | None, Option]] = option.parts or ((None, option),)
    for turns, one in parts:
        inside = [
            *(kept(var, array_bytes(var)) for var in one.kept),
            *(kept(code.of, code.nbytes, BITS) for code in codes_in(codes, one.coded)),
            *(kept(var, array_bytes(var), on_host=True) for var in one.moved),
        ]
        seconds, working = one.seconds * (turns or 1) / layout.devices, layout.local(option.working)
        in_blocks = None if option.in_blocks is None else _in_blocks(option, layout)
        found.append(Stretch(choice.start, choice.stop, tuple(inside), handed_on, turns, seconds, working, in_blocks))
        handed_on = 0
    return found


def choices(chain: Chain, stretches: Sequence[Stretch]) -> list[Choice]:
    """The stretches as choices of `chain`, one of the program that they were found for; without bytes and seconds."""
    found = []
    for (start, stop), same in itertools.groupby(stretches, lambda stretch: (stretch.start, stretch.stop)):
        of_turns = list(same)
        if of_turns[0].turns is None:
            found.append(Choice(start, stop, _option(chain.derivative.forward, of_turns[0])))
        else:
            program = chain.loops[start].program
            parts = tuple((one.turns or 0, _option(program, one)) for one in of_turns)
            plan = loop_plan(of_turns[0])
            found.append(Choice(start, stop, Option((), 0, 0.0, 0, parts, in_blocks=plan)))
    return found


def _in_blocks(option: Option, layout: Layout) -> InBlocks:
    plan = option.in_blocks
    assert plan is not None
    slots = 0 if plan.schedule is None else plan.schedule.slots
    return InBlocks(plan.block, plan.tail, plan.levels, slots, layout.local(option.states_nbytes // max(plan.rows, 1)))


def loop_plan(stretch: Stretch) -> LoopPlan | None:
    """How the turns of a loop run again in blocks, or None.

    Raises:
      ValueError: what the data say is no such plan.
    """
    if (how := stretch.in_blocks) is None:
        return None
    length, plan = stretch.turns or 0, None
    blocks = (length - how.tail) // max(how.block, 1)
    if how.slots and blocks > 0:
        plan = schedule(blocks + 1, how.slots, strategy="hidden")
    found = LoopPlan(length, how.block, how.tail, plan, how.levels)
    in_levels = how.block * math.prod(how.levels) + how.tail == length and len(how.levels) > 0 and not how.slots
    in_slots = (
        how.slots > 0 and 1 <= how.tail <= how.block and how.block * blocks + how.tail == length and not how.levels
    )
    if not (in_levels or in_slots) or how.block < 1 or min(how.levels, default=1) < 1 or blocks < 1:
        raise ValueError(
            f"blocks of {how.block}, levels {how.levels}, {how.slots} slots and a tail of {how.tail} for {length} turns"
        )
    return found


def _option(program: Program, stretch: Stretch) -> Option:
    kept: dict[str, list[Any]] = {"kept": [], "coded": [], "moved": []}
    for one in stretch.kept:
        kept["moved" if one.on_host else "kept" if one.bits is None else "coded"].append(variable_of(program, one))
    of: Any = {kind: tuple(some) for kind, some in kept.items()}
    return Option(nbytes=0, seconds=0.0, working=0, **of)


def variable_of(program: Program, kept: Kept) -> Any:
    """The variable that is kept, of the forward pass or of a loop's body."""
    return (program.invars if kept.equation < 0 else program.eqns[kept.equation].outvars)[kept.output]
