"""A traced step within a budget of bytes: which passes keep less, decided by compiling the step as it will run."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from memjax._core.meshes import device_of
from memjax._core.program import costs
from memjax._jit.candidates import Chosen, Compile, Compiled, DoesNotFitError, Rank, held_bytes, key_of_all, leanest
from memjax._jit.derivatives.body import Body
from memjax._jit.derivatives.passes import StepPasses
from memjax._jit.step_plan import StepPlan, StepPoint
from memjax._jit.together import Line
from memjax._jit.ways.predictions import Predictions, bytes_in_order, plain_bytes, way_of
from memjax._plan.acting import by_plan
from memjax._plan.batch.microbatches import Sums
from memjax._plan.budget.decide import OF_PARTS, Effort, TooLittleError, decide, is_hopeless, plan_of
from memjax._plan.budget.known import Allowed, Key, Known, Measure, key_of, known
from memjax._plan.budget.plans import Plans
from memjax._plan.budget.search import LARGE_GAIN, OF_ONE, search
from memjax._plan.memory.layout import Layout
from memjax._plan.result import Plan, Try
from memjax._plan.run import Run

_MOST_ONE_BY_ONE = 3  # derivatives: each of them takes a few compilations then
_SURELY = 1.2  # times the budget: a step that is predicted to hold so much is not compiled as it is
_SURELY_IN_PARTS = 1.05  # the same in microbatches: more of them will fit
_IN_ORDER = 12  # parts of a line of plans, at the ends of which plans are compared by the model of the whole step
_ALMOST_NOTHING = 1.15  # of a step's time: where plans compute more again than that, none keeps what it keeps
_CERTAINLY = 1.5  # times the bytes of a plan: a step that is predicted to hold more takes more than that as it is


class Fit:
    """The search for a plan of a step.

    Args:
      body: the step.
      layout: gives that of its inputs; it is called once something is predicted.
      compile_with: compiles it.
      beside: bytes of a device that no plan changes, about: arguments and results, sums over microbatches.
      compress, offload: what plans may do besides computing again.
      sums: of the gradients of microbatches; their bytes are among those of `beside`.
      predictions: of the step in this way and others; None: nothing else is compiled of it.
    """

    def __init__(
        self,
        body: Body,
        layout: Callable[[], Layout],
        compile_with: Compile,
        beside: int,
        *,
        compress: bool,
        offload: bool,
        sums: Sums = Sums(),  # noqa: B008 (it is immutable)
        predictions: Predictions | None = None,
    ):
        self._passes, self._body = list(body.every()), body
        self._layout_of, self._beside, self._compile_with = layout, beside, compile_with
        self._sums, self._predictions = sums, predictions or Predictions()
        self._allowed: dict[str, Any] = {"compress": compress, "offload": offload}
        self._acting: Chosen = {}
        self._plans: dict[StepPasses, Plan] = {}
        self._before: dict[Any, dict[Any, Known]] = {}
        self._compiled: dict[Any, Compiled] = {}
        self._elsewhere = 0

    @functools.cached_property
    def _layout(self) -> Layout:
        return self._layout_of()

    @property
    def plain(self) -> Compiled:
        """The step with its passes as they are."""
        return self._compiled_with({})

    @functools.cached_property
    def predicted_plain(self) -> int:
        """Bytes that the step with its passes as they are is predicted to hold, by the lower prediction: it may fit."""
        return self._beside + min(self._by_model({}), self._by_passes({}))

    @functools.cached_property
    def predicted_kept(self) -> int:
        """The same, more slowly: what plans predict where almost nothing is computed again. That is nearer where XLA fuses it."""
        is_cpu = costs.device(device_of(self._layout.shardings)).platform == "cpu"
        if is_cpu or self.kept_seconds > _ALMOST_NOTHING * self.base_seconds:
            return self.predicted_plain
        return self._beside + max((self._known(one).frontier[-1][0] for one in self._passes), default=0)

    def may_fit_plain(self, budget: int) -> bool:
        """Whether that step is worth compiling, by either prediction."""
        surely = (_SURELY if self._body.microbatches == 1 else _SURELY_IN_PARTS) * budget
        return self.predicted_plain <= surely or self.predicted_kept <= budget

    @property
    def is_plain_compiled(self) -> bool:
        return key_of_all({}) in self._compiled

    @property
    def plain_nbytes(self) -> int:
        """Bytes that the step with its passes as they are holds; predicted, where it was not compiled."""
        return self.plain.nbytes if self.is_plain_compiled else self.predicted_plain

    def rank(self, budget: int | str) -> Rank:
        """What ways to run a step are compared by: predictions, each derivative having the whole budget; for "min" bytes."""
        if isinstance(budget, str):
            return Rank(self._beside + min(self._known(one).frontier[0][0] for one in self._passes), 0.0)
        again = 0.0
        for one in map(self._known, self._passes):
            fitting = [more for nbytes, more in one.frontier if self._beside + nbytes <= budget]
            again += min(fitting, default=math.inf)
        again *= self._body.microbatches
        return Rank(self.base_seconds + again, again)

    @functools.cached_property
    def base_seconds(self) -> float:
        """Predicted seconds of the derivatives with nothing computed again, sums over microbatches included."""
        of_parts = sum(self._known(one).base_seconds for one in self._passes)
        return self._body.microbatches * of_parts + self._sums.seconds

    @functools.cached_property
    def kept_seconds(self) -> float:
        """The same with nothing computed again that is worth keeping."""
        return self.base_seconds + self._body.microbatches * sum(map(self._again, self._passes))

    def _again(self, passes: StepPasses, plan: Plan | None = None) -> float:
        one = self._known(passes)
        return one.frontier[-1][1] if plan is None else plan.seconds - one.base_seconds

    def frontier(self) -> list[StepPoint]:
        """The bytes that plans are predicted to hold, and their seconds."""
        sizes = {self._beside + nbytes for one in map(self._known, self._passes) for nbytes, _ in one.frontier}
        found = [
            StepPoint(size, self.rank(size).cost, self._body.microbatches, bool(self._body.tiled)) for size in sizes
        ]
        return [point for point in found if point.seconds < math.inf]

    def within(self, budget: int | str, thoroughly: bool = True, patiently: bool = False) -> tuple[StepPlan, Any]:
        """The plan, and the step compiled with it.

        With its passes as they are the step may fit, as where a loss runs tile by tile. Else they are decided on together. Where
        that is not as good as predicted, a few are decided on one after another: all begin with the plan that is predicted to
        take the least memory.

        Args:
          budget: bytes of a device, or "min".
          thoroughly, patiently: as for `decide`.

        Raises:
          DoesNotFitError: the budget is less than the least possible.
        """
        self._acting, self._plans, self._elsewhere = {}, {}, 0  # a search before, not as thorough, may have left some
        if isinstance(budget, int) and (self.is_plain_compiled or self.may_fit_plain(budget)):
            if self.plain.nbytes <= budget:
                return self._plan(budget, self.plain.nbytes), self.plain.program
            is_far = self._expected_least() > OF_ONE * (budget - self._beside)
            if not thoroughly and (is_far or self._body.microbatches > 1):  # more microbatches will do
                raise DoesNotFitError(self._plan(budget, self.plain.nbytes), self.plain.program)
        room = budget if isinstance(budget, str) else budget - self._beside
        found: list[tuple[StepPlan, Any]] = []
        if self._may_be_together(room):
            fast, least_tries = self._together(room if isinstance(room, int) else 0, thoroughly)
            found.append(self._planned(budget))
            if isinstance(budget, int) and fast and found[0][0].nbytes <= budget:
                return found[0]
            if not thoroughly and isinstance(budget, int) and found[0][0].nbytes > budget:
                raise DoesNotFitError(*found[0])
            if isinstance(room, int) and is_hopeless(least_tries, room, OF_ONE):
                return self._if_it_fits(budget, *self.least_of(*leanest([found[0], *self._least_in_order(budget)])))
        if not found or len(self._passes) <= _MOST_ONE_BY_ONE:
            if len(self._passes) > 1:
                self._acting = {one: self._least(one) for one in self._passes}
            for passes in self._passes:
                self._decide(passes, room, Effort(thoroughly, patiently, self._as_written))
            found.append(self._planned(budget))
        fits = lambda one: isinstance(budget, int) and one[0].nbytes <= budget
        if not any(map(fits, found)):
            # What a search for this budget met by chance and is over it must not be called the least: others would not meet it.
            most = budget if isinstance(budget, int) else min(plan.nbytes for plan, _ in found) - 1
            found += self._met_on_the_way(most, budget)
        if fitting := [*filter(fits, found)]:
            return min(fitting, key=lambda one: one[0].seconds)
        if not thoroughly and isinstance(budget, int):
            raise DoesNotFitError(*leanest(found))
        return self._if_it_fits(budget, *self.least_of(*leanest(found + self._least_in_order(budget))))

    def _least_in_order(self, budget: int | str) -> list[tuple[StepPlan, Any]]:
        """The plan that takes the least by the model of the whole step in order, if plans are not ranked by that.

        What keeps the least need not take it, as XLA makes some arrays early. No budget decides which plan this is: a search for
        what is named as the least meets it again.
        """
        if not self._is_in_order or any(self._allowed.values()):
            return []
        line = Line([self._known(one) for one in self._passes], in_steps=False)
        last = len(line.predicted) - 1
        some = {last * i // _IN_ORDER for i in range(_IN_ORDER + 1)}
        models = {way: self._by_model(self._chosen(line, way)) for way in sorted(some)}
        way = min(models, key=lambda way: (models[way], way))
        if models[way] >= min(one.nbytes for one in self._compiled.values()) - self._beside:
            return []
        self._acting = self._chosen(line, way)
        found = Try(way, line.predicted[way], models[way], self._step(self._acting))
        self._plans = dict(zip(self._passes, line.as_plans([found], found, found.compiled), strict=True))
        return [self._planned(budget)]

    def least_predicted(self, budget: int) -> tuple[StepPlan, Any]:
        """The plan that is predicted to take the least, and the step compiled with it, and with no other."""
        self._acting = {one: self._least(one) for one in self._passes}
        nbytes = self._compiled_with(self._acting).nbytes
        plans = {one: self._plan_with(one, key, nbytes) for one, (_, key) in self._acting.items()}
        self._plans = {one: plan for one, plan in plans.items() if plan is not None}
        return self._planned(budget)

    def _if_it_fits(self, budget: int | str, plan: StepPlan, program: Any) -> tuple[StepPlan, Any]:
        if isinstance(budget, int) and plan.nbytes > budget:
            raise DoesNotFitError(plan, program)
        return plan, program

    def _expected_least(self) -> float:
        """Bytes, beside what no plan changes, of the least plan: as many less than the step's as is predicted."""
        saved = self.predicted_plain - self.rank("min").cost
        return self.plain.nbytes - self._beside - max(saved, 0)

    def _met_on_the_way(self, most: int, budget: int | str) -> list[tuple[StepPlan, Any]]:
        """The step that was compiled to decide on a derivative and takes the least, if that is no more than `most`.

        What the others keep changes between one decision and the next.
        """
        least = min(self._compiled.values(), key=lambda one: one.nbytes)
        if least.nbytes > most or not least.acting:
            return []
        plans = {one: self._plan_with(one, key, least.nbytes) for one, (_, key) in least.acting.items()}
        self._acting, self._plans = least.acting, {one: plan for one, plan in plans.items() if plan is not None}
        return [self._planned(budget)] if len(self._plans) == len(plans) else []

    def _plan_with(self, passes: StepPasses, key: Key, nbytes: int) -> Plan | None:
        """The plan in the line of the derivative with this key, if it is in it; it takes so many bytes."""
        program, room = self._known(passes), nbytes - self._beside
        program.compiled[key] = room
        for plans in (Plans(program, in_steps) for in_steps in (False, True)):
            for number, predicted in enumerate(plans.predicted):
                if key_of(program.stretches(plans.choices(number)), plans.in_steps) == key:
                    found = Try(number, predicted, predicted, room)
                    return plan_of(program, plans, found, [found], room)
        return None

    def _planned(self, budget: int | str) -> tuple[StepPlan, Any]:
        """The step with what is decided on by now."""
        now = self._compiled_with(self._acting)
        return self._plan(budget, now.nbytes), now.program

    def least_of(self, plan: StepPlan, program: Any) -> tuple[StepPlan, Any]:
        """A plan for the least memory, or the step with its passes as they are if that takes no more.

        Where parameters outweigh what is kept between the passes, computing again can take more than it gives back.
        """
        if self.predicted_plain > _CERTAINLY * plan.nbytes:
            return plan, program
        nbytes = self.plain.nbytes
        if nbytes > plan.nbytes:
            return dataclasses.replace(plan, plain_nbytes=nbytes), program
        self._acting = {}
        return self._plan(min(plan.budget, nbytes), nbytes), self.plain.program

    def _may_be_together(self, room: int | str) -> bool:
        several = len(self._passes) > (1 if isinstance(room, int) else _MOST_ONE_BY_ONE)
        return several and not any(self._allowed.values())

    def _together(self, room: int, thoroughly: bool) -> tuple[bool, list[Try]]:
        """Decides on all passes at once.

        Args:
          room: bytes for them.
          thoroughly: as for `within`.

        Returns:
          Whether the step is about as fast then as was predicted, and of each line that was tried what takes the least.
        """
        programs = [self._known(one) for one in self._passes]
        found: list[tuple[Line, Try, list[Try]]] = []
        patience = OF_PARTS if thoroughly else OF_PARTS._replace(over=OF_ONE)
        for in_steps in (False, True):
            line = Line(programs, in_steps)
            compiled = lambda way, line=line: self._step(self._chosen(line, way))
            if room and found and is_hopeless([found[0][1]], room, OF_ONE):
                first = Try(0, line.predicted[0], line.predicted[0], compiled(0))
                if is_hopeless([first], room, OF_ONE):
                    found.append((line, first, [first]))
                    break
            tries = search(line.predicted, line.seconds, room, compiled, line.kind, patience)
            fitting = [one for one in tries if one.compiled <= room]
            # That of the least is in every search that fails, so that it is found again where it is the budget.
            tried_least = next((one for one in tries if one.number == 0), None)
            best = max(fitting, default=tried_least) or min(tries, key=lambda one: one.compiled)
            found.append((line, best, tries))
            if fitting or (not thoroughly and is_hopeless([best], room, OF_ONE)):
                break
        least = [best for _, best, _ in found]
        line, best, tries = min(found, key=lambda one: max(one[1].compiled - room, 0))
        self._acting = self._chosen(line, best.number)
        self._plans = dict(zip(self._passes, line.as_plans(tries, best, room), strict=True))
        ideal = min((s for n, s in zip(line.predicted, line.seconds, strict=True) if n <= room), default=math.inf)
        return line.seconds[best.number] <= (1 + LARGE_GAIN) * ideal, least

    def _chosen(self, line: Line, way: int) -> Chosen:
        return {one: run for one, run in zip(self._passes, line.runs(way), strict=True) if run is not None}

    @property
    def _as_written(self) -> tuple[int, int] | None:
        """What the step was predicted to take with its passes as they are, and took; None where that says little of plans."""
        is_alike = self.is_plain_compiled and len(self._passes) == 1 and self._layout.devices > 1
        return (self._by_passes({}), self.plain.nbytes - self._beside) if is_alike else None

    def _decide(self, passes: StepPasses, room: int | str, effort: Effort) -> None:
        """Decides on the passes. If the step does not fit then, they take the least memory."""
        least = self._acting.pop(passes, None)
        if least is not None and isinstance(room, int):
            # Where the peak is elsewhere, compiling says nothing of these passes.
            self._elsewhere = min(self._step({**self._acting, passes: least}), room)
        measure, before = self._measured(passes)
        try:
            plan = decide(*self._program(passes), room, measure=measure, before=before, effort=effort, **self._allowed)
        except TooLittleError as error:
            plan = error.least
        run = by_plan(passes, plan, self._layout) if plan.stretches else None
        self._plans[passes] = plan
        if isinstance(run, Run):
            self._acting[passes] = run, key_of(plan.stretches, plan.in_steps)

    def _least(self, passes: StepPasses) -> tuple[Run, Key]:
        """The plan that is predicted to take the least memory."""
        program = self._known(passes)
        stretches = program.stretches(program.chain.least_choices())
        return program.run(stretches), key_of(stretches, False)

    def _known(self, passes: StepPasses) -> Known:
        return known(*self._program(passes), Allowed(**self._allowed), *self._measured(passes))

    def _program(self, passes: StepPasses) -> tuple[StepPasses, list[Any], Layout]:
        return passes, [var.aval for var in passes.forward.invars], self._layout.within(passes.axes)

    def _measured(self, passes: StepPasses) -> tuple[Measure, dict[Any, Known]]:
        """What compiles the step with a plan of these passes, the others being as they are, and what is known of the plans."""

        def measure(run: Run | None, key: Key) -> int | None:
            others = {one: chosen for one, chosen in self._acting.items() if one is not passes}
            found = self._step(others if run is None else {**others, passes: (run, key)})
            return None if found <= self._elsewhere else found

        return measure, self._before.setdefault(passes, {})

    def _step(self, acting: Chosen) -> int:
        """Temporary bytes of the step, compiled once."""
        return self._compiled_with(acting).nbytes - self._beside

    def _compiled_with(self, acting: Chosen) -> Compiled:
        key = key_of_all(acting)
        if key not in self._compiled:
            way, model = way_of(self._body, [key for _, key in acting.values()]), self._by_model(acting)
            predicted = self._beside + self._predictions.corrected(way, model)
            program = self._compile_with({one: run for one, (run, _) in acting.items()})
            nbytes = held_bytes(program)
            self._predictions.note(way, model, nbytes - self._beside)
            self._compiled[key] = Compiled(program, nbytes, predicted, dict(acting))
        return self._compiled[key]

    @property
    def _is_in_order(self) -> bool:
        """Whether the order is known that XLA runs the whole step in."""
        return (self._layout.devices, device_of(self._layout.shardings).platform) == (1, "cpu")

    def _by_model(self, acting: Chosen) -> int:
        """Temporary bytes that the model predicts of the passes run so."""
        if self._is_in_order:
            return bytes_in_order(self._body, {one: run for one, (run, _) in acting.items()}) - self._sums.nbytes
        return self._by_passes(acting)

    def _by_passes(self, acting: Chosen) -> int:
        """The same of the passes alone, the most that any of them takes."""
        planned = [self._known(one).predicted(key) for one, (_, key) in acting.items()]
        plain = (plain_bytes(one, self._layout.within(one.axes)) for one in self._passes if one not in acting)
        return max([*planned, *plain], default=0)

    def _plan(self, budget: int | str, nbytes: int) -> StepPlan:
        plans = tuple(self._plans[one] if one in self._acting else None for one in self._passes)
        on = self._body.tile_on
        tiles = (tuple(self._body.tiled), on.nbytes, on.chunks) if on else ((), 0, 0)
        asked = nbytes if isinstance(budget, str) else budget
        body = self._body
        how = *tiles, body.inner_again, body.microbatches, body.updates_in_loops, body.two_passes
        predicted = self._compiled_with(self._acting).predicted
        both = zip(self._passes, plans, strict=True)
        seconds = self.base_seconds + body.microbatches * sum(self._again(one, plan) for one, plan in both)
        found = StepPlan(asked, nbytes, self.plain_nbytes, plans, *how, predicted_nbytes=predicted)
        return dataclasses.replace(found, seconds=seconds, plain_seconds=self.kept_seconds)
