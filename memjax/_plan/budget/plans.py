"""The plans of a program that are worth a try, in a line from the least memory to the least time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from memjax._plan.budget.known import Known
from memjax._plan.budget.search import LARGE_GAIN, told_apart
from memjax._plan.result import Try
from memjax._plan.solve.chain import Choice
from memjax._plan.solve.leaner import leaner
from memjax._plan.solve.segment import Option

_LEANER = 1e-3  # of a step's time: what keeping less in a plan may cost


class Plans:
    """The plans that are worth a try, in a line.

    The first two are those of the least memory: that which keeps the least, for the model may be wrong about what is kept for
    nothing, and the fastest. After the line come plans that were made leaner.

    Attributes:
      predicted, seconds: of each; the seconds are a step's.
      count: of the plans in the line, the last of which runs nothing again that is worth keeping.
      in_steps: whether the backward pass runs in steps.
    """

    def __init__(self, program: Known, in_steps: bool = False):
        self._program, chain = program, program.chain
        self.in_steps = in_steps
        points = program.frontier
        chosen = told_apart([n for n, _ in points], [program.base_seconds + seconds for _, seconds in points])
        most = sum(choice.option.seconds for choice in chain.least_choices()) / program.layout.devices
        self._of_chain = [chain.frontier[i][0] for i in (0, *chosen)]
        self.predicted = [points[i][0] for i in (0, *chosen)]
        self.seconds = [program.base_seconds + seconds for seconds in (most, *(points[i][1] for i in chosen))]
        self.count = len(self.predicted)
        self._leaner: list[list[Choice]] = []
        self._kinds: dict[int, Hashable] = {}

    def choices(self, number: int) -> list[Choice]:
        """The plan of this number."""
        if number >= self.count:
            return self._leaner[number - self.count]
        chain = self._program.chain
        return chain.choices(self._of_chain[number]) if number else chain.least_choices()

    def add_leaner(self, number: int, towards: int | None = None, nbytes: int = 0, share: float = 0.0) -> int | None:
        """The number of a new plan, which keeps less than another; None if nothing costs little enough.

        Args:
          number: of the other.
          towards: of a plan that keeps less and is slower, if there is one. The new one is to be much faster.
          nbytes: of a device, so much less at least, if it may keep `towards` that one.
          share: of what that one keeps less; what goes is in the middle between both.
        """
        before, layout = self.choices(number), self._program.layout
        free, most, wanted = _LEANER * self.seconds[number], 0.0, 0.0
        if towards is not None:
            most = self.seconds[towards] / (1 + LARGE_GAIN) - self.seconds[number]
            kept = lambda choices: sum(one.option.kept_nbytes for one in choices)
            wanted = (nbytes * layout.devices + share * (kept(before) - kept(self.choices(towards)))) / 2
        choices = leaner(self._program.chain, before, free * layout.devices, wanted, most * layout.devices)
        if choices == before:
            return None
        seconds = lambda found: sum(one.option.seconds for one in found) / layout.devices
        self._leaner.append(choices)
        self.predicted.append(self._program.nbytes_of(choices))
        self.seconds.append(self.seconds[number] + seconds(choices) - seconds(before))
        return len(self.predicted) - 1

    def kind(self, number: int) -> Hashable:
        """Equal for plans of which the loops alone differ, and these in the turns of their parts alone."""
        if not self._program.chain.loops:
            return number
        if number not in self._kinds:
            self._kinds[number] = tuple(
                (
                    *(one.start, one.stop, _kind_of_blocks(one.option)),
                    *(_kept(part, turns) for turns, part in one.option.parts or ((0, one.option),)),
                )
                for one in self.choices(number)
            )
        return self._kinds[number]

    def compiled(self, number: int) -> int:
        """Its compiled bytes, or the predicted ones where there is nothing to compile."""
        nbytes = self._program.step_bytes(self._program.stretches(self.choices(number)), self.in_steps)
        return self.predicted[number] if nbytes is None else nbytes

    def expected_least(self, tries: Sequence[Try]) -> tuple[float, bool]:
        """Bytes of the plan that is predicted to take the least, by those of this way that were compiled, and whether it was."""
        if not tries:
            return 0.0, False
        for one in tries:
            if one.number <= 1:
                return one.compiled, True
        nearest = min(tries)
        return nearest.compiled - (nearest.predicted - self.predicted[0]), False

    def tried(self, number: int) -> Try:
        """One that is predicted to take the least, compiled."""
        return Try(number, self.predicted[0], self.predicted[0], self.compiled(number))

    def least(self, alone: bool = False) -> list[Try]:
        """The first two, or the faster one alone, compiled: first the one that takes less memory, or of equals the faster one."""
        found = map(self.tried, (1,) if alone else (0, 1))
        return sorted(found, key=lambda one: (one.compiled, -one.number))


def _kind_of_blocks(option: Option) -> Hashable:
    """Equal for loops whose turns run again in the same loops, of other lengths."""
    plan = option.in_blocks
    return None if plan is None else (len(plan.levels), plan.block > 1, plan.tail > plan.block)


def _kept(option: Option, turns: int) -> Hashable:
    """What is kept; a loop of one turn is none when it is compiled."""
    return min(turns, 2), option.kept, option.coded, option.moved
