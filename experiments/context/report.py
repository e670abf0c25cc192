"""Tables and a figure of what recipes take: KiB per token, step time and length, beside the formulas."""

from pathlib import Path

from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from experiments.harness.reports import plots


def show(rows: list[dict], console: Console, path: Path, title: str) -> None:
    """Prints tables and writes the figure.

    Args:
      rows: of kind "length", "longest" and "error".
      path: of the figure.
      title: what the rows are of.
    """
    at = {(row["recipe"], row["length"]): row for row in rows if row["kind"] == "length"}
    longest = {row["recipe"]: row for row in rows if row["kind"] == "longest"}
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    lengths = sorted({length for _, length in at})
    console.print(_table(recipes, lengths, at, longest, title))
    errors = [row for row in rows if row["kind"] == "error"]
    if errors:
        console.print(_errors(errors))
    _draw(recipes, lengths, at, longest, title, path)


def _table(recipes: list[str], lengths: list[int], at: dict, longest: dict, title: str) -> Table:
    table = Table(
        title=f"{title}: KiB per token beside parameters and gradients, and seconds of a gradient",
        caption="formula: kept inputs of layers and one layer at work, without attention's own work and the loss",
    )
    table.add_column("recipe", no_wrap=True)
    table.add_column("formula", justify="right")
    for length in lengths:
        table.add_column(f"{length:,} tokens", justify="right")
    table.add_column("longest", justify="right")
    for recipe in recipes:
        mine = [at[recipe, length] for length in lengths if (recipe, length) in at]
        formula = next((row["formula"] for row in mine if row["formula"]), None)
        cells = [_cell(at.get((recipe, length))) for length in lengths]
        table.add_row(recipe, "" if formula is None else f"{formula:.2f}", *cells, _longest(longest.get(recipe)))
    return table


def _cell(row: dict | None) -> str:
    if row is None:
        return ""
    return f"{row['kib']:.2f}\n" + (f"{row['seconds']:.2f} s" if "seconds" in row else "out of memory")


def _longest(row: dict | None) -> str:
    if row is None:
        return ""
    seconds = f"\n{row['seconds']:.1f} s" if "seconds" in row else ""
    return f"{row['length']:,}{seconds}" if row["length"] else "none"


def _errors(rows: list[dict]) -> Table:
    table = Table(
        title="Error of the gradient by compressed inputs of layers, relative to the gradient",
        caption="at most: what is expected where positions contribute to the gradient independently",
    )
    for heading in ("recipe", "tokens", "at most", "measured"):
        table.add_column(heading, justify="left" if heading == "recipe" else "right")
    for row in rows:
        at_most = "" if row["at_most"] is None else f"{row['at_most']:.2%}"
        table.add_row(row["recipe"], f"{row['length']:,}", at_most, f"{row['measured']:.2%}")
    return table


def _draw(recipes: list[str], lengths: list[int], at: dict, longest: dict, title: str, path: Path) -> None:
    figure, axes = plt.subplots(
        1, 2 + bool(longest), figsize=(5 + 3.2 * (1 + bool(longest)), 1.2 + 0.42 * len(recipes))
    )
    places = range(len(recipes))
    memory, speed = axes[0], axes[1]
    last = [next((at[r, n] for n in reversed(lengths) if (r, n) in at), None) for r in recipes]
    memory.barh(places, [row["kib"] if row else 0 for row in last], color="C0", height=0.6)
    known = [(row["formula"], y) for row, y in zip(last, places, strict=True) if row and row["formula"]]
    if known:
        memory.plot(*zip(*known, strict=True), "D", color="black", ms=4, label="formula")
        memory.legend(frameon=False, loc="lower right")
    memory.set(xlabel="KiB per token")
    memory.set_yticks(places, recipes)
    speed.barh(places, [row.get("seconds", 0) if row else 0 for row in last], color="C1", height=0.6)
    speed.set(xlabel=f"seconds, {lengths[-1]:,} tokens" if lengths else "seconds")
    if longest:
        values = [longest[r]["length"] if r in longest else 0 for r in recipes]
        bars = axes[2].barh(places, values, color="C2", height=0.6)
        axes[2].bar_label(bars, [f"{value:,}" for value in values], padding=3, fontsize=8)
        axes[2].set(xlabel="longest sequence, tokens", xlim=(0, 1.25 * max([*values, 1])))
    for axis in axes:
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_formatter("{x:,g}")
    for axis in axes[1:]:
        axis.set_yticks(places, [""] * len(recipes))
    figure.suptitle(title)
    plots.save(figure, path)
