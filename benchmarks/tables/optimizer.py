"""The table of `docs/guides/optimizer.md`: times and bytes of updates."""

from benchmarks.tables.markdown import Tables, load, table

NAMES = {
    "float32": "`optax.adamw`, float32 weights",
    "8 bits": "`compressed(adamw)`, float32 weights",
    "4 bits": "the same, `bits=4`",
    "split": "`split_master(adamw)`",
    "split, 8 bits": "`split_master(compressed(adamw))`",
    "rounded, 8 bits": "`stochastic_round(compressed(adamw))`",
    "rounded, 4 bits": "the same, `bits=4`",
}


def _time() -> str:
    environment, rows = load("optimizer_state")
    body = [
        [
            NAMES[row["kind"]],
            f"{row['ms']:.1f}",
            f"{row['floor_ms']:.1f}",
            f"{row['ratio_to_floor']:.2f}",
            f"{row['weights_and_state_bytes']:.2f}",
            f"{row['temporary_bytes']:.2f}",
        ]
        for row in rows
    ]
    header = ["10^9 parameters", "ms", "floor, ms", "ratio", "weights and state, bytes a parameter", "temporary ones"]
    return table(header, body, [environment], "update")


GUIDE: Tables = {"update": _time}
