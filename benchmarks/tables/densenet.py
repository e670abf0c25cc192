"""Tables of DenseNets in `docs/benchmarks/dense-block.md`, and their picture."""

import pathlib
from typing import Any

from benchmarks.record import RESULTS
from benchmarks.tables import kernels
from benchmarks.tables.markdown import Tables, gib, load, table

_MODES = {"all": "everything kept", "convolutions": 'keep="convolutions"', "features": 'keep="features"'}


def _name(row: dict[str, Any]) -> str:
    if row["library"] == "torch":
        return "torchvision, `memory_efficient=True`" if row["memory_efficient"] else "torchvision"
    kernels = {"triton": ", fused kernels", "xla": ", XLA alone"}.get(row.get("implementation", ""), "")
    return f'memjax, `keep="{row["keep"]}"`{kernels}' + (", with SGD" if row.get("optimizer") else "")


def step_table() -> str:
    """By today's kernels, and the ways without them from the run before."""
    environment, rows = load("densenet264_step_kernels")
    before, others = load("densenet264_step")
    rows = rows + [row for row in others if row.get("implementation") != "triton"]
    body = [
        [
            _name(row),
            f"{row['images_per_s']:.0f}",
            gib(row.get("temp_bytes")),
            gib(row["peak_bytes"]),
            f"{row['compile_s']:.0f}" if "compile_s" in row else "",
        ]
        for row in rows
    ]
    header = [f"DenseNet-264, batch {rows[0]['batch']}", "images/s", "temp GiB", "peak GiB", "compile s"]
    return table(header, body, [environment, before], "step")


def batch_table() -> str:
    """The largest batches, from a file for each search, whose brackets differ."""
    searches = [load(path.stem) for path in sorted(RESULTS.glob("densenet264_batch*.json"))]
    rows = sorted((row for _, rows in searches for row in rows), key=lambda row: -row["batch"])
    speed = lambda row: f"{row['images_per_s']:.0f}" if "images_per_s" in row else ""
    body = [[_name(row), str(row["batch"]), str(row["fails"] or "not tried"), speed(row)] for row in rows]
    header = ["DenseNet-264 in 12 GiB", "largest batch", "first that fails", "images/s"]
    command = {**searches[0][0], "command": "python -m benchmarks.densenet batch"}
    return table(header, body, [command], "batch")


def depth_table() -> str:
    environment, rows = load("densenet_bc_depth")
    temp_bytes = {(row["depth"], row["keep"]): row["temp_bytes"] for row in rows}
    body = [
        [str(depth), *(f"{temp_bytes[depth, k] / 1e6:,.0f}" if (depth, k) in temp_bytes else "" for k in _MODES)]
        for depth in sorted({row["depth"] for row in rows})
    ]
    return table(["depth", *(f"{mode}, MB" for mode in _MODES.values())], body, [environment], "depth")


def planned_table() -> str:
    """Plain layers under plans, beside blocks that share their storage."""
    environment, rows = load("plan_dense")
    names = {"DenseBlock": 'memjax, `keep="features"`, XLA alone', "plain": "layers of Flax, as they are written"}
    least = rows[0]["temp"]
    body = [
        [
            names.get(row["how"], f"the same by `memjax.plan`, {row.get('share')} of the bytes"),
            f"{row['temp'] / 2**20:.1f}",
            f"{row['temp'] / least:.2f}",
            f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]
    return table(["DenseNet-121, batch 16", "temp MiB", "ratio", "time"], body, [environment], "planned")


def depth_picture(path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    (_, memory), (timed_on, time) = load("densenet_bc_depth"), load("densenet_bc_time")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    for keep, label in _MODES.items():
        for axes, rows, field, unit in ((left, memory, "temp_bytes", 1e9), (right, time, "ms_streamed", 1)):
            line = sorted((row["depth"], row[field] / unit) for row in rows if row["keep"] == keep)
            axes.plot(*zip(*line, strict=True), marker="o", label=label)
    left.set(xlabel="depth", ylabel="temporary memory of a training step, GB", ylim=(0, None))
    right.set(xlabel="depth", ylabel=f"ms a training step, {timed_on['accelerator']}", xlim=(0, 172), ylim=(0, None))
    figure.suptitle("DenseNet-BC (k=12), 32x32, batch 64, float32")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


TABLES: Tables = {
    "step": step_table,
    "kernels": kernels.dense,
    "batch": batch_table,
    "depth": depth_table,
    "planned": planned_table,
}
