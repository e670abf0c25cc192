"""What a turn of a loop costs for each way to keep something of it, as schedules over the turns are timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from memjax._core.program import costs
from memjax._core.program.dataflow import read_by
from memjax._core.program.jaxpr import Program, nbytes
from memjax._core.program.primitives import WHOLE_OPERANDS
from memjax._plan.schedule.choose import Costs
from memjax._plan.solve.segment import Option, Segment


class TurnCosts:
    """Seconds of a turn.

    Args:
      program: the body of the loop.
      turn: it as a stretch.
      carry: those of its outputs that are the next state.
      free: variables of the program that the backward pass has without keeping them.
      rates: of the device.

    Attributes:
      forward: of a turn that makes the next state and nothing else.
    """

    forward: float

    def __init__(self, program: Program, turn: Segment, carry: Sequence[Any], free: set[Any], rates: costs.Device):
        self._program, self._turn, self._carry, self._free = program, turn, list(carry), free
        self._rates = costs.in_turns(rates)
        self.forward = self._seconds(program.flow.needed(carry), carry) + self._rates.turn
        self._small = costs.in_loop(rates.platform)
        # What runs in the forward pass only for the backward pass does not run there if it runs again.
        both = [*turn.wanted, *carry]
        self._only_once = self._seconds(program.flow.needed(both), carry) - self._seconds(turn.primal, carry)

    def of(self, option: Option) -> Costs:
        """The costs by which a schedule is chosen. All `backward` pays for is running a turn again where it is backpropagated.

        A block of one turn stacks nothing: it makes all that is wanted, and is backpropagated then. Its state is written to a
        slot and read. Longer blocks make states once more, and stack what is kept.
        """
        flow, kept, known = self._program.flow, option.kept, {*self._free, *self._turn.lost}
        if self._rates.small is None:
            # Compilers for CPUs write what is kept before they read it.
            once = self._seconds(flow.needed(kept), kept)
            once += self._seconds(flow.needed(self._turn.wanted, {*self._free, *kept}), self._carry)
            once = max(once - self._only_once, self.forward)
        else:
            again, turn = flow.needed(self._turn.wanted, known), self._turn
            written = costs.stored([*again, *turn.backward], [*known, *turn.leaving], self._rates.platform)
            once = sum(costs.seconds(eqn, self._rates, written.__contains__) for eqn in again)
        states = [nbytes(var.aval) for var in self._carry]
        once += sum(costs.stacking_seconds(one, self._rates) for one in states)
        move = self._small.turn + sum(states) / self._small.stack
        return Costs(self.forward, once, max(self.forward + option.seconds - once, 0.0), self._small.loop, move)

    def slicing(self, option: Option, *, in_parts: bool) -> float:
        """Seconds of copying what products read of stacks, in a turn of both passes.

        XLA:GPU makes copies beside its kernels, which wait for them, of slices whose number is that of the turn: in a loop in
        parts those of what is kept, in a whole one all. In blocks kernels read slices themselves.
        """
        flow, turn = self._program.flow, self._turn
        again = [*flow.needed(turn.wanted, {*self._free, *option.kept}), *turn.backward]
        if in_parts:
            return self._rates.copy * len(_read_by_products(again).intersection(option.kept))
        passes = (turn.primal, turn.slices), (again, {*turn.slices, *option.kept})
        return self._rates.copy * sum(len(_read_by_products(eqns).intersection(stacks)) for eqns, stacks in passes)

    def _seconds(self, eqns: Sequence[Any], made: Sequence[Any]) -> float:
        program = dataclasses.replace(self._program, outvars=[*made], eqns=[*eqns])
        return costs.program_seconds(program, self._rates)


def _read_by_products(eqns: Sequence[Any]) -> set[Any]:
    return {*read_by([eqn for eqn in eqns if eqn.primitive.name in WHOLE_OPERANDS])}
