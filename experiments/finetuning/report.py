"""Losses of trainings in float32 and in few bytes a parameter, and these bytes, as a table and as a picture."""

import json
import statistics
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from experiments.harness import files
from experiments.harness.reports import plots
from experiments.harness.storage import records

_PARTS = ("weights", "state")


def save_bytes(config: Any, arrays: Mapping[str, tuple[Any, Any]]) -> None:
    """Writes bytes.json: for each kind the bytes a parameter of its weights and of its optimizer's state.

    Args:
      config: of the run.
      arrays: by kind, weights and state.
    """
    if jax.process_index():
        return
    nbytes = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    found = {
        kind: {part: nbytes(tree) / count(weights) for part, tree in zip(_PARTS, (weights, state), strict=True)}
        for kind, (weights, state) in arrays.items()
    }
    with files.in_one_piece(config.folder / "bytes.json") as part:
        part.write_text(json.dumps(found))


def finetune_report(config: Any, console: Console) -> None:
    """Prints a table; writes finetune.png."""
    path = config.folder / "bytes.json"
    train, test = (records.read(config.folder / "metrics.jsonl", kind) for kind in ("train", "test"))
    if not test or not path.exists():
        return
    nbytes = files.read_json(path, dict, "train again under another --name, or put back a copy")
    console.print(_table(config, test[-1], nbytes))
    _draw(config, train, nbytes)
    console.print(f"In {config.folder}: finetune.png", soft_wrap=True)


def _of_seeds(record: Mapping[str, float], config: Any, kind: str) -> list[float]:
    return [record[f"{kind}, {seed}"] for seed in range(config.seeds)]


def _table(config: Any, last: Mapping[str, float], nbytes: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table("", "test loss", "difference", "weights", "state", "both", title="Test losses, and bytes a parameter")
    plain = _of_seeds(last, config, config.kinds[0])
    for kind in config.kinds:
        losses = _of_seeds(last, config, kind)
        differences = [100 * (a / b - 1) for a, b in zip(losses, plain, strict=True)]
        difference = "" if kind == config.kinds[0] else _with_error(differences, 2) + "%"
        own = [nbytes[kind][part] for part in _PARTS]
        table.add_row(kind, _with_error(losses, 4), difference, *(f"{one:.2f}" for one in (*own, sum(own))))
    seeds = f"means and standard errors of {config.seeds} seeds" if config.seeds > 1 else "one seed"
    table.caption = f"{seeds}; gradients come on top"
    return table


def _with_error(values: list[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}"


def _draw(config: Any, train: list[dict], nbytes: Mapping[str, Mapping[str, float]]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), width_ratios=(3, 2))
    steps = np.array([record["step"] for record in train])
    width = max(1, len(train) // 40)
    for i, kind in enumerate(config.kinds):
        losses = np.array([statistics.mean(_of_seeds(record, config, kind)) for record in train])
        whole = len(losses) // width * width
        mean = lambda values, whole=whole: values[len(values) - whole :].reshape(-1, width).mean(1)
        left.plot(mean(steps), mean(losses), "k--" if i == 0 else "C0", lw=1.2, label=kind)
    left.set(xlabel="step", ylabel="training loss, nats per byte")
    left.grid(alpha=0.3)
    left.legend()
    bottom = np.zeros(len(config.kinds))
    for part, color in zip(_PARTS, ("0.65", "C0"), strict=True):
        sizes = np.array([nbytes[kind][part] for kind in config.kinds])
        right.bar(range(len(sizes)), sizes, 0.6, bottom=bottom, label=part, color=color)
        bottom += sizes
    for i, total in enumerate(bottom):
        right.annotate(f"{total:.2f}", (i, total), ha="center", va="bottom")
    right.set(ylabel="bytes a parameter", ylim=(0, 1.15 * max(bottom)))
    right.set_xticks(range(len(config.kinds)), [kind.replace(", ", ",\n") for kind in config.kinds])
    right.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False)
    plots.save(figure, config.folder / "finetune.png")
