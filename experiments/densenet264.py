"""DenseNet-264 in a fraction of the memory (Pleiss et al. 2017, arXiv 1707.06990).

    python experiments/densenet264.py

On a CPU: growth rate 4 on scikit-learn's handwritten digits, 98% test accuracy in a few minutes on two
cores, and the table of what training keeps in memory, which another process compiles meanwhile. The one takes 1.5 GB,
the other 3.5 GB of memory (--no-compare goes without). Stopped by Ctrl-C or killed, it goes on with --resume. On a GPU:
growth rate 48, 224x224, bf16. With images of one's own, as PATH/train/CLASS/* and PATH/val/CLASS/*:

    python experiments/densenet264.py --data folder --data-dir PATH
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.data.digits import digits
from experiments.data.image_folder import broken_log, image_folder, skipped
from experiments.data.stream import ImageData, test_batches, train_batches
from experiments.harness.config import RunConfig
from experiments.harness.errors import ExperimentError
from experiments.harness.loop.classification import classification_loss
from experiments.harness.main import run
from experiments.harness.task import Task
from experiments.models.densenet import SIZES, DenseNet


@dataclass(frozen=True, kw_only=True)
class DenseNetConfig(RunConfig):
    """The network and its images."""

    block_sizes: tuple[int, ...] = SIZES[264][0]
    """Layers of each dense block."""
    growth_rate: int = 4
    """Channels that each layer adds."""
    stem: Literal["imagenet", "cifar"] = "imagenet"
    """imagenet: 7x7 convolution and pooling, a quarter of the size. cifar: 3x3 convolution, full size."""
    keep: Literal["all", "convolutions", "later_convolutions", "features"] = "features"
    """What training keeps for the backward pass: all is plain autodiff, the others recompute the rest. later_convolutions is
    features in the first block and convolutions in the others."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of computation; parameters, statistics and logits are float32."""
    dropout_rate: float = 0.0
    """Share of each layer's new features dropped in training."""
    label_smoothing: float = 0.0
    """Share of each target spread over all classes, in training."""
    data: Literal["digits", "folder"] = "digits"
    """digits: scikit-learn's. folder: an ImageNet-style tree."""
    data_dir: Path | None = None
    """The tree: train/CLASS/* and val/CLASS/*."""
    image_size: int = 32
    """Side of the images in pixels."""
    skip_broken: bool = False
    """Count and skip files that cannot be read as images, instead of stopping with an error."""
    compare: bool = True
    """Also compile the step that keeps everything, to compare its memory with this run's. This is slow: all layers are unrolled.
    On a CPU another process does so while this one trains."""

    experiment: ClassVar[str] = "densenet264"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *RunConfig.fixed_by_checkpoint,
        *("block_sizes", "growth_rate", "stem", "data", "image_size"),
    )

    def validate(self) -> None:
        super().validate()
        if not self.block_sizes or min(self.block_sizes) < 1:
            raise ExperimentError(f"--block-sizes must be positive, got {self.block_sizes}")
        if self.growth_rate < 1:
            raise ExperimentError(f"--growth-rate must be at least 1, got {self.growth_rate}")
        for name, rate in (("dropout-rate", self.dropout_rate), ("label-smoothing", self.label_smoothing)):
            if not 0 <= rate < 1:
                raise ExperimentError(f"--{name} must be in [0, 1), got {rate}")
        smallest = 2 ** (len(self.block_sizes) - 1) * (4 if self.stem == "imagenet" else 1)
        if self.image_size < smallest:
            raise ExperimentError(f"--image-size must be at least {smallest} for this network, got {self.image_size}")
        if self.image_size > 4096:
            raise ExperimentError(f"--image-size must be at most 4096, got {self.image_size}")
        if self.data == "digits" and (self.skip_broken or self.data_dir is not None):
            raise ExperimentError("--skip-broken and --data-dir are for --data folder, which is missing")


PRESETS = {
    "cpu": DenseNetConfig(preset="cpu", stem="cifar", image_size=16, epochs=10, schedule="cosine", workers=2),
    "gpu": DenseNetConfig(
        preset="gpu",
        growth_rate=48,
        image_size=224,
        dtype="bfloat16",
        epochs=100,
        batch_size=256,
        milestones=(0.3, 0.6),
        log_every=20,
        workers=8,
    ),
}


def make_task(config: DenseNetConfig) -> Task:
    data = _data(config)
    make_model = functools.partial(_model, config, data)
    stream = {"batch_size": config.batch_size, "workers": config.workers if config.data == "folder" else 0}
    size = config.image_size
    keeps = dict.fromkeys((config.keep, "all") if config.compare else ())
    return Task(
        make_model=functools.partial(make_model, config.keep),
        loss=classification_loss(mean=data.mean, std=data.std, label_smoothing=config.label_smoothing),
        test_loss=classification_loss(mean=data.mean, std=data.std, label_smoothing=0.0),
        train_batches=train_batches(data, seed=config.seed, **stream),
        test_batches=functools.partial(test_batches, data, **stream),
        batch={
            "image": jax.ShapeDtypeStruct((config.batch_size, size, size, data.channels), jnp.uint8),
            "label": jax.ShapeDtypeStruct((config.batch_size,), jnp.int32),
        },
        train_examples=len(data.train),
        compare={
            f'keep="{keep}"' + " (this run)" * (keep == config.keep): functools.partial(make_model, keep)
            for keep in keeps
        },
    )


def facts(config: DenseNetConfig) -> dict[str, str]:
    """What only this experiment has to report."""
    return skipped(config.folder) if config.skip_broken else {}


def _data(config: DenseNetConfig) -> ImageData:
    if config.data == "digits":
        return digits(config.image_size)
    log = broken_log(config.folder) if config.skip_broken else None
    return image_folder(config.data_dir, image_size=config.image_size, broken_log=log)


def _model(config: DenseNetConfig, data: ImageData, keep: str) -> nnx.Module:
    return DenseNet(
        config.block_sizes,
        config.growth_rate,
        len(data.classes),
        stem=config.stem,
        keep=keep,
        dtype=jnp.dtype(config.dtype),
        dropout_rate=config.dropout_rate,
        in_channels=data.channels,
        rngs=nnx.Rngs(config.seed),
    )


if __name__ == "__main__":
    sys.exit(run(PRESETS, make_task, description=__doc__, facts=facts))
