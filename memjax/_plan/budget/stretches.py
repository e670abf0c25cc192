"""A way through a chain as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memjax._core.program.costs import array_bytes
from memjax._core.program.scopes import place_of
from memjax._plan.budget.pieces import codes_in
from memjax._plan.codes import BITS
from memjax._plan.layout import Layout
from memjax._plan.result import Kept, Stretch
from memjax._plan.solve.chain import Chain, Choice


def stretches(chain: Chain, choices: Sequence[Choice], layout: Layout) -> tuple[Stretch, ...]:
    """The choices as data, with bytes and seconds of a device; a loop has a stretch for each of its parts."""
    return tuple(stretch for choice in choices for stretch in _stretches(chain, choice, layout))


def _stretches(chain: Chain, choice: Choice, layout: Layout) -> list[Stretch]:
    option = choice.option
    program = chain.loops[choice.start].program if option.parts else chain.derivative.forward
    place = {out: (i, k, eqn) for i, eqn in enumerate(program.eqns) for k, out in enumerate(eqn.outvars)}
    place |= {var: (-1, k, None) for k, var in enumerate(program.invars)}
    inside = [(turns or None, one) for turns, one in option.parts or ((0, option),)]
    handed_on = layout.local(option.nbytes + option.lent - option.kept_nbytes)
    found = []
    for turns, one in inside:
        kept = []
        codes = codes_in(chain, chain.loops[choice.start] if turns else None, one.coded)
        every: list[tuple[Any, int, int | None, bool]] = [*((var, array_bytes(var), None, False) for var in one.kept)]
        every += [(code.of, code.nbytes, BITS, False) for code in codes]
        every += [(var, array_bytes(var), None, True) for var in one.moved]
        for var, nbytes, few, on_host in every:
            equation, output, eqn = place[var]
            made = "carried by the loop" if eqn is None else f"{eqn.primitive.name} {place_of(eqn)}".strip()
            local = layout.local(nbytes)
            kept.append(Kept(equation, output, local, f"{var.aval.str_short()} {made}", few, on_host))
        seconds, working = one.seconds * (turns or 1) / layout.devices, layout.local(option.working)
        found.append(Stretch(choice.start, choice.stop, tuple(kept), handed_on, turns, seconds, working))
        handed_on = 0
    return found
