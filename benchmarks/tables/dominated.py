"""The table and the picture of special tools beside plans, in `docs/benchmarks/plan.md`."""

import math
import pathlib
from typing import Any

import matplotlib

from benchmarks.tables.markdown import Tables, load, table

matplotlib.use("agg")
from matplotlib import pyplot as plt

_MIB = 2**20
_WAYS = {"planned": "planned", "jit": "memjax.jit"}
_AS_FAST = 1.03


def rows() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return load("dominated_cpu", failed=True)


def dominates(row: dict[str, Any]) -> bool:
    """Whether a tool has less memory or time than plans: none is made, or the faster one takes longer."""
    if "to_tool" not in row.get("planned", {}) and "to_tool" not in row.get("jit", {}) and "time" not in row:
        return "flops" not in row["jit"] or row["jit"]["flops"] > _AS_FAST * row["flops"]
    found = [row[way]["to_tool"] for way in _WAYS if "to_tool" in row.get(way, {})]
    return not found or min(found) > _AS_FAST


def dominated_table() -> str:
    environment, found = rows()
    body = []
    for row in found:
        if "tool" not in row:
            continue
        name = f"**{row['tool']}**" if dominates(row) else row["tool"]
        cells = [row["network"], name, f"{row['bytes'] / _MIB:.2f}", f"{row['bytes'] / row['plain_bytes']:.1%}"]
        body.append([*cells, _number(row.get("time")), *(_way(row, way) for way in _WAYS), _flops(row)])
    header = ["network", "tool", "temp MiB", "of plain", "time of plain", "`planned`", "`memjax.jit`"]
    return table([*header, "FLOPs of the plan"], body, [environment], "dominated")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _way(row: dict[str, Any], way: str) -> str:
    """The time of a plan, of the tool's."""
    if way not in row:
        return ""
    return "refused" if "refused" in row[way] else _number(row[way].get("to_tool"))


def _flops(row: dict[str, Any]) -> str:
    """Those of the plan of the fewest, of the tool's."""
    found = [row[way].get("flops") for way in _WAYS if way in row]
    known = [one for one in found if one]
    return _number(min(known) / row["flops"]) if known and row["flops"] else ""


def picture(path: pathlib.Path) -> None:
    """Time against memory of tools and of plans for their bytes, one panel for each network; `path` gets a PNG."""
    timed = [row for row in rows()[1] if "time" in row]
    networks = list(dict.fromkeys(row["network"] for row in timed))
    across = 5
    down = math.ceil(len(networks) / across)
    figure, axes = plt.subplots(down, across, figsize=(13, 2.6 * down), squeeze=False, layout="constrained")
    for ax in axes.flat[len(networks) :]:
        ax.axis("off")
    for ax, network in zip(axes.flat, networks, strict=False):
        _panel(ax, network, [row for row in timed if row["network"] == network])
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    figure.supxlabel("temporary memory, of the plain gradient's")
    figure.supylabel("time, of the plain gradient's")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _panel(ax: Any, network: str, found: list[dict[str, Any]]) -> None:
    share = lambda nbytes, row: nbytes / row["plain_bytes"]
    ax.plot(
        [share(row["bytes"], row) for row in found],
        [row["time"] for row in found],
        "o",
        c="tab:orange",
        label="special tools",
    )
    points = sorted(
        min((row[way]["time"], share(row[way]["bytes"], row)) for way in _WAYS if "time" in row.get(way, {}))[::-1]
        for row in found
        if any("time" in row.get(way, {}) for way in _WAYS)
    )
    ax.plot([x for x, _ in points], [y for _, y in points], "s-", ms=4, c="tab:blue", label="plans for as many bytes")
    none = [row for row in found if not any("time" in row.get(way, {}) for way in _WAYS)]
    ax.plot(
        [share(row["bytes"], row) for row in none],
        [row["time"] for row in none],
        "x",
        ms=10,
        c="tab:red",
        label="no plan",
    )
    ax.set_title(network, fontsize="medium")
    ax.set_xscale("log", base=2)
    low, high = ax.get_xlim()
    ax.set_xlim(low / 1.4, high * 1.4)
    ax.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=None))
    ax.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    ax.set_ylim(0, 1.1 * ax.get_ylim()[1])
    ax.grid(alpha=0.3)


TABLES: Tables = {"dominated": dominated_table}
