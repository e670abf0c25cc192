"""GPT on bytes, plain and with compressed activations side by side: do they end at the same loss, in how much memory?

    python experiments/gpt.py

Trains the same model, 0.5M parameters, on the source of Python's standard library: plain, and with blocks that
`memjax.compressed` keeps in 8 and in 4 bits. All start from the same parameters and see the same batches. Then: differences of
losses, errors of gradients by layer, predicted and measured, and bytes kept by each block. Two minutes and a half on two CPU
cores. Eight seeds at once, for standard errors, in about ten minutes:

    python experiments/gpt.py --seeds 8

On a GPU, 10M parameters in bfloat16.
"""

import dataclasses
import functools
import sys
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.data.text import BYTES, check_windows, standard_library, test_windows, train_windows, windows
from experiments.harness.config import RunConfig
from experiments.harness.errors import ExperimentError
from experiments.harness.main import run
from experiments.harness.task import Task
from experiments.models.blocks import GPT, BlocksConfig
from experiments.paired.config import PairedConfig, paired_task
from experiments.paired.report import paired_report


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(PairedConfig):
    """The Transformer, its text, and which trainings of it go side by side."""

    length: int = 64
    """Bytes of a sequence."""

    experiment: ClassVar[str] = "gpt"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (*PairedConfig.fixed_by_checkpoint, "length")

    def validate(self) -> None:
        super().validate()
        if self.length < 1:
            raise ExperimentError(f"--length must be at least 1, got {self.length}")


_adamw = functools.partial(GPTConfig, optimizer="adamw", schedule="cosine", weight_decay=0.1, warmup=0.1)
PRESETS: dict[str, RunConfig] = {
    "cpu": _adamw(preset="cpu", epochs=0.015, batch_size=8, learning_rate=3e-3),
    "gpu": _adamw(
        preset="gpu", epochs=0.5, batch_size=32, learning_rate=1e-3, length=256, dim=384, layers=6, heads=6, dtype="bfloat16",
        log_every=10,
    ),
}  # fmt: skip


def loss(model: nnx.Module, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Nats per byte."""
    text = batch["text"].astype(jnp.int32)
    logits = model(text[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
    return {"loss": jnp.sum(losses), "count": jnp.float32(losses.size)}


def make_task(config: Any) -> Task:
    text = standard_library()
    size = config.seeds * config.batch_size
    check_windows(text, config.length, size)

    def make(seed: Any, blocks: BlocksConfig) -> nnx.Module:
        return GPT(blocks, vocabulary=BYTES, length=config.length, rngs=nnx.Rngs(seed))

    return paired_task(
        config,
        make,
        loss,
        lambda size, seed: train_windows(text, length=config.length, batch_size=size, seed=seed),
        lambda size: test_windows(text, length=config.length, batch_size=size),
        lambda size: {"text": jax.ShapeDtypeStruct((size, config.length + 1), jnp.uint8)},
        windows(text.train, config.length),
        config.length,
    )


if __name__ == "__main__":
    sys.exit(run(PRESETS, make_task, description=__doc__ or "", extra_report=paired_report))
