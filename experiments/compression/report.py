"""Figures and tables of compressed training: ratios over training, layers, errors of gradients, the comparison."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

from experiments.compression.analysis import EDGES
from experiments.harness import files
from experiments.harness.config import load
from experiments.harness.errors import ExperimentError
from experiments.harness.reports import plots
from experiments.harness.storage import records


def extra_report(config: Any, console: Console) -> None:
    """Prints the table of sizes and accuracies, beside a baseline's if there is one; writes ratio.png, layers.png, errors.png."""
    folder = config.folder
    train = [record for record in records.read(folder / "metrics.jsonl", "train") if "ratio" in record]
    if not train or not (folder / "analysis.json").exists():
        return
    test = records.read(folder / "metrics.jsonl", "test")
    analysis = files.read_json(folder / "analysis.json", dict, "train again under another --name, or put back a copy")
    if missing := sorted({"names", "rows", "values"} - set(analysis)):
        raise ExperimentError(f"{folder / 'analysis.json'} is damaged: it lacks {', '.join(missing)}")
    others = [baseline(config, name) for name in config.baseline]
    console.print(_table(config, train, test, analysis, others))
    _draw_ratio(folder / "ratio.png", config, train, test, others)
    _draw_layers(folder / "layers.png", train, analysis)
    _draw_errors(folder / "errors.png", analysis)
    console.print(f"In {folder}: ratio.png, layers.png, errors.png", soft_wrap=True)


Run = tuple[str, list[dict], list[dict]]
"""The label of a run, and its records of training and of tests."""


def baseline(config, name: str) -> Run:
    """The run of this name, to compare with. Raises ExperimentError if there is none, or it is another training."""
    folder = config.runs_dir / name
    train, test = (records.read(folder / "metrics.jsonl", kind) for kind in ("train", "test"))
    if not test:
        raise ExperimentError(f"--baseline: {folder} has no records of tests")
    other = load(type(config), folder)
    for field in ("model", "width", "data", "image_size", "batch_size", "epochs"):
        if getattr(other, field) != getattr(config, field):
            raise ExperimentError(f"--baseline {name} was trained with another --{field.replace('_', '-')}")
    return _label(other), train, test


def _label(config) -> str:
    return f"sigma {config.sigma:g}" if config.compress else "float32"


def _table(config, train: list[dict], test: list[dict], analysis: dict, others: list[Run]) -> Table:
    """Accuracies and sizes, like table 1 of Jin et al. 2020."""
    values = analysis["values"]
    table = Table("", "top-1 accuracy", "saved activations", "ratio", title="Compressed activations, one batch")
    for name, run_train, run_test in (*others, (_label(config), train, test)):
        ratio = np.mean([record.get("ratio", 1) for record in run_train])
        size = f"{4 * values / ratio / 2**20:,.2f} MiB"
        top1 = f"{run_test[-1]['top1']:.2%}" if run_test else "unknown"
        table.add_row(name, top1, size, f"{ratio:.1f} ({32 / ratio:.2f} bits)")
    if "float32" not in {name for name, _, _ in others}:
        table.add_row("float32", "not run", f"{4 * values / 2**20:,.2f} MiB", "1.0 (32.00 bits)")
    table.caption = (
        f"ratios are means over training\n{train[-1]['replays']} steps replayed, "
        f"{train[-1]['programs']} programs compiled"
    )
    return table


def _draw_ratio(path: Path, config, train: list[dict], test: list[dict], others: list[Run]) -> None:
    """Ratios and accuracies of all runs, like figures 9 and 10 of Jin et al. 2020."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8))
    for i, (name, run_train, run_test) in enumerate([(_label(config), train, test), *others]):
        color, style = ("k", "s--") if name == "float32" else (f"C{i}", "o-")
        compressed = [record for record in run_train if "ratio" in record]
        if compressed:
            at = [record["step"] for record in compressed]
            left.plot(at, [record["ratio"] for record in compressed], color=color, lw=1, label=name)
        at, accuracy = ([record[field] for record in run_test] for field in ("step", "top1"))
        right.plot(at, [100 * share for share in accuracy], style, color=color, ms=3, lw=1, label=name)
    left.set(xlabel="step", ylabel="ratio to float32", ylim=(0, None))
    right.set(xlabel="step", ylabel="top-1 test accuracy, %", ylim=(0, 100))
    right.legend(loc="lower right")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    plots.save(figure, path)


def _draw_layers(path: Path, train: list[dict], analysis: dict) -> None:
    bits = np.array([record["bits"] for record in train])
    bounds = np.array([record["bounds"] for record in train])
    steps = [record["step"] for record in train]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharex=True)
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.95, bits.shape[1]))
    for i, color in enumerate(colors):
        label = f"{i}: {analysis['names'][i]}"
        axes[0].plot(steps, 32 / np.maximum(bits[:, i], 1e-3), color=color, lw=1, label=label)
        axes[1].plot(steps, bounds[:, i], color=color, lw=1)
    axes[0].set(xlabel="step", ylabel="ratio to float32, by layer", ylim=(0, None))
    axes[1].set(xlabel="step", ylabel="bound, by layer")
    axes[1].set_yscale("log", base=2)  # as they are
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=6, ncols=1 + (len(colors) > 30))
    plots.save(figure, path, rect=(0, 0, 0.82, 1))


def _draw_errors(path: Path, analysis: dict) -> None:
    rows = analysis["rows"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    centres = (EDGES[1:] + EDGES[:-1]) / 2
    for row in rows:
        axes[0].plot(centres, row["histogram"], color="tab:blue", lw=0.6, alpha=0.4)
    axes[0].plot(centres, np.exp(-(centres**2) / 2) / np.sqrt(2 * np.pi), "k--", lw=1.2, label="normal")
    share = np.mean([row["within_sigma"] for row in rows])
    axes[0].set(xlabel="error of a gradient / its standard deviation", ylabel="density, a line per layer")
    axes[0].set_title(f"{share:.1%} within one standard deviation")
    axes[0].legend()
    at = np.arange(len(rows))
    axes[1].plot(at, [row["measured"] for row in rows], "o", label="measured", ms=4)
    axes[1].plot(at, [row["predicted"] for row in rows], "x", label="predicted", ms=5)
    axes[1].set(xlabel="layer", ylabel="standard deviation of the gradient's error", yscale="log")
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[1].legend()
    for axis in axes:
        axis.grid(alpha=0.3)
    plots.save(figure, path)
