"""Plans of all derivatives of a step at once, so that few programs are compiled.

The derivatives of a step run one after another, so the step's peak is that of the largest one, and all may use equally
many bytes. So there is one list of ways to run the step, from the fewest predicted bytes to the most. In each way,
every derivative has its fastest plan within that many bytes. The first way is an exception: it has for each derivative the plan
that takes the least, or the one that runs nothing again where that takes no more than the others.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence

from memjax._plan.budget.decide import plan_of
from memjax._plan.budget.known import Key, Known, key_of
from memjax._plan.budget.plans import Plans
from memjax._plan.result import Plan, Try
from memjax._plan.run import Run


class Line:
    """Ways to run all derivatives, each by the fastest plan that is predicted to take no more than so many bytes.

    Args:
      programs: the derivatives.
      in_steps: whether backward passes run in steps.

    Attributes:
      predicted, seconds: of each way; the bytes are those of the derivative that takes the most.
    """

    def __init__(self, programs: Sequence[Known], in_steps: bool):
        self._programs, self._in_steps = programs, in_steps
        self._plans = [Plans(program, in_steps) for program in programs]
        least = max(plans.predicted[0] for plans in self._plans)
        levels = sorted({least, *(n for plans in self._plans for n in plans.predicted if n > least)})
        within = lambda level: [bisect.bisect_right(plans.predicted, level) - 1 for plans in self._plans]
        first = [plans.count - 1 if plans.predicted[plans.count - 1] <= least else 1 for plans in self._plans]
        self._numbers = [first, *map(within, levels)]
        self.predicted = [least, *levels]
        self.seconds = [
            sum(plans.seconds[number] for plans, number in zip(self._plans, numbers, strict=True))
            for numbers in self._numbers
        ]

    def kind(self, way: int) -> Hashable:
        """Equal for ways that differ in turns of loops alone: see `Plans.kind`."""
        return tuple(plans.kind(number) for plans, number in zip(self._plans, self._numbers[way], strict=True))

    def runs(self, way: int) -> list[tuple[Run, Key] | None]:
        """For each derivative, how it is run, and a key that differs from that of other ways; None: as written."""
        found: list[tuple[Run, Key] | None] = []
        for program, plans, number in zip(self._programs, self._plans, self._numbers[way], strict=True):
            if self._as_written(program, plans, number):
                found.append(None)
                continue
            stretches = program.stretches(plans.choices(number))
            found.append((program.run(stretches, self._in_steps), key_of(stretches, self._in_steps)))
        return found

    def as_plans(self, tries: Sequence[Try], chosen: Try, budget: int) -> list[Plan]:
        """One of the ways that were compiled as data, by derivative."""
        found = []
        for i, (program, plans) in enumerate(zip(self._programs, self._plans, strict=True)):
            of_one = lambda one, i=i, plans=plans: one._replace(
                number=self._numbers[one.number][i], predicted=plans.predicted[self._numbers[one.number][i]]
            )
            own = of_one(chosen)
            key = key_of(program.stretches(plans.choices(own.number)), self._in_steps)
            before = dict(program.compiled)
            program.compiled[key] = chosen.compiled
            found.append(plan_of(program, plans, own, [of_one(one) for one in tries], budget))
            # It is known with these plans of the others alone.
            program.compiled.clear()
            program.compiled.update(before)
        return found

    def _as_written(self, program: Known, plans: Plans, number: int) -> bool:
        """Whether nothing is computed again. A loop keeps its plan: see `decide`."""
        return number == plans.count - 1 and not program.chain.loops
