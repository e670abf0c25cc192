"""A way through a chain as plain data, and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from memjax._core.compat import bodies, primitive_name
from memjax._core.program.costs import array_bytes
from memjax._core.program.dataflow import is_literal
from memjax._core.program.jaxpr import Program
from memjax._core.program.primitives import NAMES
from memjax._core.program.scopes import maker_of
from memjax._plan.codes import codes_in
from memjax._plan.early.options import is_plan
from memjax._plan.memory.layout import Layout
from memjax._plan.result import InBlocks, Kept, Stretch
from memjax._plan.schedule.execute import LoopPlan
from memjax._plan.schedule.schedule import schedule
from memjax._plan.solve.chain import Chain, Choice
from memjax._plan.solve.segment import Option


def stretches(chain: Chain, choices: Sequence[Choice], layout: Layout) -> tuple[Stretch, ...]:
    """The choices as data, with bytes and seconds of a device; a loop has a stretch for each of its parts."""
    held = {var for one in choices for var in (*_kept(one.option), *chain.between(one.start, one.stop).crossing)}
    of_forward = _arrays(chain.derivative.forward, layout)
    return tuple(stretch for choice in choices for stretch in _stretches(chain, choice, layout, of_forward, held))


def _kept(option: Option) -> tuple[Any, ...]:
    return *option.kept, *option.coded, *option.moved


def _stretches(
    chain: Chain, choice: Choice, layout: Layout, of_forward: Callable[..., Kept], held: set[Any]
) -> list[Stretch]:
    option, loop = choice.option, chain.loops[choice.start] if choice.option.parts else None
    program, codes = chain.of_loop(loop)
    handed_on = layout.local(option.nbytes + option.lent - option.kept_nbytes)
    crossing = tuple(of_forward(var, array_bytes(var)) for var in chain.between(choice.start, choice.stop).crossing)
    kept = of_forward if loop is None else _arrays(program, layout)
    eqns = program.eqns[choice.start : choice.stop] if loop is None else program.eqns
    found = []
    parts: Sequence[tuple[int | None, Option]] = option.parts or ((None, option),)
    for turns, one in parts:
        inside = [
            *(kept(var, array_bytes(var)) for var in one.kept),
            *(kept(code.of, code.nbytes, code.bits) for code in codes_in(codes, one.coded)),
            *(kept(var, array_bytes(var), on_host=True) for var in one.moved),
        ]
        # A loop that returns memory which others have lent may take less than nothing besides.
        seconds, working = one.seconds * (turns or 1) / layout.devices, max(layout.local(option.working), 0)
        in_blocks = None if option.in_blocks is None else _in_blocks(option, layout)
        others = _not_kept(eqns, held if loop is None else {*_kept(one)})
        of_turns = Stretch(choice.start, choice.stop, tuple(inside), handed_on, turns, seconds, working, in_blocks)
        found.append(of_turns._replace(crossing=crossing, not_kept=others))
        handed_on = 0
    return found


def _arrays(program: Program, layout: Layout) -> Callable[..., Kept]:
    """A function from variables of the program, and bytes, to data."""
    names = {var: eqn.params["name"] for eqn in program.eqns if primitive_name(eqn) in NAMES for var in _named(eqn)}

    def array(var: Any, nbytes: int, bits: int | None = None, on_host: bool = False) -> Kept:
        equation = program.flow.place.get(var, -1)
        eqn = program.eqns[equation] if equation >= 0 else None
        output = (program.invars if eqn is None else eqn.outvars).index(var)
        made = "carried by the loop" if eqn is None else maker_of(eqn)
        what = f"{var.aval.str_short()} {made}"
        return Kept(equation, output, layout.local(nbytes), what, bits, on_host, names.get(var))

    return array


def _named(eqn: Any) -> list[Any]:
    """What a name is given to: the value that is read, and the one that is returned, which are the same array."""
    return [*(var for var in eqn.invars if not is_literal(var)), *eqn.outvars]


def _not_kept(eqns: Sequence[Any], kept: set[Any]) -> tuple[str, ...]:
    """Names that the equations give to other values than these, also within loops and branches."""
    found = set()
    for eqn in eqns:
        if primitive_name(eqn) in NAMES and kept.isdisjoint(_named(eqn)):
            found.add(eqn.params["name"])
        for body in bodies(eqn):
            found.update(_not_kept(body.eqns, kept))
    return tuple(sorted(found))


def choices(chain: Chain, stretches: Sequence[Stretch]) -> list[Choice]:
    """The stretches as choices of `chain`, one of the program that they were found for; without bytes and seconds."""
    found = []
    for (start, stop), same in itertools.groupby(stretches, lambda stretch: (stretch.start, stretch.stop)):
        of_turns = list(same)
        if of_turns[0].turns is None:
            found.append(Choice(start, stop, _option(chain.derivative.forward, of_turns[0])))
        else:
            program, is_early = chain.loops[start].program, chain.loops[start].early is not None
            parts = tuple((one.turns or 0, _option(program, one)) for one in of_turns)
            plan = loop_plan(of_turns[0], is_early=is_early)
            found.append(Choice(start, stop, Option((), 0, 0.0, 0, parts, in_blocks=plan)))
    return found


def _in_blocks(option: Option, layout: Layout) -> InBlocks:
    plan = option.in_blocks
    assert plan is not None
    slots = 0 if plan.schedule is None else plan.schedule.slots
    return InBlocks(plan.block, plan.tail, plan.levels, slots, layout.local(option.states_nbytes // max(plan.rows, 1)))


def loop_plan(stretch: Stretch, *, is_early: bool) -> LoopPlan | None:
    """How the turns of a loop, which may be one that ends early, run again in blocks, or None.

    Raises:
      ValueError: what the data say is no such plan.
    """
    if (how := stretch.in_blocks) is None:
        return None
    length, plan = stretch.turns or 0, None
    if is_early:
        found = LoopPlan(length, how.block, how.tail, None, how.levels)
        if how.slots or not is_plan(found):
            raise ValueError(
                f"blocks of {how.block}, levels {how.levels} and a tail of {how.tail} for up to {length} turns"
            )
        return found
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
