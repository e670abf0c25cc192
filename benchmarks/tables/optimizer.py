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


def _whole_step() -> str:
    loaded = [load(f"finetune_large_{name}") for name in ("checkpoint", "ahead")]
    ways = {"checkpoint": "`jax.checkpoint` a layer, `jax.jit`", "plan": "`memjax.jit`"}
    body = [
        [
            ways[row["policy"]],
            f"{row['arguments'] / 2**30:.1f}",
            f"{row['temporaries'] / 2**30:.1f}",
            f"{row['workspace'] / 2**30:.1f}",
            f"{sum(row[name] for name in ('arguments', 'temporaries', 'results', 'code', 'workspace')) / 2**30:.1f}",
            f"{row['predicted_time']:.2f}" if "predicted_time" in row else "",
        ]
        for _, rows in loaded
        for row in rows
    ]
    header = [
        "8.03 10^9 parameters, 131,072 tokens",
        "weights and state, GiB",
        "temporaries",
        "cuDNN",
        "all",
        "predicted time",
    ]
    return table(header, body, [environment for environment, _ in loaded], "whole_step")


GUIDE: Tables = {"update": _time, "whole_step": _whole_step}
