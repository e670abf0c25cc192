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
    environment, rows = load("bptt")
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


TABLES: Tables = {"scan": scan_table, "strategies": strategies_table}
