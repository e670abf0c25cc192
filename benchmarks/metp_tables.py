"""METP's tables in `docs/metp.md` and README, from `benchmarks/results/`; written by `python -m benchmarks.tables`."""

from typing import Any

from benchmarks.markdown import gib, load, source, table
from benchmarks.metp_overlap import full_overlap_tokens

_NAMES = {
    "metp": "METP",
    "tp": "tensor parallelism",
    "tp_sp": "tensor and sequence parallelism",
    "ulysses": "Ulysses, weights fully sharded",
    "ring": "ring attention, weights fully sharded",
}


def memory_table() -> str | None:
    files = [loaded for name in ("metp_memory_2", "metp_memory") if (loaded := load(name)) is not None]
    if not files:
        return None
    found = {(row["size"], row["parallelism"]): row for _, rows in files for row in rows}
    body = []
    for size in sorted({size for size, _ in found}):
        mine, theirs = found[size, "metp"], found[size, "tp"]
        saved = 1 - mine["peak_bytes"] / theirs["peak_bytes"]
        slower = mine["milliseconds"] / theirs["milliseconds"]
        body.append(
            [str(size), gib(mine["peak_bytes"]), gib(theirs["peak_bytes"]), f"{saved:.1%}", f"{slower:.2f}"],
        )
    header = ["GPUs", "METP, GiB", "tensor parallelism, GiB", "saved", "time, METP / TP"]
    return "\n\n".join([table(header, body), *(source(environment) for environment, _ in files)])


def compiled_table() -> str | None:
    if (loaded := load("metp_compiled")) is None:
        return None
    environment, rows = loaded
    lengths = sorted({row["tokens"] for row in rows})
    found = {(row["parallelism"], row["tokens"]): f"{row['bytes'] / 2**20:,.0f}" for row in rows}
    names = [name for name in _NAMES if (name, lengths[0]) in found]
    body = [[_NAMES[name], *(found[name, tokens] for tokens in lengths)] for name in names]
    header = [f"compiled for {rows[0]['size']} {rows[0]['device']}, MiB per GPU", *(f"{n:,} tokens" for n in lengths)]
    return table(header, body) + "\n\n" + source({**environment, "accelerator": "No GPU"})


def longest_table() -> str | None:
    if (loaded := load("metp_longest")) is None:
        return None
    environment, rows = loaded
    found = {row["parallelism"]: row for row in rows if "longest" in row}
    speeds = {(row["parallelism"], row["spend"]): row for row in rows if "speed_at" in row}
    speed_of = lambda *key: f"{speeds[key]['tokens_per_second']:,.0f}" if key in speeds else ""
    most = found["metp"]["longest"]
    body = [
        [
            _NAMES[name],
            f"{row['longest']:,}",
            f"{row['fails']:,}",
            f"{most / row['longest']:.2f}",
            speed_of(name, "time"),
        ]
        for name, row in found.items()
    ]
    if ("metp", "auto") in speeds:
        body.insert(1, ["METP with what memory it leaves", "", "", "", speed_of("metp", "auto")])
    header = ["", "longest sequence", "first that fails", "METP's / this"]
    header += [f"tokens/s with {next(iter(speeds.values()))['speed_at']:,} tokens" if speeds else "tokens/s"]
    return table(header, body) + "\n\n" + source(environment)


def overlap_table() -> str | None:
    if (row := _overlap_row()) is None:
        return None
    environment, measured = row
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
    return table(header, body) + "\n\n" + source(environment)


def crossover_table() -> str | None:
    if (row := _overlap_row()) is None:
        return None
    body = []
    for name, found in full_overlap_tokens(row[1]).items():
        measured: Any = found["measured"]
        predicted = [f"{found[rate]:,} ({found[rate] / measured - 1:+.0%})" for rate in ("own matmuls", "large matmul")]
        body.append([name, f"{measured:,.0f}", *predicted])
    header = ["pass", "measured", "predicted, rate of the layer's matmuls", "predicted, rate of one large matmul"]
    return table(header, body)


def hops_table() -> str | None:
    if (loaded := load("metp_hops")) is None:
        return None
    environment, rows = loaded
    body = []
    for row in rows:
        at = {(r["tokens"], r["pass"]): r for r in row["milliseconds"]}
        passes = ("forward", "forward + backward")
        least = min(tokens for tokens, _ in at)
        cells = [f"{at[least, p]['hops']:.2f}" for p in passes] + [f"{at[least, p]['hidden']:.0%}" for p in passes]
        body.append([row["setting"], *cells, f"{at[least, passes[1]]['ring']:.2f}"])
    header = ["setting", "hops alone, ms: forward", "both", "hidden: forward", "both", "ring, ms: both"]
    return table(header, body) + "\n\n" + source(environment)


def _overlap_row() -> tuple[dict, dict] | None:
    loaded = load("metp_overlap_8")
    return (loaded[0], loaded[1][0]) if loaded else None


TABLES = {
    "memory": memory_table,
    "compiled": compiled_table,
    "longest": longest_table,
    "overlap": overlap_table,
    "crossover": crossover_table,
    "hops": hops_table,
}
