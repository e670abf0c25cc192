"""What of a step may be kept, and what that costs: as plans find it for the turns of a loop, by the same model."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from memjax._core.platforms import traced_device
from memjax._core.program import costs
from memjax._core.program.dataflow import variables
from memjax._core.program.jaxpr import Program
from memjax._plan.schedule.choose import Costs, check_budget, fastest
from memjax._plan.schedule.execute import LoopPlan
from memjax._plan.schedule.unroll import ONE, Unroll
from memjax._plan.solve.loops import MOST_BODIES, corners
from memjax._plan.solve.phases import available_anywhere
from memjax._plan.solve.segment import Option, Segment, options
from memjax._plan.solve.turn import TurnCosts
from memjax.remat._scan.step import StepBackward


class Way(NamedTuple):
    """What is kept of a step, the plan over the steps, and how many of them a turn of a loop takes."""

    backward: StepBackward
    plan: LoopPlan
    unroll: Unroll = ONE


class Ways:
    """The ways to keep something of a step, each with its costs.

    Args:
      backward: of the step, with the fewest bytes that no product runs again for.
      measured: costs of a step that keeps these; None: those of the model.
    """

    def __init__(self, backward: StepBackward, measured: Costs | None):
        rates = costs.device(traced_device())
        program, pull = backward.program, backward.pull()
        free = available_anywhere(program, backward.available)
        turn = _turn(backward, pull, free)
        timed = TurnCosts(program, turn, program.outvars[: len(backward.step.carry)], free, rates)
        back = costs.program_seconds(pull, costs.in_turns(rates))

        def of(option: Option) -> Costs:
            found = timed.of(option)
            return dataclasses.replace(found, backward=back + found.backward)

        found = corners(options(turn, costs.in_turns(rates), free, is_loop=True))[:MOST_BODIES]
        first = min(found, key=lambda option: abs(option.kept_nbytes - backward.kept_nbytes))
        self.costs = measured or of(first)
        self._ways = [(backward, self.costs, 0)]
        for option in found:
            if option is not first:
                mine = of(option) if measured is None else _scaled(measured, of(first), of(option))
                self._ways.append((backward.keeping(option.kept), mine, max(option.working - first.working, 0)))

    def least(self, length: int) -> int:
        """The least bytes within which there is a way."""
        return min(self._least(backward, length) + more for backward, _, more in self._ways)

    @staticmethod
    def _least(backward: StepBackward, length: int) -> int:
        steps = backward.steps(length)
        return check_budget("min", length, steps.carry_nbytes, steps.kept_nbytes)

    def seconds(self, way: Way) -> float:
        """About how long the steps of a way take."""
        each = next(each for backward, each, _ in self._ways if backward is way.backward)
        return way.plan.length * (each.backward + way.plan.forward_runs * each.forward)

    def fastest(self, length: int, room: int) -> Way:
        """The way of the least predicted time within so many bytes, those that it works with more than the first included."""
        timed = []
        for backward, each, more in self._ways:
            if self._least(backward, length) <= room - more:
                plan, seconds = fastest(backward.steps(length), room - more, each)
                timed.append((seconds, Way(backward, plan)))
        return min(timed, key=lambda one: one[0])[1]


def _turn(backward: StepBackward, pull: Program, free: set[Any]) -> Segment:
    """A step and its backward pass as a stretch."""
    program, step = backward.program, backward.step
    lost = [var for var in program.invars if var not in free]
    made = {*program.flow.place, *lost}
    read = pull.flow.read | dict.fromkeys(variables(pull.outvars))
    outs = program.outvars[: len(step.carry) + len(step.y)]
    return Segment(
        eqns=program.eqns,
        backward=pull.eqns,
        wanted=[var for var in read if var in made],
        crossing=(),
        entering=[var for var in pull.invars if var in read],
        leaving=variables(pull.outvars),
        results=(),
        primal=program.flow.needed(outs, always=program.flow.acting),
        lost=lost,
        slices=program.invars[len(program.invars) - len(step.x) :],
    )


def _scaled(measured: Costs, first: Costs, one: Costs) -> Costs:
    """The costs of `one`, from those measured of `first`."""
    unit = measured.forward / first.forward if first.forward else 0.0
    backward = measured.backward + unit * (one.backward - first.backward)
    store = measured.store + unit * (one.store - first.store)
    return dataclasses.replace(measured, backward=max(backward, 0.0), store=max(store, 0.0))
