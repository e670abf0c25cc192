"""Memory and speed of steps with each parallelism, against the length of the sequences."""

import time

import jax
import numpy as np
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from experiments.harness.reports import plots
from experiments.parallelism.trial import Trial, variants

_MIB = 2**20


def compare(config, text: np.ndarray, console: Console) -> list[dict]:
    """Memory and speed of steps with each parallelism and length, and the longest length of each."""
    rows = []
    for name in config.compare:
        for length in config.compare_lengths:
            measured = try_steps(config, name, length, text)
            console.print(f"{name}, sequences of {length:,} bytes: {_in_words(measured)}")
            rows.append({"parallelism": name, "length": length, **(measured or {"failed": "out of memory"})})
        if config.find_max_length:
            rows.append({"parallelism": name, "longest": find_longest(config, name, text)})
            console.print(f"{name}: longest sequence {rows[-1]['longest']:,}")
    return rows


def find_longest(config, name: str, text: np.ndarray) -> int:
    """Bisected to a sixteenth. 0 if the shortest does not fit."""
    config = variants(config, name)[-1]  # that which takes least
    unit = 2 * (config.ring or jax.device_count())
    limit = config.memory_limit * _MIB if jax.default_backend() == "cpu" else None
    fits = lambda length: try_steps(config, name, length, text, steps=1, limit=limit) is not None
    low, high = 0, 16 * unit
    while high <= config.longest and fits(high):
        low, high = high, 2 * high
    high = min(high, config.longest + unit)
    while high - low > max(unit, low // 16):
        middle = (low + high) // 2 // unit * unit
        if middle in (low, high):
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def try_steps(
    config, name: str, length: int, text: np.ndarray, *, steps: int = 3, limit: int | None = None
) -> dict | None:
    """Bytes and tokens a second of real steps, or None if they do not fit: the device, or `limit` bytes of it."""
    for variant in variants(config, name):
        if (measured := _try_one(variant, name, length, text, steps, limit)) is not None:
            return measured | ({"spent": variant.spend} if name == "metp" else {})
    return None


def _try_one(config, name: str, length: int, text: np.ndarray, steps: int, limit: int | None) -> dict | None:
    try:
        trial = Trial(config, name, length)
        if limit is not None and trial.bytes > limit:
            return None
        state = trial.start()
        repeated = np.resize(text, max(len(text), length + 2))
        seconds = []
        for step in range(steps):
            batch = trial.batch(repeated, step)
            begin = time.perf_counter()
            state = trial.step(state, batch)
            seconds.append(time.perf_counter() - begin)
        return {"bytes": trial.bytes, "tokens_per_second": config.batch_size * length / min(seconds)}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def _in_words(measured: dict | None) -> str:
    if measured is None:
        return "out of memory"
    return f"{measured['bytes'] / _MIB:,.1f} MiB, {measured['tokens_per_second']:,.0f} tokens/s"


def show(config, rows: list[dict], console: Console) -> None:
    lengths = config.compare_lengths
    table = Table(
        title=f"One training step on a ring of {config.ring or jax.device_count()}: MiB per device, and tokens/s"
    )
    table.add_column("")
    for length in lengths:
        table.add_column(f"{length:,} bytes", justify="right")
    table.add_column("longest", justify="right")
    figure, (memory, speed) = plt.subplots(1, 2, figsize=(9, 3.6))
    for name in config.compare:
        of_name = [row for row in rows if row["parallelism"] == name]
        at = {row["length"]: row for row in of_name if "bytes" in row}
        cells = [
            f"{at[n]['bytes'] / _MIB:,.1f}  {at[n]['tokens_per_second']:,.0f}" if n in at else "out of memory"
            for n in lengths
        ]
        longest = next((f"{row['longest']:,}" for row in of_name if "longest" in row), "")
        table.add_row(name, *cells, longest)
        style = {"marker": "o", "label": name, "lw": 2.5 if name == "metp" else 1.2}
        memory.plot(list(at), [row["bytes"] / _MIB for row in at.values()], **style)
        speed.plot(list(at), [row["tokens_per_second"] for row in at.values()], **style)
    for axis, label in ((memory, "MiB per device"), (speed, "tokens/s")):
        axis.set(xscale="log", xlabel="bytes of a sequence", ylabel=label, ylim=(0, None))
        axis.set_xticks(list(lengths), [f"{n:,}" for n in lengths])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.spines[["top", "right"]].set_visible(False)
    memory.legend(frameon=False)
    plots.save(figure, config.folder / "parallelisms.png")
    console.print(table)
    console.print(f"In {config.folder}: metrics.jsonl, parallelisms.json, parallelisms.png", soft_wrap=True)
