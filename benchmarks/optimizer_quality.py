"""Does state in codes cost a GPT its loss? `python -m benchmarks.optimizer_quality`, ten minutes on an H100: paired seeds.

The GPT of `experiments/gpt.py` on the source of Python's standard library, 10.9M parameters, computed in bfloat16. Each seed has
its initial weights and its batches, and trains by AdamW with float32 weights and state; with moments in 8 and in 4 bits; with
bfloat16 weights that are rounded at random and moments in 8 bits; and with bfloat16 weights whose float32 masters are split. Rows
have the test loss of each training, and means of the differences from float32 with the same seed, with their standard errors.

Rows are saved after each seed, and no seed begins that would end after `--seconds`. It tries on a CPU with
`--seeds 2 --steps 60 --dim 64 --layers 2 --heads 2 --length 64 --batch 8 --dtype float32`.
"""

import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx

import memjax
from benchmarks import record
from experiments.data.text import BYTES, standard_library, test_windows, train_windows
from experiments.models.blocks import GPT, BlocksConfig
from memjax import compress

KINDS: dict[str, Callable[[Any], Any]] = {
    "float32": lambda tx: tx,
    "8 bits": lambda tx: memjax.compressed(tx),
    "4 bits": lambda tx: memjax.compressed(tx, bits=4),
    "rounded, 8 bits": lambda tx: compress.stochastic_round(memjax.compressed(tx)),
    "split": compress.split_master,
}
_BFLOAT16 = ("rounded, 8 bits", "split")  # kinds with such weights


@dataclasses.dataclass(frozen=True)
class Config:
    seeds: int = 16
    steps: int = 1000
    batch: int = 32
    length: int = 256
    dim: int = 384
    layers: int = 6
    heads: int = 6
    dtype: str = "bfloat16"
    learning_rate: float = 1e-3
    seconds: float = 540.0
    """No seed begins that would end later."""
    kinds: tuple[str, ...] = tuple(KINDS)
    name: str = "optimizer_quality"


def main(config: Config) -> None:
    began, longest = time.monotonic(), 0.0
    text = standard_library()
    schedule = optax.warmup_cosine_decay_schedule(0, config.learning_rate, config.steps // 10, config.steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
    sizes = BlocksConfig(config.dim, config.layers, config.heads, config.dtype)
    make = lambda seed: GPT(sizes, vocabulary=BYTES, length=config.length, rngs=nnx.Rngs(seed))
    structure = nnx.graphdef(nnx.eval_shape(lambda: make(0)))

    def loss(weights: Any, batch: jax.Array) -> jax.Array:
        text = batch.astype(jnp.int32)
        logits = nnx.merge(structure, weights)(text[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    def training(kind: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        small = KINDS[kind](tx)

        @jax.jit
        def start(weights: Any) -> Any:
            if kind not in _BFLOAT16:
                return weights, small.init(weights)
            narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
            state = small.init(narrow)
            return compress.set_master(weights, state) if kind == "split" else (narrow, state)

        def step(carry: Any, batch: jax.Array) -> Any:
            weights, state = carry
            value, gradients = jax.value_and_grad(loss)(weights, batch)
            updates, state = small.update(gradients, state, weights)
            return (optax.apply_updates(weights, updates), state), value

        return start, jax.jit(lambda carry, batches: jax.lax.scan(step, carry, batches), donate_argnums=0)

    programs = {kind: training(kind) for kind in config.kinds}
    stack = lambda batches: jnp.stack([jnp.asarray(batch["text"]) for batch in batches])
    size = {"length": config.length, "batch_size": config.batch}
    tests = stack(itertools.islice(test_windows(text, **size), 64))
    test = jax.jit(lambda weights: jnp.mean(jax.lax.map(lambda batch: loss(weights, batch), tests)))
    rows: list[dict] = []
    for seed in range(config.seeds):
        if rows and time.monotonic() - began + longest > config.seconds:
            break
        started = time.monotonic()
        first = nnx.state(make(seed), nnx.Param)
        batches = stack(itertools.islice(train_windows(text, seed=seed, **size), config.steps))
        for kind, (start, train) in programs.items():
            # Copies: what is donated may be the weights themselves.
            (weights, _), losses = train(jax.tree.map(jnp.copy, start(first)), batches)
            row = {"seed": seed, "kind": kind, "test_loss": float(test(weights))}
            row["train_loss"] = float(jnp.mean(losses[-min(64, config.steps // 4) :]))
            rows.append(row)
            print(json.dumps(row), flush=True)
        longest = max(longest, time.monotonic() - started)
        parameters = sum(w.size for w in jax.tree.leaves(first))
        about = {"device": jax.devices()[0].device_kind, "parameters": parameters, "steps": config.steps}
        record.save(config.name, [about | row for row in [*_summary(rows), *rows]])
    for row in _summary(rows):
        print(json.dumps(row))


def _summary(rows: list[dict]) -> list[dict]:
    """For each kind means over the seeds, and of the differences from float32, with their standard errors."""
    by: dict[str, dict[int, dict]] = {}
    for row in rows:
        by.setdefault(row["kind"], {})[row["seed"]] = row
    found = []
    for kind, of_seed in by.items():
        summary: dict[str, Any] = {"kind": kind, "seeds": len(of_seed)}
        for name in ("test_loss", "train_loss"):
            values = [row[name] for row in of_seed.values()]
            differences = (
                [row[name] - by["float32"][seed][name] for seed, row in of_seed.items()] if "float32" in by else []
            )
            summary[f"mean_{name}"] = statistics.mean(values)
            if differences and kind != "float32":
                summary[f"{name}_difference"] = statistics.mean(differences)
                if len(differences) > 1:
                    summary[f"{name}_difference_error"] = statistics.stdev(differences) / len(differences) ** 0.5
        found.append(summary)
    return found


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main(tyro.cli(Config, description=__doc__))
