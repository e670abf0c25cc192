"""The tables of `memjax.shard` in `docs/benchmarks/metp.md`."""

from typing import Any

from benchmarks.cases.metp_overlap import full_overlap_tokens
from benchmarks.tables.markdown import Tables, bare_table, gib, load, table

_NAMES = {
    "metp": "METP",
    "tp": "tensor parallelism",
    "tp_sp": "tensor and sequence parallelism",
    "ulysses": "Ulysses, weights fully sharded",
    "ring": "ring attention, weights fully sharded",
}


def memory_table() -> str:
    files = [load(name) for name in ("metp_memory_2", "metp_memory_4gpus")]
    layers = {(row["size"], row["parallelism"]): row for _, rows in files for row in rows}
    body = []
    for size in sorted({size for size, _ in layers}):
        metp, tensor = layers[size, "metp"], layers[size, "tp"]
        saved = 1 - metp["peak_bytes"] / tensor["peak_bytes"]
        slower = metp["milliseconds"] / tensor["milliseconds"]
        body.append([str(size), gib(metp["peak_bytes"]), gib(tensor["peak_bytes"]), f"{saved:.1%}", f"{slower:.2f}"])
    header = ["GPUs", "METP, GiB", "tensor parallelism, GiB", "saved", "time, METP / tensor parallelism"]
    return table(header, body, [environment for environment, _ in files], "memory")


def long_table() -> str:
    """One layer over a long sequence, four GPUs."""
    environment, rows = load("metp_memory_524288")
    metp = next(row for row in rows if row["parallelism"] == "metp")
    body = [
        [
            _NAMES[row["parallelism"]],
            gib(row["peak_bytes"]),
            f"{row['peak_bytes'] / metp['peak_bytes']:.2f}",
            f"{row['milliseconds'] / 1e3:.2f}",
        ]
        for row in rows
    ]
    return table(["524,288 tokens", "peak, GiB", "to METP's", "s"], body, [environment], "long")


def feed_forward_table() -> str:
    """A gated layer over a ring beside one GPU that has whole weights and sends nothing."""
    environment, [row] = load("metp_feed_forward")
    alone = next(iter(row["ways"].values()))["milliseconds"]
    body = [
        [name, f"{way['milliseconds']:.1f}", f"{way['milliseconds'] / alone:.2f}", gib(way["temp_bytes"])]
        for name, way in row["ways"].items()
    ]
    header = [f"{row['tokens']:,} tokens on {row['size']} GPUs", "ms", "to the first", "temp GiB"]
    return table(header, body, [environment], "feed_forward")


def compiled_table() -> str:
    environment, rows = load("metp_compiled")
    lengths = sorted({row["tokens"] for row in rows})
    sizes = {(row["parallelism"], row["tokens"]): f"{row['bytes'] / 2**20:,.0f}" for row in rows}
    names = [name for name in _NAMES if (name, lengths[0]) in sizes]
    body = [[_NAMES[name], *(sizes[name, tokens] for tokens in lengths)] for name in names]
    header = [f"MiB per GPU, {rows[0]['size']} {rows[0]['device']}", *(f"{n:,} tokens" for n in lengths)]
    return table(header, body, [{**environment, "accelerator": "No GPU"}], "compiled")


def longest_table() -> str:
    environment, rows = load("metp_longest_80gb", failed=True)
    most = next(row["ran"] for row in rows if row["parallelism"] == "metp")
    body = []
    for row in rows:
        ran = "ran" in row
        body.append(
            [
                _NAMES[row["parallelism"]],
                f"{row['ran']:,}" if ran else f"less than {row['fails']:,}",
                f"{most / row['ran']:.2f}" if ran else f"more than {most / row['fails']:.2f}",
                gib(row["bytes"]) if ran else "",
                gib(row["peak_bytes"]) if ran else "out of memory",
                f"{row['seconds']:.1f}" if ran else "",
            ]
        )
    header = ["parallelism", "sequence", "METP's / this", "GiB as compiled", "GiB used", "s"]
    return table(header, body, [environment], "longest")


def overlap_table() -> str:
    return _overlap("metp_overlap_8", "overlap")


def four_table() -> str:
    return _overlap("metp_overlap_4gpus", "four")


def _overlap(name: str, footnote: str) -> str:
    environment, (measured,) = load(name)
    at = {(r["tokens"], r["pass"]): r for r in measured["milliseconds"]}
    body = [
        [f"{tokens:,}", *(f"{at[tokens, 'forward + backward'][k]:.2f}" for k in ("matmuls", "hops", "ring"))]
        + [f"{at[tokens, p]['hidden']:.0%}" for p in ("forward", "backward", "forward + backward")]
        for tokens in sorted({tokens for tokens, _ in at})
    ]
    header = [
        "tokens per GPU",
        "matmuls alone, ms",
        "hops alone, ms",
        "ring, ms",
        "hidden: forward",
        "backward",
        "both",
    ]
    return table(header, body, [environment], footnote)


def crossover_table() -> str:
    body = []
    _, (row,) = load("metp_overlap_8")
    for name, crossing in full_overlap_tokens(row).items():
        measured: Any = crossing["measured"]
        predicted = [
            f"{crossing[rate]:,} ({crossing[rate] / measured - 1:+.0%})" for rate in ("own matmuls", "large matmul")
        ]
        body.append([name, f"{measured:,.0f}", *predicted])
    header = ["pass", "measured", "predicted, rate of the layer's matmuls", "predicted, rate of one large matmul"]
    return bare_table(header, body)


def hops_table() -> str:
    environment, rows = load("metp_hops")
    body = []
    for row in rows:
        at = {(r["tokens"], r["pass"]): r for r in row["milliseconds"]}
        passes = ("forward", "forward + backward")
        least = min(tokens for tokens, _ in at)
        cells = [f"{at[least, p]['hops']:.2f}" for p in passes] + [f"{at[least, p]['hidden']:.0%}" for p in passes]
        body.append([row["setting"], *cells, f"{at[least, passes[1]]['ring']:.2f}"])
    header = ["setting", "hops alone, ms: forward", "both", "hidden: forward", "both", "ring, ms: both"]
    return table(header, body, [environment], "hops")


TABLES: Tables = {
    "memory": memory_table,
    "long": long_table,
    "feed_forward": feed_forward_table,
    "compiled": compiled_table,
    "longest": longest_table,
    "overlap": overlap_table,
    "four": four_table,
    "crossover": crossover_table,
    "hops": hops_table,
}
