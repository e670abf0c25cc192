"""Tables of `docs/guides/optimizer.md`: times and bytes of updates and of whole steps, and losses."""

import itertools
import statistics

from benchmarks.tables.markdown import Tables, load, table

NAMES = {
    "float32": "`optax.adamw`, float32 weights",
    "8 bits": "`compressed(adamw)`, float32 weights",
    "4 bits": "the same, `bits=4`",
    "split": "`split_master(adamw)`",
    "split, 8 bits": "`split_master(compressed(adamw))`",
    "rounded, 8 bits": "`stochastic_round(compressed(adamw))`",
    "rounded, 4 bits": "the same, `bits=4`",
    "torch, float32": "`torch.optim.AdamW(fused=True)`, float32 weights",
    "torchao, 8 bits": "`torchao.optim.AdamW8bit`, float32 weights",
    "torchao, rounded, 8 bits": "the same, bfloat16 weights rounded at random",
    "torchao, rounded, 4 bits": "`AdamW4bit`, bfloat16 weights rounded at random",
}
WAYS = {
    "bfloat16, layer by layer": "`jax.jit` of each layer, one after another",
    "jax.checkpoint": "`jax.jit`, `jax.checkpoint` a layer",
    "memjax.jit": "`memjax.jit`",
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


def _losses() -> str:
    loaded = [load(f"optimizer_quality_{model}") for model in ("gpt", "vit")]
    means = [{row["kind"]: row for row in rows if "seeds" in row} for _, rows in loaded]
    body = []
    for kind in means[0]:
        cells = []
        for of_model in means:
            row = of_model[kind]
            cells.append(f"{row['mean_test_loss']:.4f}")
            change = "test_loss_difference"
            cells.append(f"{row[change]:+.4f} ± {row[f'{change}_error']:.4f}" if change in row else "")
        body.append([NAMES[kind], *cells])
    named = ("GPT", "ViT")
    header = ["weights and state"]
    for name, of_model in zip(named, means, strict=True):
        header += [f"{name}, {of_model['float32']['seeds']} seeds: test loss", "difference"]
    return table(header, body, [environment for environment, _ in loaded], "losses")


def _whole_step() -> str:
    loaded = [load(f"finetune_large_{name}") for name in ("checkpoint", "ahead", "8b_h200", "33b_h200", "33b_host")]
    ways = {"checkpoint": "`jax.checkpoint` a layer, `jax.jit`", "plan": "`memjax.jit`"}
    body = [
        [
            f"{row['parameters'] / 1e9:.1f}",
            ways[row["policy"]],
            f"{row['device'].split()[1]}, {row['tokens']:,}",
            f"{row['arguments'] / 2**30:.1f}",
            f"{row['host'] / 2**30:.1f}" if row.get("host") else "",
            f"{row['temporaries'] / 2**30:.1f}",
            f"{row['workspace'] / 2**30:.1f}",
            f"{sum(row[name] for name in ('arguments', 'temporaries', 'results', 'code', 'workspace')) / 2**30:.1f}",
            f"{row['predicted_time']:.2f}" if "predicted_time" in row else "",
        ]
        for _, rows in loaded
        for row in rows
    ]
    header = [
        "10^9 parameters",
        "by",
        "GPU, tokens",
        "weights and state, GiB",
        "state on the host",
        "temporaries",
        "cuDNN",
        "all",
        "predicted time",
    ]
    return table(header, body, [environment for environment, _ in loaded], "whole_step")


def _eight_billion() -> str:
    """Steps that ran."""
    loaded = [load(f"finetune_large{name}") for name in ("", "_forward_backward", "_14b")]
    body = []
    for _, rows in loaded:
        for row in rows:
            body.append(
                [
                    f"{row['parameters'] / 1e9:.1f}",
                    f"{row['tokens']:,}",
                    "forward and backward alone" if row["forward_backward"] else "whole step",
                    f"{row['held'] / 2**30:.1f}",
                    f"{row['peak_bytes'] / 2**30:.1f}",
                    f"{row['step_s']:.2f}",
                    f"{row['tokens_per_s']:,}",
                    f"{row['utilisation']:.0%}",
                ]
            )
    header = [
        "10^9 parameters",
        "tokens",
        "what",
        "compiled, GiB",
        "allocator's peak",
        "s",
        "tokens a second",
        "utilisation",
    ]
    return table(header, body, [environment for environment, _ in loaded], "eight_billion")


def _gradients() -> str:
    """Shares of signs of gradients in bfloat16 that differ from those in float32, by way."""
    environment, (_, *rows) = load("finetune_gradients")
    body = []
    for row in rows:
        cells = [f"{statistics.mean(itertools.chain(*row['from_float32'].values())):.1%}"]
        for name in ("value", "down"):
            shares = row["from_float32"][name]
            cells += [f"{shares[0]:.1%}", f"{shares[-1]:.1%}"]
        body.append([WAYS[row["way"]], *cells])
    header = ["by", "all", "value, first layer", "last", "down, first layer", "last"]
    return table(header, body, [environment], "gradients")


def _sentence() -> str:
    """The same in a line, for README."""
    rows = [load(f"finetune_large{name}")[1][0] for name in ("", "_14b")]
    held, second_held = (f"{row['held'] / 2**30:.1f} GiB" for row in rows)
    first, second = rows
    billions = f"{second['parameters'] / 1e9:.1f} billion"
    return "\n".join(
        (
            "One H100 of 80 GB trains all weights of a model of Llama-3-8B's shape by AdamW, on a sequence of",
            f"{first['tokens']:,} tokens and with nothing on the host: {held}, {first['step_s']:.0f} s a step. A model of",
            f"{billions} parameters, {second['tokens']:,} tokens: {second_held}, {second['step_s']:.1f} s.",
        )
    )


README: Tables = {"finetune": _sentence}
GUIDE: Tables = {
    "update": _time,
    "losses": _losses,
    "whole_step": _whole_step,
    "eight_billion": _eight_billion,
    "gradients": _gradients,
}
