"""What budgets cost: as a table, as data, as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from memjax._core.check import readable_bytes
from memjax._explain.explanation import Table
from memjax._jit.step_plan import StepPlan, StepPoint

_ROWS = 12  # of a frontier


def table(points: Sequence[StepPoint]) -> list[Table]:
    """What some budgets get, from the least bytes to the most."""
    if not points:
        return []
    ratio = (points[-1].nbytes / points[0].nbytes) ** (1 / (_ROWS - 1))
    levels = [points[0].nbytes * ratio**i for i in range(_ROWS - 1)]
    chosen = [[point for point in points if point.nbytes <= level][-1] for level in levels]
    times = {point: f"{point.seconds / points[-1].seconds:.2f}" for point in (*chosen, points[-1])}
    # Of equal times the least bytes.
    shown = [*{times[point]: point for point in reversed(chosen)}.values()][::-1]
    shown += [points[-1]] if shown[-1] != points[-1] else []
    cells = [[readable_bytes(point.nbytes), times[point], str(point.microbatches)] for point in shown]
    return [("What each budget is predicted to cost", ["bytes", "time", "microbatches"], cells)]


def as_data(plan: StepPlan, points: Sequence[StepPoint], refused: str | None) -> dict[str, Any]:
    """What `fit --json` prints."""
    return {
        "fits": refused is None,
        "account": refused,
        "budget": plan.budget,
        "nbytes": plan.nbytes,
        "plain_nbytes": plan.plain_nbytes,
        "frontier": [point._asdict() for point in points],
        "plan": dataclasses.asdict(plan),
    }


def plot(points: Sequence[StepPoint], plan: StepPlan, fits: bool, path: Any) -> None:
    """Draws the frontier, and what the plan holds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    unit, name = (2**30, "GiB") if plan.plain_nbytes >= 2**30 else (2**20, "MiB")
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if points:
        sizes, times = zip(
            *((point.nbytes / unit, point.seconds / points[-1].seconds) for point in points), strict=True
        )
        axes.step(sizes, times, where="post", label="fastest plan, predicted")
    for nbytes, colour, label in (
        (plan.nbytes, "black", "this plan, compiled" if fits else "the least, compiled"),
        (plan.plain_nbytes, "0.6", "as it is written"),
    ):
        axes.axvline(nbytes / unit, color=colour, linestyle=":", label=label)
    axes.set_xlabel(f"memory of a device, {name}")
    axes.set_ylabel("predicted time of the derivatives")
    axes.legend()
    figure.savefig(path, dpi=150)
