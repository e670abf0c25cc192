"""How the passes of a step run by a plan that was made before."""

from __future__ import annotations

from memjax._jit.derivatives.body import Acting, Body
from memjax._jit.step_plan import StepPlan
from memjax._plan.acting import by_plan
from memjax._plan.memory.layout import Layout
from memjax._plan.run import Run

MAKE_ONE = "make it by step.plan(*args) of what you pass here"


def acting_by(body: Body, plan: StepPlan, layout: Layout) -> Acting:
    """How the passes of a step run by a plan that was made for it.

    Raises:
      ValueError: it was made for another step.
    """
    passes = list(body.every())
    if len(passes) != len(plan.passes):
        raise ValueError(
            f"plan must be of this step, got one for {len(plan.passes)} derivatives where this step has {len(passes)}: {MAKE_ONE}"
        )
    pairs = zip(passes, plan.passes, strict=True)
    found = {one: by_plan(one, part, layout) for one, part in pairs if part is not None and part.stretches}
    return {one: run for one, run in found.items() if isinstance(run, Run)}
