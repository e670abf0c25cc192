"""Tables and plots of a run, made from what its folder holds."""

from pathlib import Path

from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from experiments.harness.errors import ExperimentError
from experiments.harness.reports import memory, plots
from experiments.harness.storage import records

_MIB = 2**20


def report(folder: Path, console: Console, extra: dict[str, str] | None = None) -> None:
    """Prints the run's result and its memory beside the alternatives; writes curves.png and memory.png.

    Args:
      folder: the run's, with metrics.jsonl and, if memory was compared, memory.json.
      extra: more lines for the table of results.

    Raises:
      ExperimentError: there are no records yet, or they are damaged.
    """
    path = folder / "metrics.jsonl"
    train = records.read(path, "train", numbers=("epoch", "loss", "seconds", "examples_per_second", "memory_bytes"))
    test = records.read(path, "test", numbers=("epoch", "loss"))
    starts = records.read(path, "start", numbers=("devices", "parameters", "compile_seconds"))
    if not train:
        raise ExperimentError(f"nothing to report: {path} has no training records")
    if not starts:
        raise ExperimentError(
            f"{path} is damaged (its first line, of the start, is missing): put back a copy of the file"
        )
    console.print(_results(train, test, starts, extra or {}))
    _draw_curves(folder / "curves.png", train, test)
    written = ["curves.png"]
    if compared := memory.load(folder / "memory.json"):
        console.print(_memory_table(compared, starts[-1]["devices"]))
        _draw_memory(folder / "memory.png", compared)
        written.append("memory.png")
    console.print(f"In {folder}: {', '.join(written)}", soft_wrap=True)


def _results(train: list[dict], test: list[dict], starts: list[dict], extra: dict[str, str]) -> Table:
    table = Table("result", "", title="Training", show_header=False)
    seconds = sum(record["seconds"] for record in train)
    speeds = sorted(record["examples_per_second"] for record in train)
    rows = {
        "steps": f"{train[-1]['step']} (epoch {train[-1]['epoch']:.3g})",
        "parameters": f"{starts[-1]['parameters']:,}",
        "devices": f"{starts[-1]['devices']} x {starts[-1].get('device', 'unknown')}",
        "compile time of the step": f"{starts[0]['compile_seconds']:.1f} s",
        "training time": f"{seconds:.1f} s",
        "examples/s, median": f"{speeds[len(speeds) // 2]:.0f}",
        "memory in use": f"{train[-1]['memory_bytes'] / _MIB:,.0f} MiB",
        "last training loss": f"{train[-1]['loss']:.4f}",
    }
    if test:
        rows["test loss"] = f"{test[-1]['loss']:.4f}"
        for name in ("top1", "top5"):
            if name in test[-1]:
                best = max(record[name] for record in test)
                rows[f"test accuracy, {name}"] = f"{test[-1][name]:.2%} (best {best:.2%})"
    for name, value in (rows | extra).items():
        table.add_row(name, value)
    return table


def _memory_table(compared: dict[str, dict], devices: int) -> Table:
    table = Table(
        title="Memory of one training step, MiB per device, compiled at this run's shapes",
        caption="saved: for the backward pass, before optimisation by the compiler\n"
        "temporary: scratch memory of the compiled step\n"
        "compile: on a CPU with low priority, beside the training",
    )
    table.add_column("", no_wrap=True)
    for heading in ("saved", "temporary", "share", "inputs", "compile"):
        table.add_column(heading, justify="right")
    largest = max(m["temp_bytes"] for m in compared.values())
    for name, m in compared.items():
        saved = m["residual_bytes"]
        table.add_row(
            name,
            _mib(None if saved is None else saved // devices),  # was measured over all devices
            _mib(m["temp_bytes"]),
            f"{m['temp_bytes'] / largest:.1%}",
            _mib(m["argument_bytes"]),
            f"{m['compile_seconds']:.0f} s",
        )
    return table


def _mib(count: float | None) -> str:
    return "unknown" if count is None else f"{count / _MIB:,.1f}"


def _draw_curves(path: Path, train: list[dict], test: list[dict]) -> None:
    has_accuracy = "top1" in train[-1]
    figure, axes = plt.subplots(1, 1 + has_accuracy, figsize=(5 * (1 + has_accuracy), 3.6), squeeze=False)
    panels = [("loss", "loss", 1)] + [("top1", "top-1 accuracy, %", 100)] * has_accuracy
    for axis, (key, label, scale) in zip(axes[0], panels, strict=True):
        for name, rows, style in (
            ("training batches", train, {"lw": 0.8, "alpha": 0.6}),
            ("test", test, {"marker": "."}),
        ):
            axis.plot([r["epoch"] for r in rows], [scale * r[key] for r in rows], label=name, **style)
        axis.set(xlabel="epoch", ylabel=label)
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0][0].set_yscale("log")
    plots.save(figure, path)


def _draw_memory(path: Path, compared: dict[str, dict]) -> None:
    names = list(compared)
    temp = [compared[name]["temp_bytes"] / _MIB for name in names]
    figure, axis = plt.subplots(figsize=(6.4, 1 + 0.6 * len(names)))
    bars = axis.barh(names, temp, height=0.6)
    axis.bar_label(bars, [f"{mib:,.1f} MiB ({mib / max(temp):.0%})" for mib in temp], padding=4)
    axis.set(xlabel="temporary memory of one training step, MiB", xlim=(0, 1.5 * max(temp)))
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    plots.save(figure, path)
