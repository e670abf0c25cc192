"""README's tables and picture and those of `docs/`, from `benchmarks/results/`: `python -m benchmarks.tables`."""

import pathlib
from collections.abc import Callable

import matplotlib

from benchmarks import compress_tables, metp_tables
from benchmarks.markdown import gib, load, source, table
from benchmarks.record import RESULTS

matplotlib.use("agg")
from matplotlib import pyplot as plt

ROOT = pathlib.Path(__file__).parent.parent
_MODES = {"all": "everything kept", "convolutions": 'keep="convolutions"', "features": 'keep="features"'}


def _name(row: dict) -> str:
    if row["library"] == "torch":
        return "torchvision, `memory_efficient=True`" if row["memory_efficient"] else "torchvision"
    kernels = {"triton": ", fused kernels", "xla": ", XLA alone"}.get(row.get("implementation", ""), "")
    return f'memjax, `keep="{row["keep"]}"`{kernels}' + (", with SGD" if row.get("optimizer") else "")


def step_table() -> str | None:
    if (loaded := load("densenet264_step")) is None:
        return None
    environment, rows = loaded
    body = [
        [
            _name(row),
            str(row["batch"]),
            f"{row['images_per_s']:.0f}",
            gib(row.get("temp_bytes")),
            gib(row["peak_bytes"]),
            f"{row['compile_s']:.0f}" if "compile_s" in row else "",
        ]
        for row in rows
    ]
    header = ["DenseNet-264, k=48, 224x224, bf16", "batch", "images/s", "temp GiB", "peak GiB", "compile s"]
    return table(header, body) + "\n\n" + source(environment)


def batch_table() -> str | None:
    """One file per search: their brackets differ."""
    searches = [found for path in sorted(RESULTS.glob("densenet264_batch*.json")) if (found := load(path.stem))]
    if not searches:
        return None
    rows = sorted((row for _, rows in searches for row in rows), key=lambda row: -row["batch"])
    speed = lambda row: f"{row['images_per_s']:.0f}" if "images_per_s" in row else ""
    body = [[_name(row), str(row["batch"]), str(row["fails"] or "not tried"), speed(row)] for row in rows]
    header = ["DenseNet-264, k=48, 224x224, bf16, in 12 GiB", "largest batch", "first that fails", "images/s"]
    return table(header, body) + "\n\n" + source({**searches[0][0], "command": "python -m benchmarks.densenet batch"})


def depth_table() -> str | None:
    if (loaded := load("densenet_bc_depth")) is None:
        return None
    environment, rows = loaded
    depths = sorted({row["depth"] for row in rows})
    found = {(row["depth"], row["keep"]): row["temp_bytes"] for row in rows}
    body = [
        [str(depth), *(f"{found[depth, k] / 1e6:,.0f}" if (depth, k) in found else "" for k in _MODES)]
        for depth in depths
    ]
    return table(["depth", *(f"{m}, MB" for m in _MODES.values())], body) + "\n\n" + source(environment)


def loss_table() -> str | None:
    if (loaded := load("cross_entropy")) is None:
        return None
    environment, rows = loaded
    names = {
        "forward_grad": 'memjax, `"forward_grad"` (default)',
        "recompute": 'memjax, `"recompute"`',
        "recompute, chunk=3072": 'memjax, `"recompute"`, `chunk=3072`',
        "plain JAX": "plain JAX, all logits",
        "forward only": "memjax, forward only",
        "forward only, plain JAX": "plain JAX, forward only",
    }
    timed = {row["name"]: row for row in rows if row["what"] == "time"}
    names |= {name: name for name, row in timed.items() if row["library"] == "torch"}
    body = [
        [label, f"{(r := timed[name])['ms']:.1f}", gib(r.get("temp_bytes")), gib(r.get("peak_bytes"))]
        for name, label in names.items()
    ]
    header = [
        "8,192 tokens, D=2,304, V=256,128, bf16, forward + backward",
        "ms",
        "temp GiB",
        "peak with gradients, GiB",
    ]
    return table(header, body) + "\n\n" + source(environment)


