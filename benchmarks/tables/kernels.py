"""Tables of the kernels of a step, from `benchmarks/results/kernels.json`."""

from typing import Any

from benchmarks.tables.markdown import gib, load, table


def dense() -> str:
    """The kernels of DenseNet-264, grouped."""
    environment, rows = load("kernels")
    row = row_of(rows, "densenet")
    groups = {"convolve_backward": 0.0, "convolve": 0.0, "cuDNN's convolutions": 0.0, "all others": 0.0}
    for kernel in row["longest"]:
        name = kernel["name"]
        name = "cuDNN's convolutions" if name.startswith(("sm90_xmma", "void cutlass")) else name
        groups[name if name in groups else "all others"] += kernel["ms"]
    groups["all others"] += row["ms_busy"] - sum(groups.values())
    body = [[name, f"{ms:.1f}"] for name, ms in groups.items()]
    body += [["in all", f"{row['ms_busy']:.1f}"], ["between kernels", f"{row['ms_streamed'] - row['ms_busy']:.1f}"]]
    return table([f"kernels of a step, {row['kernels']:,}", "ms"], body, [environment], "kernels")


def loss() -> str:
    """The loss of 4,096 tokens before and after, and plainly."""
    environment, rows = load("kernels")
    names = {
        ("plain loss", "after"): "plain JAX",
        ("loss", "before"): "memjax, dW rounded in a pass",
        ("loss", "after"): "memjax, dW rounded in its product",
    }
    body = []
    for (case, version), label in names.items():
        row = row_of(rows, case, version)
        products = sum(kernel["ms"] for kernel in row["longest"] if kernel["name"].startswith("nvjet"))
        shown = (row["ms"], row["ms_busy"], products)
        body.append([label, *(f"{ms:.1f}" for ms in shown), gib(row["temp_bytes"])])
    header = [
        "4,096 x 4,096 x 128,256",
        "ms, call after call",
        "ms of kernels, rested",
        "of these products",
        "temp GiB",
    ]
    return table(header, body, [environment], "kernels")


def row_of(rows: list[dict[str, Any]], case: str, version: str = "after") -> dict[str, Any]:
    """A case, of one version where there are two."""
    return next(row for row in rows if row["case"] == case and row.get("version", version) == version)
