"""All weights of a Transformer trained in few bytes a parameter, beside AdamW in float32: do they end at the same loss?

    python experiments/finetune.py

A model of Llama's shape learns the source of Python's standard library twice: by AdamW with weights and state in float32, and by
the same AdamW with bfloat16 weights, state in codes and, with `--master split`, the other half of each float32 weight. Both start
from the same weights and see the same batches. Then: losses and their difference, bytes a parameter, and a picture of both.
Two minutes and a half on two CPU cores. Eight seeds at once, for standard errors:

    python experiments/finetune.py --seeds 8
    python experiments/finetune.py --master none --bits 4 --text ~/my_code

On a GPU, 10M parameters, computed in bfloat16.
"""

import dataclasses
import functools
import itertools
import sys
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import memjax
from experiments.data.text import BYTES, check_windows, standard_library, test_windows, train_windows, windows
from experiments.finetuning.report import finetune_report, save_bytes
from experiments.harness.config import RunConfig
from experiments.harness.errors import ExperimentError
from experiments.harness.loop.optimizer import learning_rate
from experiments.harness.loop.step import Batch, Sums, TrainState, parameter_count
from experiments.harness.main import run
from experiments.harness.task import Task
from experiments.models import llama
from experiments.models.recipe import Recipe
from experiments.paired.members import members_optimizer
from memjax import compress

EXACT = 32
"""The number of bits that stands for moments in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig(RunConfig):
    """The Transformer, its text, and in what its weights and its optimizer's state are kept."""

    bits: int = 8
    """Bits of a moment of AdamW: 8, 4, or 32 for float32."""
    master: Literal["split", "none"] = "split"
    """split: float32 masters, half of each in the weights, half in the state. none: bfloat16 weights alone, rounded at random."""
    text: Path | None = None
    """A folder with Python files to learn. Default: Python's standard library."""
    dim: int = 96
    """Width of the residual stream."""
    layers: int = 4
    heads: int = 4
    """Heads of queries; pairs of them share keys and values."""
    length: int = 64
    """Bytes of a sequence: tokens of a step are --batch-size times --length."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the computation."""
    seeds: int = 1
    """Trainings of each kind, with weights and batches of their own; all are one program."""
    test_batches: int = 8
    """Batches of a test, at most."""

    experiment: ClassVar[str] = "finetune"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *RunConfig.fixed_by_checkpoint,
        *("bits", "master", "dim", "layers", "heads", "length", "seeds"),
    )

    def validate(self) -> None:
        super().validate()
        for name in ("dim", "layers", "heads", "length", "seeds", "test_batches"):
            if getattr(self, name) < 1:
                raise ExperimentError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.bits not in (4, 8, EXACT):
            raise ExperimentError(f"--bits must be 8, 4 or {EXACT}, got {self.bits}")
        if self.heads % 2 or self.dim % (2 * self.heads):
            raise ExperimentError(
                f"--heads must be even, and twice of it divide --dim {self.dim}: heads share keys in pairs, and rotary positions "
                f"turn pairs of features; got --heads {self.heads}"
            )
        if self.optimizer != "adamw":
            raise ExperimentError(f"--optimizer must be adamw here, got {self.optimizer}")

    def shape(self) -> llama.LlamaConfig:
        return llama.LlamaConfig(
            vocabulary=BYTES, dim=self.dim, layers=self.layers, heads=self.heads, kv_heads=self.heads // 2,
            head_dim=self.dim // self.heads, hidden=3 * self.dim, tied=True, dtype=self.dtype,
        )  # fmt: skip

    @property
    def kinds(self) -> tuple[str, str]:
        moments = "float32" if self.bits == EXACT else f"{self.bits} bits"
        weights = "split masters" if self.master == "split" else "bfloat16 weights"
        return "float32", f"{weights}, {moments}"


_adamw = functools.partial(FinetuneConfig, optimizer="adamw", schedule="cosine", weight_decay=0.1, warmup=0.1)
PRESETS: dict[str, RunConfig] = {
    "cpu": _adamw(preset="cpu", epochs=0.1, batch_size=8, learning_rate=3e-3),
    "gpu": _adamw(
        preset="gpu", epochs=0.5, batch_size=32, learning_rate=1e-3, length=256, dim=384, layers=6, heads=6, dtype="bfloat16",
        log_every=10,
    ),
}  # fmt: skip


