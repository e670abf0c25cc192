"""The tables of `memjax.linear_cross_entropy` in `docs/benchmarks/linear-cross-entropy.md`."""

from benchmarks.tables import kernels
from benchmarks.tables.markdown import Tables, gib, load, table

_NAMES = {
    "forward_grad": 'memjax, `"forward_grad"` (default here)',
    "recompute": 'memjax, `"recompute"`',
    "recompute, chunk=3072": 'memjax, `"recompute"`, `chunk=3072`',
    "plain JAX": "plain JAX, all logits",
    "forward only": "memjax, forward only",
    "forward only, plain JAX": "plain JAX, forward only",
}


def loss_table() -> str:
    environment, rows = load("cross_entropy")
    timed = {row["name"]: row for row in rows if row["what"] == "time"}
    names = {**_NAMES, **{name: name for name, row in timed.items() if row["library"] == "torch"}}
    body = [
        [label, f"{(row := timed[name])['ms']:.1f}", gib(row.get("temp_bytes")), gib(row.get("peak_bytes"))]
        for name, label in names.items()
    ]
    header = ["forward and backward pass", "ms", "temp GiB", "peak with gradients, GiB"]
    return table(header, body, [environment], "loss")


def shapes_table() -> str:
    """The fastest way to run each algorithm, for gradients of both activations and head."""
    environment, rows = load("cross_entropy_choice")
    shapes: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["wanted"] == "xw" and "ms" in row:
            algorithms = shapes.setdefault((row["tokens"], row["dim"], row["vocabulary"], row["dtype"]), {})
            name = row["implementation"].split("/")[0]
            if name not in algorithms or row["ms"] < algorithms[name]["ms"]:
                algorithms[name] = row
    cell = lambda row: f"{row['ms']:.1f} ms, {row['temp_bytes'] / 2**20:,.0f} MiB" if row else "out of memory"
    body = [
        [
            f"{t:,} x {d:,} x {v:,}, {dtype}",
            *(cell(algorithms.get(name)) for name in ("full", "forward_grad", "recompute")),
        ]
        for (t, d, v, dtype), algorithms in shapes.items()
    ]
    header = ["tokens x features x vocabulary", '`"full"`, float32 logits', '`"forward_grad"`', '`"recompute"`']
    return table(header, body, [environment], "shapes")


TABLES: Tables = {"loss": loss_table, "kernels": kernels.loss, "shapes": shapes_table}
