"""A traced step within a budget of bytes: which passes keep less, decided by compiling the step as it will run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from memjax._jit.body import Acting, Body, StepPasses
from memjax._jit.step_plan import StepPlan
from memjax._plan.acting import by_plan
from memjax._plan.budget.decide import TooLittleError, decide
from memjax._plan.budget.known import Key, Known, key_of
from memjax._plan.layout import Layout
from memjax._plan.result import Plan
from memjax._plan.run import Run

Compile = Callable[[Acting], Any]
"""Compiles the step with these passes run otherwise than they are."""


class DoesNotFitError(ValueError):
    """No plan fits the budget. It has the plan that takes the least, and the program."""

    def __init__(self, plan: StepPlan, program: Any):
        super().__init__(f"the least possible is {plan.nbytes} bytes")
        self.plan, self.program = plan, program


class Compiled(NamedTuple):
    """A compiled step.

    Attributes:
      program: the executable.
      nbytes: what it holds on a device: see `held_bytes`.
    """

    program: Any
    nbytes: int


def held_bytes(program: Any) -> int:
    """Bytes of a device that a compiled program holds: arguments, results that are no donated arguments, temporaries, code."""
    found = program.memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes + found.generated_code_size_in_bytes


class Fit:
    """The search for a plan of a step.

    Args:
      body: the step.
      layout: of its inputs.
      plain: it, compiled as it is.
      compile_with: compiles it otherwise.
      compress, offload: what plans may do besides computing again.
    """

    def __init__(
        self,
        body: Body,
        layout: Layout,
        plain: Compiled,
        compile_with: Compile,
        *,
        compress: bool,
        offload: bool,
    ):
        self._passes = list(body.every())
        self._layout, self._plain, self._compile_with = layout, plain, compile_with
        self._allowed = {"compress": compress, "offload": offload}
        self._acting: dict[StepPasses, Run] = {}
        self._plans: dict[StepPasses, Plan] = {}
        self._before: dict[Any, dict[Any, Known]] = {}
        self._compiled: dict[Any, Compiled] = {}
        # What no plan changes: arguments, results.
        self._beside = plain.nbytes - plain.program.memory_analysis().temp_size_in_bytes

    def within(self, budget: int | str) -> tuple[StepPlan, Any]:
        """The plan, and the step compiled with it.

        The passes are decided on one after another, the others being as they were left. Where one alone cannot make the step fit,
        it takes the least memory, and the next go on from there; at last the first are decided on again, with what the others
        left free.

        Raises:
          DoesNotFitError: the budget is less than the least possible.
        """
        room = budget if isinstance(budget, str) else budget - self._beside
        fits = self._each(room)
        if fits and len(self._acting) > 1 and room != "min":
            self._each(room)
        best = self._now()
        plan = self._plan(budget, best.nbytes)
        if not fits:
            raise DoesNotFitError(plan, best.program)
        return plan, best.program

    def _each(self, room: int | str) -> bool:
        """Decides on the passes, one after another, until the step fits; whether it does."""
        for passes in self._passes:
            others = {one: run for one, run in self._acting.items() if one is not passes}
            try:
                plan, fits = self._decided(passes, room, others), room != "min"
            except TooLittleError:
                plan, fits = self._decided(passes, "min", others), False
            run = by_plan(passes, plan, self._layout) if plan.stretches else None
            self._plans[passes] = plan
            self._acting = {**others, passes: run} if isinstance(run, Run) else others
            if fits and not any(one in self._acting for one in self._after(passes)):
                return True
        return room == "min"

    def _after(self, passes: StepPasses) -> list[StepPasses]:
        return self._passes[self._passes.index(passes) + 1 :]

    def _decided(self, passes: StepPasses, room: int | str, others: Acting) -> Plan:
        types = [var.aval for var in passes.forward.invars]
        of_others = self._key(others)

        def measure(run: Run | None, key: Key) -> int:
            if run is None:
                return self._step(others, of_others)
            return self._step({**others, passes: run}, of_others | {(passes, key)})

        before = self._before.setdefault((passes, of_others), {})
        return decide(passes, types, self._layout, room, measure=measure, before=before, **self._allowed)

    def _key(self, acting: Acting) -> frozenset[Any]:
        return frozenset((one, key_of(self._plans[one].stretches, self._plans[one].in_steps)) for one in acting)

    def _step(self, acting: Acting, key: frozenset[Any]) -> int:
        """Temporary bytes of the step, compiled once for each key."""
        if not acting:
            return self._plain.nbytes - self._beside
        if key not in self._compiled:
            program = self._compile_with(acting)
            self._compiled[key] = Compiled(program, held_bytes(program))
        return self._compiled[key].nbytes - self._beside

    def _now(self) -> Compiled:
        key = self._key(self._acting)
        self._step(self._acting, key)
        return self._compiled[key] if self._acting else self._plain

    def _plan(self, budget: int | str, nbytes: int) -> StepPlan:
        plans = tuple(self._plans[one] if one in self._acting else None for one in self._passes)
        return StepPlan(nbytes if isinstance(budget, str) else budget, nbytes, self._plain.nbytes, plans)


def acting_by(body: Body, plan: StepPlan, layout: Layout) -> Acting:
    """How the passes of a step run by a plan that was made for it.

    Raises:
      ValueError: it was made for another step.
    """
    passes = list(body.every())
    if len(passes) != len(plan.passes):
        raise ValueError(
            f"plan must be of this step, got one for {len(plan.passes)} derivatives where this step has {len(passes)}: make it "
            "by step.plan(*args) of what you pass here"
        )
    found = {one: by_plan(one, part, layout) for one, part in zip(passes, plan.passes, strict=True) if part is not None}
    return {one: run for one, run in found.items() if isinstance(run, Run)}
