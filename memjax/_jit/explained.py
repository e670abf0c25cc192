"""Why a plan of a step takes other bytes than were predicted."""

from __future__ import annotations

from memjax._core.program.scopes import Paths
from memjax._explain.compared import PeakComparison, compared
from memjax._explain.parts import Alive
from memjax._explain.peak import alive_at_peak
from memjax._jit.account import beside
from memjax._jit.call import Call
from memjax._jit.candidates import fixed_bytes
from memjax._jit.decide import Entry, passes_by
from memjax._jit.derivatives.passes import StepPasses
from memjax._plan.predicted import predicted_at_peak
from memjax._plan.result import Plan


def explained_peak(call: Call, entry: Entry, paths: Paths) -> PeakComparison:
    """What is predicted to be alive where the derivative that takes the most does so, beside what is alive in the compiled step.

    Args:
      call: the step for certain arguments.
      entry: it as planned.
      paths: of its function.
    """
    passes, layout, traced = passes_by(call, entry.plan)
    parts = entry.plan.passes or (None,) * len(passes)

    def alive(one: StepPasses, part: Plan | None) -> list[Alive]:
        here = layout.within(one.axes)
        around = Alive("results of loops, branches or shard_maps around it", "", "", here.local(one.around))
        return [*predicted_at_peak(one, part, here), *([around] if around.bytes else [])]

    every = [alive(one, part) for one, part in zip(passes, parts, strict=True)]
    most = max(every, key=lambda alive: sum(one.bytes for one in alive), default=[])
    found = entry.program.memory_analysis()
    held = *fixed_bytes(entry.program), found.generated_code_size_in_bytes
    return compared(
        [*most, *_besides(*beside(traced, layout))], [*alive_at_peak(entry.program, paths), *_besides(*held)]
    )


def _besides(arguments: int, results: int, code: int = 0) -> list[Alive]:
    sizes = {"arguments": arguments, "results that are no donated arguments": results, "code": code}
    return [Alive(name, "", "", size) for name, size in sizes.items() if size]
