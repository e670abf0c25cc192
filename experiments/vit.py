"""A ViT on photographs, plain and with compressed activations side by side: do they end at the same loss, in how much memory?

    python experiments/vit.py

The same as `experiments/gpt.py` for a ViT without causality, on crops of the photographs inside scikit-image and scikit-learn:
which photograph is a crop from? Three minutes on two CPU cores; `--seeds 8` for standard errors. On a GPU, 10M
parameters in bfloat16.
"""

import dataclasses
import functools
import sys
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.data.photographs import photographs
from experiments.data.stream import test_batches, train_batches
from experiments.harness.config import RunConfig
from experiments.harness.errors import ExperimentError
from experiments.harness.loop.classification import classification_loss
from experiments.harness.main import run
from experiments.harness.task import Task
from experiments.models.blocks import BlocksConfig, ViT
from experiments.paired.config import PairedConfig, paired_task
from experiments.paired.report import paired_report

_SMOOTHING = 0.1  # of labels. Without it the loss ends near 0, where seeds differ by more than the loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(PairedConfig):
    """The Transformer, its images, and which trainings of it go side by side."""

    image_size: int = 64
    """Side of the crops in pixels."""
    patch: int = 8
    """Side of a patch in pixels."""

    experiment: ClassVar[str] = "vit"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (*PairedConfig.fixed_by_checkpoint, "image_size", "patch")

    def validate(self) -> None:
        super().validate()
        if not 8 <= self.image_size <= 96:
            raise ExperimentError(
                f"--image-size must be from 8 to 96, got {self.image_size}: some photographs are small"
            )
        if self.patch < 1 or self.image_size % self.patch:
            raise ExperimentError(f"--patch must be a divisor of --image-size {self.image_size}, got {self.patch}")


_adamw = functools.partial(ViTConfig, optimizer="adamw", schedule="cosine", weight_decay=0.1, warmup=0.1)
PRESETS: dict[str, RunConfig] = {
    "cpu": _adamw(preset="cpu", epochs=2, batch_size=16, learning_rate=1e-3, test_batches=16),
    "gpu": _adamw(
        preset="gpu", epochs=10, batch_size=64, learning_rate=5e-4, dim=384, layers=6, heads=6, dtype="bfloat16", log_every=4,
        test_batches=32,
    ),
}  # fmt: skip


def make_task(config: Any) -> Task:
    data = photographs(config.image_size)
    loss = classification_loss(mean=data.mean, std=data.std, label_smoothing=_SMOOTHING)

    def make(seed: Any, blocks: BlocksConfig) -> nnx.Module:
        size = {"classes": len(data.classes), "image_size": config.image_size, "patch": config.patch}
        return ViT(blocks, **size, rngs=nnx.Rngs(seed))

    return paired_task(
        config,
        make,
        loss,
        lambda size, seed: train_batches(data, batch_size=size, seed=seed, workers=0),
        lambda size: test_batches(data, batch_size=size, workers=0),
        lambda size: {
            "image": jax.ShapeDtypeStruct((size, config.image_size, config.image_size, 3), jnp.uint8),
            "label": jax.ShapeDtypeStruct((size,), jnp.int32),
        },
        len(data.train),
        (config.image_size // config.patch) ** 2,
    )


if __name__ == "__main__":
    sys.exit(run(PRESETS, make_task, description=__doc__ or "", extra_report=paired_report))
