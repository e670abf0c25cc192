"""The memory of a compiled program over its instructions, stacked by module."""

from __future__ import annotations

from typing import Any

_MIB = 2**20


def draw(explanation: Any, path: Any) -> None:
    """Write the picture. matplotlib is only imported here."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timeline, peak = explanation.timeline, explanation.peak
    assert timeline is not None
    assert peak is not None
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    x, series = timeline.instructions, [[count / _MIB for count in line] for line in timeline.bytes]
    colours = [f"C{index}" for index in range(len(series) - 1)] + ["0.8"]
    axes.stackplot(x, series, labels=timeline.modules, colors=colours, step="post", linewidth=0)
    axes.axvline(timeline.backward, color="0.3", linewidth=0.8, linestyle=":")
    axes.axhline(peak.bytes / _MIB, color="0.3", linewidth=0.8)
    axes.annotate(
        "the peak", (0, peak.bytes / _MIB), xytext=(2, 2), textcoords="offset points", fontsize=8, color="0.3"
    )
    axes.annotate(
        "backward pass",
        (timeline.backward, 1),
        xycoords=("data", "axes fraction"),
        xytext=(3, -10),
        textcoords="offset points",
        fontsize=8,
        color="0.3",
    )
    axes.set(xlabel="instruction of the compiled program", ylabel="temporary memory, MiB", ylim=(0, None))
    axes.margins(x=0)
    axes.set_ylim(0, 1.12 * peak.bytes / _MIB)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=7, frameon=False)
    figure.savefig(path, dpi=150)
