"""The tables of `memjax.remat.scan` in `docs/benchmarks/scan.md`."""

from benchmarks.tables.markdown import Tables, load, table

_LABELS = {
    "plain": lambda name: f"`{name}`",
    "flax": lambda name: "`nn.scan` of `nn.remat`",
    "two-level": lambda name: f"scan of checkpointed scans, {name}",
    "nest": lambda name: f"nested checkpoints by hand, {name}",
    "equinox": lambda name: f"equinox, {name}",
    "memjax": lambda name: f'memjax, `budget="{name.removeprefix("budget ")}"`',
}


def scan_table() -> str:
    environment, rows = load("bptt_planned_lstm")
    timed = [row for row in rows if "ratio" in row and row["group"] in _LABELS and "profiled" not in row["name"]]
    timed = [row for row in timed if row["group"] != "memjax" or row["name"].startswith("budget")]
    body = [
        [_LABELS[row["group"]](row["name"]), f"{row['temp'] / 2**20:.1f}", f"{row['ms']:.1f}", f"{row['ratio']:.2f}"]
        for row in sorted(timed, key=lambda row: -row["temp"])
    ]
    return table(["gradient of an LSTM", "temp MiB", "ms", "time, relative"], body, [environment], "scan")


def strategies_table() -> str:
    environment, rows = load("bptt_strategies")
    body = [
        [
            f"{row['cell'].upper()}, {row['length']:,} steps",
            f"{row['slots']} slots" if "slots" in row else "",
            f"`{row['strategy']}`" + (" (default)" if row.get("default") else ""),
            f"{row['temp'] / 2**20:.1f}",
            f"{row['ms']:.1f}",
        ]
        for row in sorted(rows, key=lambda row: (row["cell"] == "gru", -row.get("slots", 1000)))
        if "ms" in row
    ]
    return table(["cell", "memory", "strategy", "temp MiB", "ms"], body, [environment], "strategies")


def planned_table() -> str:
    """Plans of loops beside the fastest other way that takes no more than the budget."""
    body, sources = [], []
    for cell, name in (("LSTM", "bptt_planned_lstm"), ("GRU", "bptt_planned_gru")):
        environment, rows = load(name)
        timed = [row for row in rows if "ratio" in row and "profiled" not in row["name"]]
        plain = next(row for row in timed if row["group"] == "plain")
        sources.append(environment)
        for row in timed:
            if row["group"] != "planned":
                continue
            budget = row["name"].removeprefix("planned, budget ")
            nbytes = float(budget.removesuffix("MiB")) * 2**20
            scan = next(one for one in timed if one["name"] == f"budget {budget}")
            others = [one for one in timed if one["group"] in ("nest", "two-level", "flax", "equinox")]
            fitting = [one for one in others if one["temp"] <= nbytes]
            best = min(fitting, key=lambda one: one["ratio"], default=None)
            body.append(
                [
                    f"{cell}, {row['length']:,} steps",
                    f"{budget.removesuffix('MiB')} ({nbytes / plain['temp']:.0%})",
                    *(f"{one['ratio']:.2f} ({one['temp'] / 2**20:.1f})" for one in (row, scan)),
                    "none fits" if best is None else f"{best['ratio']:.2f} ({best['temp'] / 2**20:.1f})",
                ]
            )
    header = ["loop", "budget, MiB", "`memjax.planned`", "`remat.scan`", "the fastest by hand, Flax's or equinox's"]
    return table(header, body, sources, "planned")


def recurrent_table() -> str:
    """A recurrent network with what leads to its loop and what follows."""
    body, sources = [], []
    for name, what in (
        ("recurrent", "GPU, 512 steps"),
        ("recurrent_long", "GPU, 1,024 steps"),
        ("recurrent_cpu", "CPU, 512 steps, smaller"),
    ):
        environment, rows = load(name)
        sources.append(environment)
        for row in rows:
            if row["way"] == "plain":
                way = "`jax.lax.scan`"
            elif row["way"] in ("planned", "jit"):
                way = f"{'planned' if row['way'] == 'planned' else '`memjax.jit`'}, budget {row['share']:.0%}"
            else:
                way = f"by hand, chunks of {row['chunk']} steps"
            body.append([what, way, f"{row['temp'] / 2**20:,.0f}", f"{row['of_plain']:.1%}", f"{row['ratio']:.2f}"])
    return table(["rollout", "gradient", "temp MiB", "of plain", "time, relative"], body, sources, "recurrent")


TABLES: Tables = {
    "scan": scan_table,
    "planned_loops": planned_table,
    "recurrent": recurrent_table,
    "strategies": strategies_table,
}
