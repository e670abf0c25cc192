"""What each tool saves, a row each: tables of README and of `docs/benchmarks/index.md`, and the bars of `docs/overview.py`."""

import functools
from typing import Any, NamedTuple

from benchmarks.tables.markdown import Tables, bare_table, load, machine

PAGES = "https://github.com/memjax/memjax/blob/main/docs/benchmarks/"


class Saving(NamedTuple):
    """Memory in GiB and time in milliseconds of one step, without memjax and with it."""

    what: str
    plain: str
    tool: str
    page: str
    plain_gib: float
    gib: float
    plain_ms: float
    ms: float
    ratio: float | None = None
    """`ms / plain_ms`, as the median over rounds; None where the benchmark measured no rounds."""

    @property
    def of_time(self) -> float:
        return self.ratio or self.ms / self.plain_ms


def savings() -> list[Saving]:
    dense = load("densenet264_step")[1]
    torch = next(row for row in dense if row["library"] == "torch" and not row["memory_efficient"])
    block = next(row for row in load("densenet264_step_kernels")[1] if row["keep"] == "convolutions")
    scans = {row["name"]: row for row in load("bptt_planned_lstm")[1] if "ratio" in row}
    losses = {row["name"]: row for row in load("cross_entropy")[1] if row["what"] == "time"}
    default = load("compressed_default")[1]
    resnet = {row["case"]: row for row in load("compressed_resnet50")[1]}
    plans = {row["policy"]: row for row in load("plan_unrolled_16384")[1]}
    long = {row["recipe"]: row for row in load("long_context_stack")[1]}
    ring = {row["parallelism"]: row for row in load("metp_memory_2")[1]}

    def saving(names: tuple[str, str, str, str], plain: dict[str, Any], small: dict[str, Any], key: str, ms: str):
        unit = 2**10 if key == "temp_mib" else 2**30
        return Saving(*names, plain[key] / unit, small[key] / unit, plain[ms], small[ms], small.get("ratio"))

    return [
        saving(
            ("DenseNet-264, batch 64", "torchvision", "`remat.DenseBlock`", "dense-block"),
            torch,
            block,
            "peak_bytes",
            "ms_streamed",
        ),
        saving(
            ("LSTM, 1,000 steps", "`jax.lax.scan`", "`remat.scan`", "scan"),
            scans["jax.lax.scan"],
            scans["budget 15MiB"],
            "temp",
            "ms",
        ),
        saving(
            ("loss, vocabulary 256,128", "all logits", "`linear_cross_entropy`", "linear-cross-entropy"),
            losses["plain JAX"],
            losses["forward_grad"],
            "temp_bytes",
            "ms",
        ),
        Saving(
            *("8 Llama layers, 16,384 tokens", "everything kept", "`planned`", "plan"),
            plans["everything"]["bytes"] / 2**30,
            plans["attention, qkv, x2"]["planned_bytes"] / 2**30,
            plans["everything"]["ms"],
            plans["attention, qkv, x2"]["planned_ms"],
        ),
        Saving(
            *(
                "Llama-3-1B, 65,536 tokens",
                "`jax.checkpoint` a layer",
                "tiles, groups of heads, `remat.scan`",
                "long-context",
            ),
            long["checkpoint"]["temp_bytes"] / 2**30,
            long["tiled+groups+slots=4+keep_attention"]["temp_bytes"] / 2**30,
            1e3 * long["checkpoint"]["seconds"][0],
            1e3 * long["tiled+groups+slots=4+keep_attention"]["seconds"][0],
        ),
        saving(
            ("public ResNet-50, batch 256", "plain", "`compressed(model)`", "compress"),
            default[0],
            default[1],
            "temp_mib",
            "ms",
        ),
        saving(
            ("ResNet-50, batch 256", "plain", "`compressed`, adaptive bounds", "compress"),
            resnet["plain"],
            resnet["all"],
            "peak_bytes",
            "milliseconds",
        ),
        saving(
            ("7B layer, 65,536 tokens, each of 2 GPUs", "tensor parallelism", "`shard`", "metp"),
            ring["tp"],
            ring["metp"],
            "peak_bytes",
            "milliseconds",
        ),
    ]


def size(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 1 else f"{gib * 1024:.0f} MiB"


def results_table(pages: str) -> str:
    """The table; `pages` is the address of the pages of benchmarks, seen from the table."""
    body = [
        [
            f"[{row.what}]({pages}{row.page}.md)",
            f"{row.plain}: {size(row.plain_gib)}, {row.plain_ms:.0f} ms",
            f"{row.tool}: {size(row.gib)}, {row.ms:.0f} ms",
            f"{row.gib / row.plain_gib:.0%}",
            f"{row.of_time:.2f}",
        ]
        for row in savings()
    ]
    header = ["training step or gradient", "without memjax", "with memjax", "memory", "time"]
    environment = load("densenet264_step")[0]
    return f"{bare_table(header, body)}\n\n{machine(environment)}, JAX {environment['versions']['jax']}."


README: Tables = {"results": functools.partial(results_table, PAGES)}
INDEX: Tables = {"results": functools.partial(results_table, "")}
