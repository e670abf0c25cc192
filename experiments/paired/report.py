"""Tables and pictures of trainings side by side: losses and their differences, errors of gradients, bytes."""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from experiments.harness import files
from experiments.harness.errors import ExperimentError
from experiments.harness.reports import plots
from experiments.harness.storage import records
from experiments.paired.members import PLAIN, kind_name


def paired_report(config: Any, console: Console) -> None:
    """Prints the tables of losses and of gradients; writes differences.png, errors.png and bytes.png."""
    folder = config.folder
    path = folder / "metrics.jsonl"
    train, test = (_losses(records.read(path, kind), config) for kind in ("train", "test"))
    if not test or not (folder / "analysis.json").exists():
        return
    analysis = files.read_json(folder / "analysis.json", dict, "train again under another --name, or put back a copy")
    if missing := sorted({"errors", "bytes"} - set(analysis)):
        raise ExperimentError(f"{folder / 'analysis.json'} is damaged: it lacks {', '.join(missing)}")
    console.print(_loss_table(summary(config), analysis["bytes"]))
    console.print(_error_table(config, analysis["errors"]))
    _draw_losses(folder / "differences.png", config, train)
    _draw_errors(folder / "errors.png", config, analysis["errors"])
    _draw_bytes(folder / "bytes.png", config, analysis["bytes"])
    console.print(f"In {folder}: differences.png, errors.png, bytes.png", soft_wrap=True)


def summary(config: Any) -> list[dict]:
    """A row for each kind: the last test loss, its difference from plain training of the same seed, and their standard errors."""
    test = _losses(records.read(config.folder / "metrics.jsonl", "test"), config)
    rows = []
    for bits in config.kinds:
        last, plain = test[-1][bits], test[-1][PLAIN]
        rows.append({"kind": kind_name(bits), "seeds": config.seeds, "test_loss": statistics.mean(last)})
        rows[-1]["test_loss_error"] = _error(last)
        if bits != PLAIN:
            differences = [a - b for a, b in zip(last, plain, strict=True)]
            rows[-1] |= {"difference": statistics.mean(differences), "difference_error": _error(differences)}
    return rows


def _losses(found: list[dict], config: Any) -> list[dict]:
    """By record: "epoch", and for each number of bits the losses of all seeds."""
    of = lambda record, bits: [record[f"{kind_name(bits)}, {seed}"] for seed in range(config.seeds)]
    return [{"epoch": record["epoch"]} | {bits: of(record, bits) for bits in config.kinds} for record in found]


