"""What budgets cost: as a table, as data, as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from memjax._commands.batch import Largest
from memjax._commands.devices import Gpus
from memjax._core.check import readable_bytes
from memjax._explain.explanation import Table
from memjax._jit.step_plan import StepPlan, StepPoint

_ROWS = 12  # of a frontier
_TICKS = 8


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


def as_data(
    plan: StepPlan, points: Sequence[StepPoint], refused: str | None, gpus: Gpus | None, batch: Largest | None
) -> dict[str, Any]:
    """What `fit --json` prints."""
    devices = None
    if gpus is not None:
        devices = {"kind": gpus.devices[0].device_kind, "count": len(gpus.devices), "nbytes": gpus.total}
    return {
        "fits": refused is None,
        "account": refused,
        "devices": devices,
        "budget": plan.budget,
        "nbytes": plan.nbytes,
        "plain_nbytes": plan.plain_nbytes,
        "largest_batch": None if batch is None else batch._asdict(),
        "frontier": [point._asdict() for point in points],
        "plan": dataclasses.asdict(plan),
    }


def plot(points: Sequence[StepPoint], plan: StepPlan, fits: bool, path: Any) -> None:
    """Draws the frontier, and what the plan holds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    if points:
        most = max(plan.plain_nbytes, points[-1].nbytes)  # more bytes make no plan faster
        sizes = [*(point.nbytes for point in points), most]
        times = [*(point.seconds / points[-1].seconds for point in points), 1.0]
        axes.step(sizes, times, where="post", label="fastest plan, predicted")
    for nbytes, colour, label in (
        (plan.nbytes, "black", "this plan, compiled" if fits else "the least, compiled"),
        (plan.plain_nbytes, "0.6", f"as it is written{', predicted' if plan.plain_is_predicted else ''}"),
    ):
        axes.axvline(nbytes, color=colour, linestyle=":", label=label)
    every = [plan.nbytes, plan.plain_nbytes, *(point.nbytes for point in points)]
    unit, name = (2**30, "GiB") if max(every) >= 2**30 else (2**20, "MiB")
    axes.xaxis.set_major_locator(FixedLocator(np.geomspace(min(every), max(every), _TICKS).tolist()))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: f"{nbytes / unit:.3g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"memory of a device, {name}")
    axes.set_ylabel("predicted time of the derivatives")
    axes.legend()
    figure.savefig(path, dpi=150)
