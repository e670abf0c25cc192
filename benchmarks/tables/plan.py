"""The tables and the picture of `docs/benchmarks/plan.md`."""

import pathlib
import statistics
from typing import Any

import matplotlib

from benchmarks.record import RESULTS
from benchmarks.tables.markdown import Tables, load, table

matplotlib.use("agg")
from matplotlib import pyplot as plt

_MIB = 2**20
HEADS = {
    "plain": "optax's, with logits",
    "by hand": "`linear_cross_entropy`",
    "planned": "optax's, planned with tiles",
    "by hand, planned": "`linear_cross_entropy`, planned",
}
KINDS = {"unrolled": "in a loop of Python", "scanned": "in `jax.lax.scan`"}


def frontier(kind: str, name: str | None = None) -> str:
    """Each policy by hand beside the plan for as many bytes."""
    environment, rows = load(name or f"plan_{kind}_16384", failed=True)
    body = [
        [
            row["policy"],
            f"{row['bytes'] / _MIB:,.0f}",
            f"{row['ms']:,.1f}",
            *_planned(row),
        ]
        for row in sorted(rows, key=lambda row: row["bytes"])
        if row["policy"] is not None
    ]
    tool = "chain" if kind == "chain" else "planned"
    header = ["kept by `jax.checkpoint`", "MiB", "ms", f"MiB, `{tool}`", f"ms, `{tool}`", "ratio of times"]
    return table(header, body, [environment], (name or f"plan-{kind}").replace("_", "-"))


def _planned(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return ["refused", "", ""]
    return [
        f"{row['planned_bytes'] / _MIB:,.0f}",
        f"{row['planned_ms']:,.1f}",
        f"{row['planned_ms'] / row['ms']:.3f}",
    ]


def public(name: str = "plan_public") -> str:
    """Each built-in policy round a public model's loss beside the plan for as many bytes.

    Rows that were measured again have a file of their own.
    """
    environment, rows = load(name, failed=True)
    environments = [environment]
    for path in sorted(RESULTS.glob(f"{name}_*.json")):
        environment, again = load(path.stem, failed=True)
        newer = {(row["model"], row["policy"]): row for row in again}
        rows = [newer.get((row["model"], row["policy"]), row) for row in rows]
        environments.append(environment)
    header = [
        "model",
        "built-in policy round the loss",
        "MiB",
        "ms",
        "MiB, `planned`",
        "ms, `planned`",
        "ratio of times",
    ]
    body = [
        [f"`{row['model']}`", row["policy"], f"{row['bytes'] / _MIB:,.0f}", f"{row['ms']:.1f}", *_planned(row)]
        for row in rows
    ]
    return table(header, body, environments, "plan-public")


def accuracy(name: str = "plan_accuracy_cpu") -> str:
    """For each model how far predicted bytes were from compiled ones, the median over budgets."""
    environment, rows = load(name)
    models: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        models.setdefault(row["model"], []).append(row)
    found = {model: _errors(some) for model, some in models.items()}
    body = [
        [f"`{model}`", *map(_percent, errors), f"{_largest(models[model]):.2f}", f"{_seconds(models[model]):.1f}"]
        for model, errors in found.items()
    ]
    first, last = (statistics.median(some) for some in zip(*found.values(), strict=True))
    every = _largest(rows), _seconds(rows)
    body.append(["all: median, largest, median", _percent(first), _percent(last), f"{every[0]:.2f}", f"{every[1]:.1f}"])
    header = ["model", "error of the model alone", "after correction", "largest part of a budget", "planning, s"]
    return table(header, body, [environment], "plan-accuracy")


def _errors(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Of the first plan that is compiled, and of the last where others came before it, or of the first again."""
    first = [abs(row["first_predicted"] / row["first_compiled"] - 1) for row in rows]
    last = [abs(row["last_expected"] / row["last_compiled"] - 1) for row in rows if row["tries"] > 1]
    return statistics.median(first), statistics.median(last or first)


def _largest(rows: list[dict[str, Any]]) -> float:
    return max(row["planned_bytes"] / row["budget"] for row in rows)


def _seconds(rows: list[dict[str, Any]]) -> float:
    return statistics.median(row["planning_seconds"] for row in rows)


def _percent(error: float) -> str:
    return f"{100 * error:.1f}%"


def head() -> str:
    """The plain loss, that without logits by hand, and plans."""
    environment, rows = load("plan_head")
    by_hand = {row["part"]: row for row in rows if row["loss"] == "by hand"}
    body = [
        [
            row["part"],
            HEADS[row["loss"]],
            f"{row['bytes'] / _MIB:,.0f}",
            "out of memory" if row["ms"] is None else f"{row['ms']:.1f}",
            f"{row['bytes'] / by_hand[row['part']]['bytes']:.2f}",
            "" if row["ms"] is None else f"{row['ms'] / by_hand[row['part']]['ms']:.2f}",
        ]
        for row in rows
    ]
    return table(["what", "loss", "MiB", "ms", "ratio of bytes", "ratio of times"], body, [environment], "plan-head")


def picture(path: pathlib.Path, tokens: int = 16384) -> None:
    """Time against memory, by hand and planned; `path` gets a PNG."""
    figure, axes = plt.subplots(1, len(KINDS), figsize=(10, 4), sharey=True, layout="constrained")
    for ax, (kind, label) in zip(axes, KINDS.items(), strict=True):
        _, rows = load(f"plan_{kind}_{tokens}")
        _points(ax, rows)
        ax.set(title=f"8 layers {label.replace('`', '')}", xlabel="temporary memory, GiB")
        ax.legend()
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("value and gradient, ms")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _points(ax: Any, rows: list[dict[str, Any]]) -> None:
    by_hand = [row for row in rows if row["policy"] is not None]
    ax.plot(
        [row["bytes"] / 2**30 for row in by_hand], [row["ms"] for row in by_hand], "o", label="jax.checkpoint, by hand"
    )
    planned = sorted({(row["planned_bytes"] / 2**30, row["planned_ms"]) for row in rows})
    ax.plot([x for x, _ in planned], [y for _, y in planned], "s-", label="memjax.planned")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:g}"))


def offload() -> str:
    """The least memory with what moves to the host and without, compiled ahead."""
    environment, rows = load("plan_offload")
    mib = lambda nbytes: f"{nbytes / _MIB:,.0f} MiB"
    body = []
    for again, moved in zip(rows[::2], rows[1::2], strict=True):
        tokens = f"{again['length']:,}" if again["batch"] == 1 else f"{again['batch']} x {again['length']:,}"
        cells = [mib(nbytes) for nbytes in (again["bytes"], moved["bytes"], moved["host_bytes"])]
        body.append([f"{again['layers']}, {tokens}", *cells])
    header = ["layers, tokens", "computing again", 'with "offload"', "of that on the host"]
    return table(
        header, body, [{**environment, "accelerator": rows[0]["machine"].replace(", not", " and not")}], "offload"
    )


GUIDE: Tables = {"offload": offload}
TABLES: Tables = {kind: lambda kind=kind: frontier(kind) for kind in KINDS} | {
    "chain": lambda: frontier("chain"),
    "long": lambda: frontier("unrolled", "plan_unrolled_131072"),
    "long_scanned": lambda: frontier("scanned", "plan_scanned_131072"),
    "head": head,
    "public": public,
}
TABLES["accuracy"] = accuracy
