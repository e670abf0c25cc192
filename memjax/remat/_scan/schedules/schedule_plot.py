"""The drawing of `Schedule.plot`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memjax.remat._scan.schedules.actions import Action


def draw(actions: Iterable[Action], title: str, *, start_in_slot: bool, ax: Any = None) -> Any:
    """Actions downwards, steps to the right; returns the axes. `start_in_slot`: the first state takes slot 0."""
    from matplotlib import pyplot as plt

    if ax is None:
        _, ax = plt.subplots(figsize=(7, 7))
    kept_since = {0: (0, 0, "hidden")} if start_in_slot else {}
    forward, backward, hidden, internal, lives = [], [], [], [], []
    row = 0
    for action in actions:
        if action.kind == "advance":
            forward.append((row, action.start, action.stop))
            row += 1
        elif action.kind == "store":
            hidden.append((row - 1, action.start))
            kept_since[action.slot] = (row - 1, action.start, "hidden")
        elif action.kind == "keep":
            forward.append((row, action.start, action.stop))
            if action.slot >= 0:
                internal.append((row, action.stop))
                kept_since[action.slot] = (row, action.stop, "internal")
            row += 1
        elif action.kind == "backward":
            backward.append((row, action.start, action.stop))
            row += 1
        if action.kind in ("free", "backward") and action.slot >= 0:
            lives.append((*kept_since.pop(action.slot), row))
    lives += [(*life, row) for life in kept_since.values()]

    for kind, colour in (("hidden", "0.75"), ("internal", "tab:orange")):
        spans = [(step, since, until) for since, step, of, until in lives if of == kind]
        if spans:
            at, since, until = zip(*spans, strict=True)
            ax.vlines(at, since, until, color=colour, linewidth=3, label=f"{kind} state kept")
    for spans, colour, label in ((forward, "tab:blue", "forward"), (backward, "tab:red", "backward")):
        if spans:
            rows, starts, stops = zip(*spans, strict=True)
            ax.hlines(rows, starts, stops, color=colour, linewidth=1.2, label=label)
    for marks, marker in ((hidden, "o"), (internal, "s")):
        if marks:
            rows, at = zip(*marks, strict=True)
            ax.plot(at, rows, marker, color="black", markersize=3)
    ax.invert_yaxis()
    ax.set_xlabel("step")
    ax.set_ylabel("action")
    ax.set_title(title, fontsize="small")
    ax.legend(loc="lower right", fontsize="small")
    return ax
