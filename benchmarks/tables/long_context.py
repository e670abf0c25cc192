"""The tables of `docs/benchmarks/long-context.md` and of the guide to long sequences."""

import statistics

from benchmarks.tables.markdown import Tables, load, table
from experiments.models.llama import SHAPES


def _compiled(part: str) -> str:
    environment, rows = load(f"long_context_compiled_{part}")
    body = [
        [
            f"Llama-3-{row['shape']}",
            f"`{row['recipe']}`",
            f"{row['tokens']:,}",
            f"{row['kib_per_local_token']:.1f}",
            f"{row['gib']:.1f}",
        ]
        for row in rows
        if "error" not in row
    ]
    local = "local token" if part == "ring" else "token"
    header = [
        "shape",
        "recipe",
        "tokens",
        f"temporaries, KiB per {local}",
        "with arguments and results, GiB per GPU",
    ]
    return table(header, body, [{**environment, "accelerator": "No GPU"}], f"compiled-{part}")


def _decoder() -> str:
    environment, rows = load("public_decoder")
    body = [
        [
            f"{row['length']:,}",
            f"{row['published_temp_bytes'] / 2**20:.1f}",
            f"{row['temp_bytes'] / 2**20:.1f}",
            f"{row['gradient_difference']:.0e}",
        ]
        for row in rows
    ]
    header = ["tokens", "temporary memory as published, MiB", "with these lines, MiB", "gradients differ by at most"]
    return table(header, body, [environment], "decoder")


GUIDE: Tables = {"decoder": _decoder}


def _measured_layer() -> str:
    environment, rows = load("long_context_layer")
    plain = next(row["ms"] for row in rows if row["recipe"] == "plain")
    body = [
        [
            f"`{row['recipe']}`",
            f"{row['length']:,}",
            f"{row['kib_per_token']:.1f}",
            f"{row['ms']:.0f}",
            f"{row['ms'] / plain:.2f}",
        ]
        for row in rows
    ]
    header = ["recipe", "tokens", "temporaries, KiB per token", "ms", "of the plain layer's time"]
    return table(header, body, [environment], "measured-layer")


def _feed_forward() -> str:
    environment, rows = load("long_context_feed_forward")
    body = []
    for plain, tiled in zip(rows[::2], rows[1::2], strict=True):
        assert (plain["recipe"], tiled["recipe"]) == ("plain", "tiled+plain")
        body.append(
            [
                f"Llama-3-{plain['shape']}",
                f"{plain['length']:,}",
                f"{plain['ms']:.1f}",
                f"{tiled['ms']:.1f}",
                f"{tiled['ms'] / plain['ms']:.3f}",
                f"{tiled['temp_mib'] / plain['temp_mib']:.0%}",
            ]
        )
    header = ["shape", "tokens", "whole, ms", "in tiles, ms", "of the time", "of the temporaries"]
    return table(header, body, [environment], "feed-forward")


def _measured_stack() -> str:
    environment, rows = load("long_context_stack")
    seconds = [statistics.median(row["seconds"]) for row in rows]
    base = next(s for s, row in zip(seconds, rows, strict=True) if row["recipe"] == "checkpoint")
    body = [
        [
            f"`{row['recipe']}`",
            f"{row['length']:,}",
            f"{row['kib_per_token']:.1f}",
            f"{s:.2f}",
            f"{s / base:.2f}",
        ]
        for s, row in zip(seconds, rows, strict=True)
    ]
    header = ["recipe", "tokens", "temporaries, KiB per token", "seconds", "of `checkpoint`'s time"]
    return table(header, body, [environment], "measured-stack")


def _real() -> str:
    loaded = [load(f"long_context_real{suffix}") for suffix in ("", "_1b")]
    body = [
        [
            f"Llama-3-{row['shape']}",
            f"`{row['recipe']}`",
            f"{row['length']:,}",
            f"{row['kib_per_token']:.0f}",
            f"{row['peak_bytes'] / 2**30:.1f}",
            f"{row['seconds']:.0f}",
            f"{row['loss'] / row['length']:.2f}",
        ]
        for _, rows in loaded
        for row in rows
    ]
    header = ["shape", "recipe", "tokens", "temporaries, KiB per token", "GiB of the GPU, at most", "seconds", "loss"]
    return table(header, body, [environment for environment, _ in loaded], "real")


def _four() -> str:
    """Over a ring of four GPUs, beside what was predicted."""
    environment, rows = load("long_context_real_4")
    compiled, ahead = load("long_context_compiled_ring_4")
    rates = [load(f"metp_{kind}_4gpus")[0] for kind in ("attention", "overlap")]
    sources = [environment, {**compiled, "accelerator": "No GPU"}, *rates]
    predicted = {(row["shape"], row["tokens"]): row for row in ahead}
    body = []
    for row in rows:
        shape, _, layers = row["shape"].partition(":")
        nbytes, seconds = predicted[row["shape"], row["length"]]["gib"], _seconds(row)
        body.append(
            [
                f"Llama-3-{shape}" + (f", {layers} layers" if layers else ""),
                f"`{row['recipe']}`",
                f"{row['length']:,}",
                f"{nbytes:.1f}",
                f"{row['peak_bytes'] / 2**30:.1f}",
                f"{seconds:.0f}",
                f"{row['seconds']:.0f}",
                f"{row['loss'] / row['length']:.2f}",
            ]
        )
    header = ["shape", "recipe", "tokens", "GiB of a GPU, predicted", "used", "seconds, predicted", "taken", "loss"]
    return table(header, body, sources, "four")


def _seconds(row: dict) -> float:
    """What a step takes at the rates of the ring's attention and of the matmuls of a feed-forward layer, measured alone.

    All inputs of layers are kept, so that layers run forward twice, the last one once: attention has 2 products forward and 5
    backward.
    """
    name, _, layers = row["shape"].partition(":")
    shape, tokens, devices = SHAPES[name], row["length"], row["devices"]
    _, [attention] = load("metp_attention_4gpus")
    _, [overlap] = load("metp_overlap_4gpus")
    longest = max((m for m in overlap["milliseconds"] if m["pass"] == "forward"), key=lambda m: m["tokens"])
    rate = 4 * longest["tokens"] * 4096 * 16384 / (longest["matmuls"] / 1e3)
    weights = shape.dim * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim + 3 * shape.dim * shape.hidden
    count = int(layers or shape.layers)
    products = (8 * count - 2) * weights + 6 * shape.vocabulary * shape.dim
    attended = (9 * count - 2) * tokens**2 * shape.heads * shape.head_dim
    return (attended / (attention["ring_tflops_per_gpu"] * 1e12) + tokens * products / rate) / devices


def _longest() -> str:
    environment, rows = load("long_context_longest")
    body = [
        [
            f"Llama-3-{row['shape']}",
            f"`{row['recipe']}`",
            f"{row['length']:,}",
            f"{row['kib_per_token']:.1f}",
            f"{row['total_bytes'] / 2**30:.1f} of {row['limit'] / 2**30:.1f}",
        ]
        for row in rows
    ]
    header = ["shape", "recipe", "tokens", "temporaries, KiB per token", "GiB"]
    return table(header, body, [environment], "longest")


TABLES: Tables = {
    "real": _real,
    "four": _four,
    "longest": _longest,
    "measured-layer": _measured_layer,
    "feed-forward": _feed_forward,
    "measured-stack": _measured_stack,
    "whole": lambda: _compiled("whole"),
    "layer": lambda: _compiled("layer"),
    "ring": lambda: _compiled("ring"),
}
