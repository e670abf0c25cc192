"""The tables of Transformer layers in `docs/benchmarks/transformer.md`."""

from typing import Any

from benchmarks.markdown import Tables, load, table

_COMPRESSION = ("plain", "checkpoint", "checkpoint, products kept")


def names_table() -> str:
    """Checkpoints by name, and `remat.chain`."""
    environment, rows = load("transformer")
    timed = [row for row in rows if "ms" in row and not row["case"].startswith("compressed")]
    body = [[_label(row["case"]), f"{row['ms']:.1f}", f"{row['temp_mib']:,.0f}"] for row in timed]
    return table(["layers run by", "ms", "temp MiB"], body, [environment], "names")


def compression_table() -> str:
    """Checkpoints and codecs, with errors of the gradient; the rounding of the plain layers is the error of plain."""
    environment, rows = load("transformer")
    rounding = next(row["gradient_error"] for row in rows if row["case"] == "rounding")
    body = [
        [_label(row["case"]), f"{row['ms']:.1f}", f"{row['temp_mib']:,.0f}", f"{row['gradient_error']:.2%}"]
        for row in rows
        if "ms" in row and (row["case"] in _COMPRESSION or row["case"].startswith("compressed"))
    ]
    header = ["around each layer", "ms", "temp MiB", f"distance from the plain gradient (its rounding: {rounding:.1%})"]
    return table(header, body, [environment], "compression")


def _label(case: str) -> str:
    kind, _, detail = case.partition(", ")
    names: dict[str, Any] = {
        "plain": "nothing",
        "checkpoint": "`jax.checkpoint`",
        "compressed": "`compressed`",
        "chain": "`remat.chain`",
    }
    detail = f"`{detail}`" if kind == "compressed" and detail else detail
    return ", ".join(filter(None, [names[kind], detail]))


TABLES: Tables = {"names": names_table, "compression": compression_table}
