"""Time against memory, and the paper's figures 2, 6 and 7: `python -m benchmarks.bptt_figures [NAME]`.

Gruslys et al. 2016, from theory and as measured. Theory counts forward steps; measurements are those of
`benchmarks.bptt` in `results/NAME.json`.
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
from typing import Any

import matplotlib
import numpy as np

from benchmarks.record import RESULTS
from memjax.remat import schedule

matplotlib.use("agg")
from matplotlib import pyplot as plt

DOCS = pathlib.Path(__file__).parent.parent / "docs"
_COLOURS = {"hidden": "tab:red", "internal": "tab:green", "mixed": "tab:blue"}
_SLOTS = {
    "10": "tab:red",
    "50": "tab:green",
    "100": "tab:blue",
    "500": "tab:purple",
    "1000": "tab:cyan",
    "plain": "grey",
}
_GROUPS = {"plain": "k*", "flax": "s", "two-level": "^", "nest": "v", "equinox": "D-", "memjax": "o-"}
_LABELS = {
    "plain": "jax.lax.scan",
    "flax": "nn.scan of nn.remat",
    "two-level": "scan of checkpointed scans",
    "nest": "nests by hand",
    "equinox": "equinox, checkpointed",
    "memjax": "memjax, budget=",
}


def steps(length: int, slots: int, strategy: Any, size: int = 1) -> float:
    """Forward steps per step."""
    return schedule(length, slots, strategy=strategy, internal_size=size).forward_steps / length


def measured(rows: list[dict[str, Any]], group: str, name: str) -> tuple[list[int], list[float]]:
    """Lengths, and milliseconds per step."""
    points = sorted(
        (row["length"], row["ms"] / row["length"]) for row in rows if (row["group"], row.get("name")) == (group, name)
    )
    return [length for length, _ in points], [ms for _, ms in points]


def figure_2(rows: list[dict[str, Any]], axes: Any) -> None:
    lengths = np.unique(np.geomspace(10, 1000, 60).astype(int))
    for name, colour in _SLOTS.items():
        theory = [1.0 if name == "plain" else steps(t, int(name), "hidden") for t in lengths]
        axes[0].plot(lengths, theory, color=colour, label=name if name == "plain" else f"{name} slots")
        axes[1].plot(*measured(rows, "figure 2", name), "o-", color=colour)
    axes[0].set(title="figure 2: hidden states", ylabel="forward steps per step", ylim=(0.9, 6.9))
    axes[1].set(title="measured")


def figure_6(rows: list[dict[str, Any]], axes: Any, units: int) -> None:
    lengths = np.unique(np.geomspace(10, 1000, 40).astype(int))
    for strategy, colour in _COLOURS.items():
        slots = units if strategy == "internal" else 5 * units
        axes[0].plot(lengths, [steps(t, slots, strategy, 5) for t in lengths], color=colour, label=strategy)
        axes[1].plot(*measured(rows, "figure 6", f"{units} {strategy}"), "o-", color=colour)
    axes[1].plot(*measured(rows, "figure 6", f"{units} budget"), "o-", color="black", label="budget of as many bytes")
    axes[1].legend(frameon=False, fontsize="small")
    axes[0].set(title=f"figure 6: memory of {units} internal states", ylabel="forward steps per step")
    axes[1].set(title="measured")


def units_for(length: int, size: int, cost: float) -> int:
    """The least memory with which each step runs forward at most `cost` times."""
    low, high = 1, size * length + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if steps(length, middle, "mixed", size) <= cost else (middle + 1, high)
    return low


def figure_7(rows: list[dict[str, Any]], axes: Any) -> None:
    lengths = np.unique(np.geomspace(16, 400, 12).astype(int))
    for beta, colour in ((2, "tab:red"), (5, "tab:green"), (10, "tab:blue")):
        root = [math.sqrt(t) * (1 + beta) for t in lengths]
        memory = [units_for(t, 1 + beta, 2.0) / r for t, r in zip(lengths, root, strict=True)]
        cost = [steps(t, int(r), "mixed", 1 + beta) for t, r in zip(lengths, root, strict=True)]
        axes[0].plot(lengths, memory, color=colour, label=f"$\\beta$ = {beta}")
        axes[0].plot(lengths, cost, "--", color=colour)
    for name, colour in (("mixed", "tab:blue"), ("budget", "black"), ("square root", "grey")):
        axes[1].plot(*measured(rows, "figure 7", name), "o-", color=colour, label=name)
    axes[0].set(
        title="figure 7: memory at 2 forward steps a step (-)\nand forward steps in the memory of two levels (--)",
        ylabel="relative to $\\sqrt{t}(1+\\beta)$; forward steps per step",
        ylim=(0, 2.5),
    )
    axes[1].set(title="measured, in the memory of two levels")
    axes[1].legend(frameon=False, fontsize="small")


def time_and_memory(data: dict[str, Any], name: str) -> None:
    """All ways to run the longest sequence."""
    rows = [row for row in data["rows"] if "ratio" in row]
    figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for group, style in _GROUPS.items():
        points = [row for row in rows if row["group"] == group and "profiled" not in row["name"]]
        if group == "memjax":
            points = [row for row in points if row["name"].startswith("budget")]
        line = sorted((row["temp"] / 2**20, row["ratio"]) for row in points)
        if line:
            axes.plot(*zip(*line, strict=True), style, label=_LABELS.get(group, group))
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="temporary memory, MiB",
        ylabel="time relative to jax.lax.scan",
        title=f"LSTM, {rows[0]['length']:,} steps, {data['environment']['accelerator'] or 'CPU'}",
    )
    ticks = [1, 2, 3, 5, 8]
    axes.set_yticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(DOCS / f"{name}_memory.png", dpi=130)
    plt.close(figure)


def main(name: str) -> None:
    data = json.loads((RESULTS / f"{name}.json").read_text())
    rows = data["rows"]
    time_and_memory(data, name)
    figure, axes = plt.subplots(4, 2, figsize=(9, 14), layout="constrained")
    figure_2(rows, axes[0])
    figure_6(rows, axes[1], 10)
    figure_6(rows, axes[2], 20)
    figure_7(rows, axes[3])
    for pair in axes:
        pair[0].legend(frameon=False, fontsize="small", ncols=3)
        pair[1].set(ylabel="ms per step, forward and backward", ylim=(0, None))
        for one in pair:
            one.set(xlabel="steps")
            one.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / f"{name}.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "bptt")
