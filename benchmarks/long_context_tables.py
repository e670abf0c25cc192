"""The tables of `docs/benchmarks/long-context.md`."""

from benchmarks.markdown import Tables, load, table


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


TABLES: Tables = {
    "whole": lambda: _compiled("whole"),
    "layer": lambda: _compiled("layer"),
    "ring": lambda: _compiled("ring"),
}
