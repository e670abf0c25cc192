"""The tables and the picture of `docs/benchmarks/transformer.md`, and of dense codes."""

import functools
import pathlib

import matplotlib

from benchmarks.record import RESULTS
from benchmarks.tables.markdown import Tables, load, table

matplotlib.use("agg")
from matplotlib import pyplot as plt

MODELS = {
    "llama": "8 Llama layers, 16,384 tokens",
    "llama_scanned": "the same in jax.lax.scan",
    "vit_l": "ViT-L/16, 128 images",
    "gpt2_medium": "GPT-2 medium, 16,384 tokens",
}


def measured() -> dict[str, str]:
    """The models that have results, with their titles."""
    return {name: title for name, title in MODELS.items() if (RESULTS / f"transformer_codes_{name}.json").exists()}


def layers(model: str) -> str:
    """Time, memory and error of each way to run the layers."""
    environment, rows = load(f"transformer_codes_{model}")
    body = [
        [_label(row["case"]), f"{row['temp_mib']:,.0f}", f"{row['ms']:.1f}", f"{row['gradient_error']:.2%}"]
        for row in sorted(rows, key=lambda row: row["temp_mib"])
    ]
    header = ["around each layer", "MiB", "ms", "distance from the plain gradient"]
    return table(header, body, [environment], f"codes-{model}")


def codes() -> str:
    """Encoding and decoding of dense values."""
    environment, rows = load("codec_dense_kernel")
    speeds = ("encode_tb_s", "decode_tb_s", "decode_silu_tb_s", "floor_tb_s")
    body = [
        [
            f"`{row['codec']}`",
            f"{row['bits_per_value']:.2f}",
            *(f"{row[name]:.2f}" for name in speeds),
            f"{row['relative_error']:.1%}",
        ]
        for row in rows
    ]
    header = ["codec", "bits", "encode, TB/s", "decode, TB/s", "decode and SiLU, TB/s", "limit of bytes, TB/s", "error"]
    return table(header, body, [environment], "codes-dense")


def picture(path: pathlib.Path) -> None:
    """Time against memory; `path` gets a PNG."""
    models = measured()
    figure, axes = plt.subplots(1, len(models), figsize=(1 + 4 * len(models), 3.8), layout="constrained", squeeze=False)
    for ax, (name, title) in zip(axes[0], models.items(), strict=True):
        rows = sorted(load(f"transformer_codes_{name}")[1], key=lambda row: row["temp_mib"])
        kinds = {"exact: plain, jax.checkpoint": "o", "memjax.compressed": "s-"}
        kinds |= {"memjax.planned, exact": "^-", "memjax.planned, 8 bits allowed": "v-"}
        for kind, style in kinds.items():
            chosen = [row for row in rows if _kind(row["case"]) == kind]
            if not chosen:
                continue
            ax.plot([row["temp_mib"] / 1024 for row in chosen], [row["ms"] for row in chosen], style, label=kind)
            for row in chosen:
                if kind == "memjax.compressed":
                    bits = row["case"].split(", ")[1]
                    ax.annotate(
                        bits,
                        (row["temp_mib"] / 1024, row["ms"]),
                        (5, 6),
                        textcoords="offset points",
                        fontsize=8,
                    )
        ax.set(title=title, xlabel="temporary memory, GiB")
        ax.grid(alpha=0.3)
        ax.margins(y=0.15)
        ax.legend()
    axes[0][0].set_ylabel("value and gradient, ms")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _kind(case: str) -> str:
    first, _, detail = case.partition(", ")
    if first == "planned":
        return "memjax.planned, exact" if detail.startswith("exact") else "memjax.planned, 8 bits allowed"
    return "memjax.compressed" if first == "compressed" else "exact: plain, jax.checkpoint"


def _label(case: str) -> str:
    kind, _, detail = case.partition(", ")
    if kind == "compressed":
        return f"`compressed(layer, bits={detail.split()[0]})`"
    if kind == "planned":
        bits, budget = detail.split(", ", 1)
        return f"`planned` for {budget}" + ("" if bits == "exact" else f", {bits} allowed")
    return "nothing" if case == "plain" else f"`jax.checkpoint`, {case}"


TABLES: Tables = {model: functools.partial(layers, model) for model in measured()} | {"codes": codes}