def scan_table() -> str | None:
    if (loaded := load("bptt")) is None:
        return None
    environment, rows = loaded
    labels = {
        "plain": lambda name: f"`{name}`",
        "flax": lambda name: "`nn.scan` of `nn.remat`",
        "two-level": lambda name: f"scan of checkpointed scans, {name}",
        "nest": lambda name: f"nest by hand, {name}",
        "equinox": lambda name: f"equinox, {name}",
        "memjax": lambda name: f'memjax, `budget="{name.removeprefix("budget ")}"`',
    }
    timed = [row for row in rows if "ratio" in row and row["group"] in labels]
    timed = [row for row in timed if row["group"] != "memjax" or row["name"].startswith("budget")]
    body = [
        [labels[row["group"]](row["name"]), f"{row['temp'] / 2**20:.1f}", f"{row['ms']:.1f}", f"{row['ratio']:.2f}"]
        for row in sorted(timed, key=lambda row: -row["temp"])
        if "profiled" not in row["name"]
    ]
    header = ["LSTM 256, batch 64, float32, 1,000 steps: gradient", "temp MiB", "ms", "relative"]
    return table(header, body) + "\n\n" + source(environment)


def depth_picture(path: pathlib.Path) -> None:
    memory, time = load("densenet_bc_depth"), load("densenet_bc_time")
    if memory is None or time is None:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    for keep, label in _MODES.items():
        for axes, rows, field, unit in ((left, memory[1], "temp_bytes", 1e9), (right, time[1], "ms_streamed", 1)):
            line = sorted((row["depth"], row[field] / unit) for row in rows if row["keep"] == keep)
            axes.plot(*zip(*line, strict=True), marker="o", label=label)
    left.set(xlabel="depth", ylabel="temporary memory of a training step, GB", ylim=(0, None))
    right.set(xlabel="depth", ylabel=f"ms a training step, {time[0]['accelerator']}", xlim=(0, 172), ylim=(0, None))
    figure.suptitle("DenseNet-BC (k=12), 32x32, batch 64, float32")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def public_table() -> str | None:
    if (loaded := load("public_models")) is None:
        return None
    environment, rows = loaded
    signed = lambda difference: f"{difference['mean']:+.4f} ± {difference['error']:.4f}"
    body = [
        [
            row["model"].replace("_", " "),
            f"{sum(t['final'] for t in row['trainings'] if t['kind'] == 'plain') / row['seeds']:.4f}",
            signed(row["compressed_less_plain"]),
            signed(row["reordered_less_plain"]),
            f"{max(g[at]['compressed'] for g in row['gradients'] for at in ('first', 'last')):.1%}",
            f"{row['compressed']['residual_bytes'] / row['plain']['residual_bytes']:.0%}",
        ]
        for row in rows
    ]
    header = [
        f"{rows[0]['steps']} steps, {rows[0]['seeds']} paired seeds",
        *("final loss, plain", "compressed, less plain", "other data order, less plain"),
        *("gradient's error", "bytes kept"),
    ]
    return f"{table(header, body)}\n\n{source(environment)}"


def main() -> None:
    tables = {
        "step": step_table,
        "batch": batch_table,
        "depth": depth_table,
        "scan": scan_table,
        "loss": loss_table,
        "public": public_table,
        "training": compress_tables.training_table,
        "long": metp_tables.memory_table,
    }
    _write(ROOT / "README.md", tables)
    _write(ROOT / "docs" / "metp.md", metp_tables.TABLES)
    _write(ROOT / "docs" / "compress.md", compress_tables.TABLES)
    depth_picture(ROOT / "docs" / "densenet_memory.png")


def _write(page: pathlib.Path, tables: dict[str, Callable[[], str | None]]) -> None:
    """Each table between its two comments."""
    text = page.read_text()
    for name, make in tables.items():
        made = make()
        if made is not None:
            before, old = text.split(f"<!-- {name} -->")
            after = old.split(f"<!-- /{name} -->")[1]
            text = f"{before}<!-- {name} -->\n{made}\n<!-- /{name} -->{after}"
    page.write_text(text)


if __name__ == "__main__":
    main()
