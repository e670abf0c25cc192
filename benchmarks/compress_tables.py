"""Tables of compressed activations, in `docs/compress.md` and README, from results: `python -m benchmarks.tables`."""

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.compressed import Config
from benchmarks.markdown import gib, load, source, table
from benchmarks.record import mean_and_error

_NETWORKS = {"alexnet": "AlexNet", "vgg16": "VGG-16", "resnet18": "ResNet-18", "resnet50": "ResNet-50"}
# A file for each row of bars.
_STEPS = {"compressed_vgg16": "vgg16", "compressed_resnet50": "resnet50", "compressed_large": "resnet50"}
_TRAININGS = (
    "compressed_training",
    "compressed_training_alexnet",
    "compressed_training_resnet50",
    "compressed_training_plain",
)
_SEEDS = ("compressed_seeds", "compressed_seeds_resnet50", "compressed_seeds_alexnet")
_CASES = {
    "plain": "nothing compressed",
    "settle": "what convolutions read, error-bounded, with room for whatever it needs",
    "conv": "what convolutions read, error-bounded",
    "all": "the rest, too, in four bits a value",
}


def training_table() -> str | None:
    files = [loaded for name in _TRAININGS if (loaded := load(name)) is not None]
    all_rows = [row for _, rows in files for row in rows if "error" not in row]
    if not all_rows:
        return None
    compressed_rows = [row for row in all_rows if row["compressed"]]
    plain_rows = [row for row in all_rows if not row["compressed"]]
    body = []
    for model, name in _NETWORKS.items():
        plain, compressed = ([r for r in rows if r["model"] == model] for rows in (plain_rows, compressed_rows))
        if not compressed:
            continue
        ratios = [row["predicted_over_measured"] for row in compressed]
        extremes = f"{min(r[0] for r in ratios):.2f} to {max(r[2] for r in ratios):.2f}"
        body.append(
            [
                name,
                _accuracy(plain),
                _accuracy(compressed),
                f"{statistics.mean(r['ratio'] for r in compressed):.1f}",
                f"{statistics.median(r[1] for r in ratios):.2f} ({extremes})",
            ]
        )
    steps = {row["steps"] for row in compressed_rows}
    header = [
        f"{'/'.join(map(str, sorted(steps)))} steps at batch 256",
        "top-1, plain (seeds)",
        "top-1, compressed",
        "float32 / code",
        "sigma of a layer's gradient, predicted / measured: median (range)",
    ]
    return "\n\n".join([table(header, body), *dict.fromkeys(source(environment) for environment, _ in files)])


def _accuracy(rows: list[dict[str, Any]]) -> str:
    return f"{mean_and_error([100 * row['top1'] for row in rows], 1)}% ({len(rows)})" if rows else "not run"


def seeds_table() -> str | None:
    """Of `compressed_seeds`: accuracies, and differences from what is not compressed, seed by seed."""
    files = [loaded for name in _SEEDS if (loaded := load(name)) is not None]
    body = []
    for _, rows in files:
        top1: dict[str, dict[int, float]] = {}
        for row in rows:
            top1.setdefault(row["kind"], {})[row["seed"]] = 100 * row["top1"]
        seeds = sorted(set.intersection(*map(set, top1.values())))
        less_plain = {
            kind: mean_and_error([found[seed] - top1["plain"][seed] for seed in seeds], 2)
            for kind, found in top1.items()
        }
        size = rows[0]["size"]
        body.append(
            [
                f"{_NETWORKS[rows[0]['model']]}, {size}x{size}, {len(seeds)} seeds",
                f"{mean_and_error([top1['plain'][seed] for seed in seeds], 2)}%",
                less_plain.get("raw", ""),
                less_plain["compressed"],
            ]
        )
    header = ["", "top-1, plain", "codes of the values themselves, less plain", "compressed, less plain"]
    sources = [source(environment) for environment, _ in files]
    return "\n\n".join([table(header, body), *sources]) if files else None


def step_table() -> str | None:
    def cells(row: dict[str, Any], plain: dict[str, Any]) -> list[str]:
        milliseconds = row.get("milliseconds") or row["milliseconds_transactional"]
        return [f"{milliseconds:.1f}", f"{milliseconds / plain['milliseconds']:.2f}"]

    return _table_of_cases(_CASES, ["ms", "relative"], cells)


def memory_table() -> str | None:
    cases = {case: label for case, label in _CASES.items() if case != "settle"}

    def cells(row: dict[str, Any], plain: dict[str, Any]) -> list[str]:
        return [gib(row["temp_bytes"]), gib(row["peak_bytes"]), f"{row['peak_bytes'] / plain['peak_bytes']:.1%}"]

    return _table_of_cases(cases, ["temp GiB", "peak GiB", "of the uncompressed peak"], cells)


def _table_of_cases(cases: dict[str, str], header: list[str], cells: Callable[[dict, dict], list[str]]) -> str | None:
    """A line for each file's network and case that has a row; `cells` of it and the plain row in the same file."""
    files = [(*loaded, model) for name, model in _STEPS.items() if (loaded := load(name)) is not None]
    body = []
    for _, rows, model in files:
        found = {row["case"]: row for row in rows if row["model"] == model}
        body += [
            [f"{_NETWORKS[model]}, {cases[case]}{_left_alone(found[case])}", *cells(found[case], found["plain"])]
            for case in cases
            if case in found
        ]
    header = ["training step, batch 256 of 224x224, bf16", *header]
    sources = dict.fromkeys(source(environment) for environment, *_ in files)  # one run may have written several files
    return "\n\n".join([table(header, body), *sources]) if files else None


def _left_alone(row: dict[str, Any]) -> str:
    """Unless it is next to nothing. Older rows do not say."""
    smallest = row.get("smallest", Config.smallest)
    if row["case"] == "plain" or smallest == Config.smallest:
        return ""
    return f"; arrays of fewer than {smallest:,} values left alone"


def codec_table() -> str | None:
    """Of one run for each dtype."""
    files = [loaded for name in ("codec", "codec_float32") if (loaded := load(name)) is not None]
    body = [
        [
            f"{row['data']}, {'x'.join(map(str, row['shape']))}, {row['dtype']}",
            f"{row['bits_per_value']:.2f}",
            *(f"{row[key]:.2f}" for key in ("encode_tb_s", "decode_tb_s", "decode_without_signs_tb_s", "floor_tb_s")),
        ]
        for _, rows in files
        for row in rows
    ]
    header = ["values, bound 1/4", "bits a value", "encode, TB/s", "decode", "without signs", "all of the bandwidth"]
    return "\n\n".join([table(header, body), *(source(environment) for environment, _ in files)]) if files else None


TABLES = {
    "training": training_table,
    "seeds": seeds_table,
    "steps": step_table,
    "memory": memory_table,
    "codec": codec_table,
}