def _error(values: list[float]) -> float | None:
    """The standard error of the mean."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def _loss_table(rows: list[dict], kept: list[dict]) -> Table:
    table = Table(
        "", "test loss", "difference from plain", "of the loss", "bytes kept by a block", title="Trainings side by side"
    )
    size = {row["kind"]: sum(r["bytes"] for r in kept if r["kind"] == row["kind"]) for row in rows}
    blocks = 1 + max(row["block"] for row in kept)
    for row in rows:
        cells = [_with_error(row["test_loss"], row["test_loss_error"], 4)]
        if "difference" in row:
            share = 100 / row["test_loss"]
            error = row["difference_error"]
            cells += [
                _with_error(row["difference"], error, 4),
                _with_error(share * row["difference"], None if error is None else share * error, 2) + "%",
            ]
        else:
            cells += ["", ""]
        own = size[row["kind"]]
        table.add_row(row["kind"], *cells, f"{own / blocks / 2**20:.2f} MiB ({own / size['plain']:.0%})")
    seeds = rows[0]["seeds"]
    table.caption = "means and standard errors of " + (f"{seeds} seeds" if seeds > 1 else "one seed, which has none")
    return table


def _with_error(value: float, error: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def _error_table(config: Any, rows: list[dict]) -> Table:
    table = Table("", "largest error", "median", "predicted within 20%", title="Relative errors of gradients, by layer")
    for bits in config.kinds[1:]:
        own = [row for row in rows if row["bits"] == bits and row["measured"] > 0]
        measured = [row["measured"] for row in own]
        near = np.mean([abs(row["predicted"] / row["measured"] - 1) < 0.2 for row in own])
        table.add_row(
            kind_name(bits), f"{max(measured):.2%}", f"{statistics.median(measured):.2%}", f"{near:.0%} of {len(own)}"
        )
    return table


def _draw_losses(path: Path, config: Any, train: list[dict]) -> None:
    """Training losses, and their differences from plain training with a band of one standard error."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8))
    width = max(1, len(train) // 40)
    epochs = _smooth(np.array([record["epoch"] for record in train]), width)
    plain = np.array([record[PLAIN] for record in train])
    for i, bits in enumerate(config.kinds):
        losses = np.array([record[bits] for record in train])
        left.plot(
            epochs,
            _smooth(losses.mean(1), width),
            "k--" if bits == PLAIN else f"C{i - 1}",
            lw=1.2,
            label=kind_name(bits),
        )
        if bits != PLAIN:
            # Each seed's differences are averaged over steps before seeds are compared.
            share = np.stack([_smooth(one, width) for one in (100 * (losses - plain) / plain.mean(1, keepdims=True)).T])
            right.plot(epochs, share.mean(0), f"C{i - 1}", lw=1.2, label=kind_name(bits))
            if config.seeds > 1:
                error = share.std(0, ddof=1) / config.seeds**0.5
                right.fill_between(
                    epochs, share.mean(0) - error, share.mean(0) + error, color=f"C{i - 1}", alpha=0.25, lw=0
                )
    left.set(xlabel="epoch", ylabel="training loss")
    right.set(xlabel="epoch", ylabel="difference from plain, % of the loss")
    right.axhline(0, color="k", lw=0.8, ls="--")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend()
    plots.save(figure, path)


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Means of stretches of so many values."""
    count = len(values) // width
    return values[len(values) - count * width :].reshape(count, width).mean(1)


def _draw_errors(path: Path, config: Any, rows: list[dict]) -> None:
    figure, axis = plt.subplots(figsize=(11, 4.2))
    names = list(dict.fromkeys(row["layer"] for row in rows))
    for i, bits in enumerate(config.kinds[1:]):
        own = {row["layer"]: row for row in rows if row["bits"] == bits}
        at = [j for j, name in enumerate(names) if name in own]
        axis.plot(
            at,
            [100 * own[names[j]]["measured"] for j in at],
            "o",
            ms=5,
            color=f"C{i}",
            mfc="none",
            label=kind_name(bits),
        )
        axis.plot(
            at,
            [100 * own[names[j]]["predicted"] for j in at],
            "x",
            ms=4,
            color=f"C{i}",
            label=f"{kind_name(bits)}, predicted",
        )
    parts = [name.split("blocks/")[-1] for name in names]
    axis.set_xticks(range(len(names)), parts, rotation=90, fontsize=7)
    axis.set(ylabel="error of a gradient, % of its norm", yscale="log")
    axis.grid(alpha=0.3)
    axis.legend(ncols=2 * len(config.kinds[1:]), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    plots.save(figure, path)


def _draw_bytes(path: Path, config: Any, rows: list[dict]) -> None:
    figure, axis = plt.subplots(figsize=(6.4, 3.2))
    blocks = 1 + max(row["block"] for row in rows)
    kinds = [kind_name(bits) for bits in config.kinds]
    for i, kind in enumerate(kinds):
        sizes = [row["bytes"] / 2**20 for row in rows if row["kind"] == kind]
        at = np.arange(blocks) + (i - (len(kinds) - 1) / 2) * 0.8 / len(kinds)
        axis.bar(at, sizes, 0.8 / len(kinds), label=kind, color="0.6" if kind == "plain" else f"C{i - 1}")
    axis.set(xlabel="block", ylabel=f"kept, MiB, {config.dtype}", xticks=range(blocks))
    axis.legend()
    axis.spines[["top", "right"]].set_visible(False)
    plots.save(figure, path)
