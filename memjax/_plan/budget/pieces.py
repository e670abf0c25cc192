"""From plain data to what runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from memjax._plan.codes import Code
from memjax._plan.derivative import LoopPair
from memjax._plan.loop import Part
from memjax._plan.result import Stretch
from memjax._plan.run import Piece
from memjax._plan.solve.chain import Chain


def pieces(chain: Chain, stretches: Sequence[Stretch]) -> list[Piece]:
    """The stretches as they are run, `chain` being one of the program that they were found for."""
    found: list[Piece] = []
    for (start, stop), same in itertools.groupby(stretches, lambda stretch: (stretch.start, stretch.stop)):
        of_turns = list(same)
        segment = chain.between(start, stop)
        loop = None if of_turns[0].turns is None else chain.loops[start]
        program = chain.derivative.forward if loop is None else loop.program
        parts = []
        for stretch in of_turns:
            kept: list[Any] = []
            coded: list[Any] = []
            moved: list[Any] = []
            for one in stretch.kept:
                outs = program.invars if one.equation < 0 else program.eqns[one.equation].outvars
                where = moved if one.on_host else kept if one.bits is None else coded
                where.append(outs[one.output])
            parts.append(Part(stretch.turns or 0, kept, codes_in(chain, loop, coded), moved))
        mine, codes = (parts[0].kept, parts[0].codes) if loop is None else ((), ())
        found.append(Piece(segment.backward, [*mine, *segment.crossing], codes, loop, parts if loop else ()))
    return found


def codes_in(chain: Chain, loop: LoopPair | None, coded: Iterable[Any]) -> list[Code]:
    """The codes of variables of the forward pass, or of a loop's body."""
    codes = chain.codes if loop is None else chain.codes_of_loop(loop)
    return [] if codes is None else [codes.of(var) for var in coded]
