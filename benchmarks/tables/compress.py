"""The tables of compressed activations in `docs/benchmarks/compress.md`."""

import statistics
from typing import Any

from benchmarks.compressed import Config
from benchmarks.record import RESULTS, mean_and_error
from benchmarks.tables.markdown import Tables, gib, load, table

_NETWORKS = {"alexnet": "AlexNet", "vgg16": "VGG-16", "resnet18": "ResNet-18", "resnet50": "ResNet-50"}
_TRANSFORMERS = {"gpt": "GPT", "vit": "ViT"}
# A file for each network's steps.
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
    "settle": "inputs of convolutions, with room for any code",
    "conv": "inputs of convolutions",
    "all": "and the rest in 4 bits",
}
_DEFAULTS = {
    "plain": "nothing compressed",
    "compressed(model)": "`compressed(model)`: 8 bits",
    "compressed(model, bits=4)": "`compressed(model, bits=4)`",
    (
        _CONV := "ErrorBounded(2**-5, bits_per_value=12), where=conv"
    ): "inputs of convolutions in `ErrorBounded(2**-5)`, 12 bits",
    f"{_CONV}; ChannelQuantized(4) for the rest": "and the rest in `ChannelQuantized(4)`",
    "adaptive, where=conv; ChannelQuantized(4) for the rest": "the same with bounds that follow training",
}


def default_table() -> str:
    environment, rows = load("compressed_default")
    cases = {row["case"]: row for row in rows}
    body = [
        [label, f"{cases[case]['ms']:.1f}", f"{cases[case]['temp_mib']:,.0f}", f"{cases[case]['gradient_error']:.1%}"]
        for case, label in _DEFAULTS.items()
        if case in cases
    ]
    return table(["public ResNet-50", "ms", "temp MiB", "error of the gradient"], body, [environment], "default")


def error_table() -> str:
    environment, rows = load("compressed_error")
    body = [
        [row["dtype"], _DEFAULTS[row["case"]], f"{row['from_float32']:.1%}", f"{row['from_plain']:.1%}"] for row in rows
    ]
    header = [
        "dtype",
        "public ResNet-50",
        "from float32, nothing compressed",
        "from the same dtype, nothing compressed",
    ]
    return table(header, body, [environment], "error")


def public_table() -> str:
    environment, rows = load("public_models")
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
        "model",
        *("final loss, plain", "compressed, less plain", "other data order, less plain"),
        *("largest error of the gradient", "bytes kept"),
    ]
    # A row of another run has the environment of that.
    others = [
        row["environment"] | {"accelerator": f"{row['model'].replace('_', ' ')}: {row['environment']['accelerator']}"}
        for row in rows
        if "environment" in row
    ]
    return table(header, body, [environment, *others], "public")


def training_table() -> str:
    files = [load(name) for name in _TRAININGS]
    all_rows = [row for _, rows in files for row in rows]
    body = []
    for model, name in _NETWORKS.items():
        plain, compressed = (
            [r for r in all_rows if r["model"] == model and bool(r["compressed"]) == kind] for kind in (False, True)
        )
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
    header = [
        "network",
        "top-1, plain (seeds)",
        "top-1, compressed (seeds)",
        "float32 / code",
        "error of a layer's gradient, predicted / measured: median (range)",
    ]
    return table(header, body, [environment for environment, _ in files], "training")


def _accuracy(rows: list[dict[str, Any]]) -> str:
    return f"{mean_and_error([100 * row['top1'] for row in rows], 1)}% ({len(rows)})" if rows else "not run"