class Members(nnx.Module):
    """Weights of all trainings: those of the first kind in float32, those of the other in bfloat16, with a leading axis of seeds.

    All are numbers that bfloat16 has, so that trainings of a seed start from the same model.
    """

    def __init__(self, config: FinetuneConfig):
        shape = dataclasses.replace(config.shape(), dtype="float32")
        keys = jax.vmap(jax.random.key)(config.seed + jnp.arange(config.seeds))
        stacked = jax.vmap(lambda key: llama.init(shape, key))(keys)
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), stacked)
        high = jax.tree.map(lambda w: w.astype(jnp.float32), low)
        self.models = nnx.data([jax.tree.map(nnx.Param, weights) for weights in (high, low)])


def members_loss(config: FinetuneConfig, *, together: bool) -> Any:
    """For `Members`: the mean of the cross-entropies, in nats per byte, and the sum of each training as "kind, seed".

    Args:
      together: whether all trainings read the whole batch, as in tests; else those of a seed read that seed's part of it.
    """
    shape = config.shape()

    def one(weights: Any, text: jax.Array) -> jax.Array:
        text = text.astype(jnp.int32)
        weights = jax.tree.map(lambda w: w.astype(config.dtype), weights)
        return llama.loss(shape, Recipe(), weights, text[:, :-1], text[:, 1:])

    def sums(model: Any, batch: Batch) -> Sums:
        text = batch["text"]
        parts = text if together else text.reshape(config.seeds, -1, text.shape[1])
        models = nnx.to_pure_dict(nnx.state(model, nnx.Param))["models"]
        found = [jax.vmap(one, in_axes=(0, None if together else 0))(models[i], parts) for i in sorted(models)]
        named = {
            f"{kind}, {seed}": of_kind[seed]
            for kind, of_kind in zip(config.kinds, found, strict=True)
            for seed in range(config.seeds)
        }
        read = text.shape[0] // (1 if together else config.seeds)
        return named | {"loss": jnp.mean(jnp.stack(found)), "count": jnp.float32(read * config.length)}

    return sums


def make_optimizer(config: FinetuneConfig, total_steps: int) -> optax.GradientTransformation:
    """AdamW for each kind, in its own arithmetic; gradients of each training are clipped by their own norm."""
    adamw = lambda: optax.adamw(learning_rate(config, total_steps), weight_decay=config.weight_decay)
    coded = adamw() if config.bits == EXACT else memjax.compressed(adamw(), bits=config.bits)
    wrap = compress.split_master if config.master == "split" else compress.stochastic_round
    label = lambda path, _: config.kinds[path[1].key]
    each = optax.partition(
        dict(zip(config.kinds, (adamw(), wrap(coded)), strict=True)),
        lambda params: jax.tree_util.tree_map_with_path(label, params),
    )
    return members_optimizer(each, 1.0 if config.clip is None else config.clip, 2 * config.seeds)


def make_task(config: Any) -> Task:
    text = standard_library(config.text)
    size = config.seeds * config.batch_size
    check_windows(text, config.length, size)

    def finish(state: TrainState) -> None:
        weights, states = state.params["models"], state.optimizer[1].inner_states
        save_bytes(config, {kind: (weights[i], states[kind]) for i, kind in enumerate(config.kinds)})

    return Task(
        make_model=lambda: Members(config),
        loss=members_loss(config, together=False),
        test_loss=members_loss(config, together=True),
        train_batches=train_windows(text, length=config.length, batch_size=size, seed=config.seed),
        test_batches=lambda: itertools.islice(
            test_windows(text, length=config.length, batch_size=size), config.test_batches
        ),
        batch={"text": jax.ShapeDtypeStruct((size, config.length + 1), jnp.uint8)},
        train_examples=windows(text.train, config.length),
        optimizer=lambda total_steps: make_optimizer(config, total_steps),
        count_parameters=lambda params: parameter_count(params) // (2 * config.seeds),
        finish=finish,
    )


if __name__ == "__main__":
    sys.exit(run(PRESETS, make_task, description=__doc__ or "", extra_report=finetune_report))
