"""Draw `overview.png`, `savings.png` and `activations.png`: `python docs/overview.py`.

The first two have measurements: batches of a training step that did not fit, and README's table. The third is a sketch: one
training step of a chain of equal layers, computed from the number of layers alone.
"""

import pathlib

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

from benchmarks.tables.markdown import load
from benchmarks.tables.overview import savings, size
from memjax import remat

LAYERS, SLOTS, CODE = 24, 7, 0.3
GREY, BLUE, ORANGE = "0.6", "tab:blue", "tab:orange"
WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 2}


def everything_kept(share: float) -> tuple[list[float], list[float]]:
    """Time and memory if each layer keeps `share` of its activations; a backward step takes as long as two forward ones."""
    time = [*range(LAYERS + 1), *(LAYERS + 2 * step for step in range(1, LAYERS + 1))]
    memory = [*range(LAYERS + 1), *range(LAYERS - 1, -1, -1)]
    return list(map(float, time)), [share * count for count in memory]


def recomputed() -> tuple[list[float], list[float]]:
    """Time and memory of the optimal schedule in `SLOTS` slots."""
    now, stored = 0.0, {0}
    time, memory = [0.0], [1.0]
    for action in remat.schedule(LAYERS, SLOTS, strategy="hidden").actions:
        now += {"advance": action.stop - action.start, "keep": 1, "backward": 2}.get(action.kind, 0)
        if action.kind == "store":
            stored.add(action.slot)
        elif action.kind == "free":
            stored.discard(action.slot)
        time.append(now)
        memory.append(len(stored) + (action.kind == "keep"))
    return time, memory


def sketch(axes) -> None:
    axes.fill_between(*everything_kept(1), color=GREY, alpha=0.25, lw=0)
    axes.plot(*everything_kept(1), color=GREY, label="everything kept")
    axes.plot(*everything_kept(CODE), color=ORANGE, label="kept in fewer bits: compress")
    axes.plot(*recomputed(), color=BLUE, drawstyle="steps-post", label="some kept, the rest recomputed: remat")
    axes.axvline(LAYERS, color="0.8", lw=0.8, zorder=0)
    axes.text(LAYERS - 1, LAYERS + 0.6, "forward", ha="right", color="0.4")
    axes.text(LAYERS + 1, LAYERS + 0.6, "backward", color="0.4")
    axes.set(xlabel="time in one training step", ylabel="activations in memory", xticks=[], yticks=[])
    axes.set(xlim=(0, None), ylim=(0, LAYERS * 1.12), title="Activations wait for the backward pass (sketch)")
    axes.legend(frameon=False, fontsize="small", loc="upper right", bbox_to_anchor=(1, 0.93))


def fitted(axes) -> None:
    """Batches of a step under `jax.jit`, of which the first fits, and under `memjax.jit`."""
    environment, rows = load("jit_gpt")
    (plain,) = (row for row in rows if row["case"] == "nnx.jit")
    planned = [row for row in rows if row["case"] == "memjax.jit"]
    limit = planned[0]["budget"] / 2**30
    for place, row in enumerate(planned):
        fits = row["batch"] <= plain["batch"]
        height = row["nbytes"] / 2**30
        if fits:
            axes.bar(place - 0.2, height, 0.36, color=GREY, alpha=0.5)
        else:
            axes.bar(place - 0.2, limit, 0.36, color="none", edgecolor=GREY, hatch="///", lw=0)
            axes.text(place - 0.2, limit / 2, "does not fit", rotation=90, ha="center", va="center", bbox=WHITE)
        axes.bar(place + 0.2, height, 0.36, color=BLUE)
        speed = f"{row['tokens_per_s'] / 1e3:.0f}k tokens/s"
        axes.text(place + 0.2, height / 2, speed, rotation=90, ha="center", va="center", color="white")
    axes.axhline(limit, color="0.3", lw=0.8)
    axes.text(-0.45, limit + 1, f"memory that JAX may use: {limit:.1f} GiB", color="0.3", fontsize=8.5)
    axes.bar(0, 0, color=GREY, alpha=0.5, label=plain["case"])
    axes.bar(0, 0, color=BLUE, label="memjax.jit")
    axes.legend(frameon=False, fontsize="small", loc="upper right", ncols=2)
    axes.set_xticks(range(len(planned)), [f"batch {row['batch']}" for row in planned])
    card = environment["accelerator"].removesuffix(" 80GB HBM3")
    axes.set(ylim=(0, 1.22 * limit), ylabel="memory of the step, GiB", title=f"909M decoder, AdamW, one {card}")


def measured(axes) -> None:
    rows = savings()[::-1]
    for place, row in enumerate(rows):
        share = row.gib / row.plain_gib
        axes.barh(place, 1, color=GREY, alpha=0.3, height=0.62)
        axes.barh(place, share, color=BLUE, height=0.62)
        axes.text(share + 0.015, place, f"{size(row.gib)}, {row.of_time:.2f} x the time", va="center", fontsize=8.5)
        axes.text(
            1.015, place, f"{row.plain}:\n{size(row.plain_gib)}".replace("`", ""), va="center", fontsize=8, color="0.35"
        )
    labels = [f"{row.what}\n{row.tool}".replace("`", "") for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8.5)
    axes.set(xlim=(0, 1.3), xticks=[0, 0.25, 0.5, 0.75, 1], xticklabels=["0", "25%", "50%", "75%", "100%"])
    axes.set(xlabel="memory of a step, of that without memjax", title="Measured on NVIDIA H200")
    axes.tick_params(axis="y", length=0)


def main(folder: pathlib.Path) -> None:
    drawn = {"overview": (fitted, (7.5, 3.9)), "savings": (measured, (7.5, 4.6)), "activations": (sketch, (6.5, 4.2))}
    for name, (draw, size_of) in drawn.items():
        figure, axes = plt.subplots(figsize=size_of, layout="constrained")
        draw(axes)
        saved(figure, folder / f"{name}.png")


def saved(figure, path: pathlib.Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(11)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main(pathlib.Path(__file__).parent)