def seeds_table() -> str:
    """Accuracies of `compressed_seeds`, and their differences from plain training with the same seed."""
    files = [load(name) for name in _SEEDS]
    body = []
    for _, rows in files:
        top1: dict[str, dict[int, float]] = {}
        for row in rows:
            top1.setdefault(row["kind"], {})[row["seed"]] = 100 * row["top1"]
        seeds = sorted(set.intersection(*map(set, top1.values())))
        less_plain = {
            kind: mean_and_error([by_seed[seed] - top1["plain"][seed] for seed in seeds], 2)
            for kind, by_seed in top1.items()
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
    header = ["network", "top-1, plain", "exact codes, less plain", "compressed, less plain"]
    return table(header, body, [environment for environment, _ in files], "seeds")


def steps_table() -> str:
    """Time and memory of a training step, from a file for each network."""
    files = [(*load(name), model) for name, model in _STEPS.items()]
    body = []
    for _, rows, model in files:
        cases = {row["case"]: row for row in rows if row["model"] == model}
        plain = cases["plain"]
        for case, label in _CASES.items():
            row = cases[case]
            milliseconds = row.get("milliseconds") or row["milliseconds_transactional"]
            body.append(
                [
                    f"{_NETWORKS[model]}, {label}{_left_alone(row)}",
                    f"{milliseconds:.1f}",
                    f"{milliseconds / plain['milliseconds']:.2f}",
                    gib(row["temp_bytes"]),
                    gib(row["peak_bytes"]),
                    f"{row['peak_bytes'] / plain['peak_bytes']:.0%}",
                ]
            )
    header = ["training step", "ms", "time, relative", "temp GiB", "peak GiB", "peak, relative"]
    return table(header, body, [environment for environment, *_ in files], "steps")


def _left_alone(row: dict[str, Any]) -> str:
    """The row's `smallest`, if it is not the default. Older rows have none."""
    smallest = row.get("smallest", Config.smallest)
    if row["case"] == "plain" or smallest == Config.smallest:
        return ""
    return f"; `smallest={smallest}`"


def codec_table() -> str:
    """Speed of the codec, from a file for each dtype."""
    files = [load(name) for name in ("codec", "codec_float32")]
    body = [
        [
            f"{row['data']}, {'x'.join(map(str, row['shape']))}, {row['dtype']}",
            f"{row['bits_per_value']:.2f}",
            *(f"{row[key]:.2f}" for key in ("encode_tb_s", "decode_tb_s", "decode_without_signs_tb_s", "floor_tb_s")),
        ]
        for _, rows in files
        for row in rows
    ]
    header = ["values", "bits a value", "encode, TB/s", "decode", "decode without signs", "at full bandwidth"]
    return table(header, body, [environment for environment, _ in files], "codec")


def paired_table() -> str:
    """Transformers trained plainly and compressed, of the same seeds."""
    files = [load(path.stem) for path in sorted(RESULTS.glob("paired_*.json"))]  # of `benchmarks.paired`, a model each
    body = []
    for _, rows in files:
        for row in rows:
            size = f"{row['parameters'] / 1e6:.1f}M, {row['dtype']}"
            name = f"{_TRANSFORMERS[row['model']]}, {size}, {row['steps']} steps, {row['seeds']} seeds"
            name += ", twice" if row.get("runs") == 2 else ""
            name += f"; {row['choice']} choice" if "choice" in row else ""
            cells = [
                name if row["kind"] == "plain" else "",
                row["kind"],
                f"{row['test_loss']:.4f} ± {row['test_loss_error']:.4f}",
            ]
            if row["kind"] == "plain":
                cells += ["", "", "", "", ""]
            else:
                share = 100 / row["test_loss"]
                cells += [
                    f"{row['difference']:+.5f} ± {row['difference_error']:.5f}",
                    f"{share * row['difference']:+.2f}%",
                    *_errors_of_gradients(row),
                    f"{row['bytes_share']:.0%}",
                ]
            body.append(cells)
    header = [
        *("network", "activations", "test loss", "less plain", "of the loss"),
        *("errors of layers' gradients: median, largest", "predicted within 20%", "bytes kept by blocks"),
    ]
    return table(header, body, [environment for environment, _ in files], "paired")


def _errors_of_gradients(row: dict) -> list[str]:
    """Two cells, empty for a run that ended after its trainings."""
    if "gradient_error_median" not in row:
        return ["", ""]
    return [
        f"{row['gradient_error_median']:.1%}, {row['gradient_error_largest']:.1%}",
        f"{row['predicted_within_20_percent']:.0%} of {row['layers']}",
    ]


TABLES: Tables = {
    "default": default_table,
    "error": error_table,
    "public": public_table,
    "paired": paired_table,
    "training": training_table,
    "seeds": seeds_table,
    "steps": steps_table,
    "codec": codec_table,
}
