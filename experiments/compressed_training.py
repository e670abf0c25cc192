"""Training with lossily compressed activations (Jin et al. 2020): a tenth of the space, the error of gradients under control.

    python experiments/compressed_training.py

On a CPU: a narrow ResNet-18 on crops of the photographs inside scikit-image and scikit-learn, in a few minutes on two cores.
On a GPU: ResNet-50 in bf16, the crops enlarged to 224x224. With images of one's own, as PATH/train/CLASS/* and PATH/val/CLASS/*:

    python experiments/compressed_training.py --data folder --data-dir PATH

The same without compression and with larger errors, to compare with, and the comparison:

    python experiments/compressed_training.py --no-compress --name plain
    python experiments/compressed_training.py --sigma 0.05 --coarsest inf --name coarse
    python experiments/compressed_training.py --baseline plain coarse

What batches fit in 16 GiB, with and without compression, by compiling:

    python experiments/compressed_training.py --fill-memory 16
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.compression.analysis import save_analysis
from experiments.compression.controlled import controlled, parameter_count
from experiments.compression.fill_memory import fill_memory
from experiments.compression.observed import Images, Observed
from experiments.compression.report import baseline, extra_report
from experiments.data.image_folder import broken_log, image_folder, skipped
from experiments.data.photographs import photographs
from experiments.data.stream import ImageData, test_batches, train_batches
from experiments.harness import devices
from experiments.harness.config import RunConfig
from experiments.harness.errors import ExperimentError
from experiments.harness.loop.classification import Prepare, classification_loss
from experiments.harness.loop.step import Batch
from experiments.harness.main import run
from experiments.harness.task import Task
from experiments.models.classifiers import MODELS
from experiments.models.compressed import Compressed, compressed_classifier
from memjax import compress


@dataclass(frozen=True, kw_only=True)
class CompressedConfig(RunConfig):
    """The network, its images and how they are compressed."""

    model: Literal["alexnet", "vgg16", "resnet18", "resnet50"] = "resnet18"
    """As published. Those without batch norms want --clip 1, VGG-16 a --learning-rate of 0.02."""
    width: float = 1.0
    """All channels times this."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of computation; parameters, statistics and logits are float32."""
    compress: bool = True
    """Whether activations are compressed at all."""
    where: Literal["conv", "all"] = "conv"
    """conv: what convolutions read, as the paper does. all: everything else that is saved, too, in `rest_bits` bits."""
    rest_bits: Literal[4, 8] = 4
    """Bits of each value that no convolution reads, its levels evenly spaced from the least to the largest of its channel."""
    rest_samples: int | None = 8192
    """So many of each channel's values are measured for the least and the largest; None: all, for errors with a bound."""
    smallest: int = 4096
    """Arrays of fewer values, of a device's batch, are left alone: codes of small ones take long for what they save."""
    sigma: float = 0.01
    """Standard deviation allowed for the errors of gradients, as a share of the momentum."""
    coefficient: float | None = None
    """Use the paper's simplified equation 6 with this a (0.32 there). Default: the whole sum, without a coefficient."""
    coarsest: float = 1.0
    """Widest step of a quantiser, in mean magnitudes of what it encodes; inf for errors that --sigma alone limits."""
    interval: int = 1000
    """Steps between changes of the bounds, from the first change on; before it they change at steps 1, 2, 4, ..."""
    bound: float = 2**-7
    """Error bound of all layers to begin with."""
    bits_per_value: float | None = None
    """Capacity of all layers to begin with. Default: that which cannot overflow."""
    window: int = 100
    """Steps whose needs decide about smaller capacities."""
    baseline: tuple[str, ...] = ()
    """Names of other runs, without compression or with another --sigma, to compare with in the report."""
    fill_memory: float | None = None
    """Instead of training: the largest batches that fit in so many GiB per device, and their speed on a GPU."""
    label_smoothing: float = 0.0
    """Share of each target spread over all classes, in training."""
    data: Literal["photographs", "folder"] = "photographs"
    """photographs: crops of those in scikit-image and scikit-learn. folder: an ImageNet-style tree."""
    data_dir: Path | None = None
    """The tree: train/CLASS/* and val/CLASS/*."""
    skip_broken: bool = False
    """Count and skip files that cannot be read as images, instead of stopping with an error."""
    image_size: int = 64
    """Side in pixels of what the network sees."""
    crop_size: int = 64
    """Side in pixels of the crops of photographs, which are enlarged to --image-size."""

    experiment: ClassVar[str] = "compressed-training"
    may_be_infinite: ClassVar[tuple[str, ...]] = ("coarsest",)
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *RunConfig.fixed_by_checkpoint,
        *("model", "width", "compress", "where", "rest_bits", "smallest", "data", "image_size", "crop_size"),
    )

    def validate(self) -> None:
        super().validate()
        for name in ("width", "sigma", "coarsest", "bound", "window", "interval"):
            if getattr(self, name) <= 0:
                raise ExperimentError(f"--{name.replace('_', '-')} must be positive, got {getattr(self, name)}")
        if self.smallest < 0:
            raise ExperimentError(f"--smallest must be at least 0, got {self.smallest}")
        for name in ("coefficient", "bits_per_value", "fill_memory", "rest_samples"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ExperimentError(f"--{name.replace('_', '-')} must be positive, got {getattr(self, name)}")
        if not 8 <= self.crop_size <= 96:
            raise ExperimentError(f"--crop-size must be from 8 to 96, got {self.crop_size}: some photographs are small")
        if self.data == "photographs" and self.crop_size > self.image_size:
            raise ExperimentError(f"--crop-size {self.crop_size} must be at most --image-size {self.image_size}")
        if self.data == "photographs" and (self.skip_broken or self.data_dir is not None):
            raise ExperimentError("--skip-broken and --data-dir are for --data folder, which is missing")
        if not 0 <= self.label_smoothing < 1:
            raise ExperimentError(f"--label-smoothing must be in [0, 1), got {self.label_smoothing}")
        if self.image_size > 4096:
            raise ExperimentError(f"--image-size must be at most 4096, got {self.image_size}")
        if self.image_size < 64:
            raise ExperimentError(f"--image-size must be at least 64 for these networks, got {self.image_size}")
        for name in self.baseline:
            baseline(self, name)  # now, and not after the training


PRESETS = {
    "cpu": CompressedConfig(
        preset="cpu",
        width=0.25,
        epochs=4,
        batch_size=32,
        learning_rate=0.02,
        schedule="cosine",
        window=40,
        interval=100,
    ),
    "gpu": CompressedConfig(
        preset="gpu",
        model="resnet50",
        dtype="bfloat16",
        image_size=224,
        epochs=80,
        batch_size=256,
        learning_rate=0.05,
        warmup=0.1,
        schedule="cosine",
        interval=100,
        log_every=4,
        checkpoint_every=400,  # an epoch is eight steps
    ),
}


def make_task(config: CompressedConfig) -> Task:
    data = _data(config)
    stream = {"batch_size": config.batch_size, "workers": config.workers if config.data == "folder" else 0}
    make_model = functools.partial(_model, config, len(data.classes))
    losses = [
        classification_loss(mean=data.mean, std=data.std, label_smoothing=smoothing, size=config.image_size)
        for smoothing in (config.label_smoothing, 0.0)
    ]
    images = _images(config)
    observed = Observed(config.window, images) if config.compress else None
    chosen = functools.partial(make_model, config.compress)
    # bfloat16 rounds gradients by more than compression changes them; errors are looked at in float32.
    exact = functools.partial(_compressed, dataclasses.replace(config, dtype="float32"), len(data.classes))
    return Task(
        make_model=chosen,
        loss=losses[0],
        test_loss=losses[1],
        train_batches=train_batches(data, seed=config.seed, **stream),
        test_batches=functools.partial(test_batches, data, **stream),
        batch=_batch(config),
        train_examples=len(data.train),
        by_device=True,
        optimizer=functools.partial(controlled, config) if config.compress else None,
        scale_gradient=compress.scale_gradient,
        count_parameters=parameter_count,
        compile_step=observed.compile_step if observed else None,
        settle=observed.settle if observed else lambda state: state,
        observe=observed.observe if observed else lambda state: {},
        finish=functools.partial(save_analysis, config.folder, exact, losses[0], lambda: _batches(config, data), images)
        if config.compress
        else lambda state: None,
    )


def facts(config: CompressedConfig) -> dict[str, str]:
    """What only this experiment has to report."""
    return skipped(config.folder) if config.skip_broken else {}


def _batches(config: CompressedConfig, data: ImageData) -> Iterator[Batch]:
    """Some, for `save_analysis`."""
    size = min(64, _device_batch(config))  # in float32, with room for whatever codes need
    return itertools.islice(train_batches(data, seed=config.seed + 1, batch_size=size, workers=0), 8)


def _images(config: CompressedConfig) -> Images:
    count, size = _device_batch(config), _batch(config)["image"].shape[1]
    return Images(values=count * config.image_size**2 * 3, nbytes=count * size**2 * 3)


def _device_batch(config: CompressedConfig) -> int:
    """Examples whose activations one device encodes at a time."""
    return max(1, config.batch_size // (config.accumulate * devices.data_mesh().size))


def _batch(config: CompressedConfig) -> dict[str, jax.ShapeDtypeStruct]:
    count, size = config.batch_size, config.crop_size if config.data == "photographs" else config.image_size
    return {
        "image": jax.ShapeDtypeStruct((count, size, size, 3), jnp.uint8),
        "label": jax.ShapeDtypeStruct((count,), jnp.int32),
    }


def _data(config: CompressedConfig) -> ImageData:
    if config.data == "photographs":
        return photographs(config.crop_size)
    log = broken_log(config.folder) if config.skip_broken else None
    return image_folder(config.data_dir, image_size=config.image_size, broken_log=log)


def _model(config: CompressedConfig, classes: int, is_compressed: bool) -> nnx.Module:
    return _compressed(config, classes) if is_compressed else _network(config, classes)


def _network(config: CompressedConfig, classes: int) -> nnx.Module:
    size = {"image_size": config.image_size, "width": config.width}
    return MODELS[config.model](classes, **size, dtype=jnp.dtype(config.dtype), rngs=nnx.Rngs(config.seed))


def _compressed(config: CompressedConfig, classes: int) -> Compressed:
    image = _batch(config)["image"]
    return compressed_classifier(
        functools.partial(_network, config, classes),
        jax.ShapeDtypeStruct((_device_batch(config), *image.shape[1:]), image.dtype),
        Prepare(mean=(0.5,) * 3, std=(0.25,) * 3, size=config.image_size),  # of which only sizes matter here
        rest=compress.ChannelQuantized(config.rest_bits, config.rest_samples) if config.where == "all" else None,
        bound=config.bound,
        bits_per_value=config.bits_per_value,
        smallest=config.smallest,
    )


def _instead(config: CompressedConfig, console) -> bool:
    if config.fill_memory is None:
        return False
    fill_memory(config, functools.partial(_model, classes=16), console)
    return True


if __name__ == "__main__":
    sys.exit(run(PRESETS, make_task, description=__doc__, facts=facts, extra_report=extra_report, instead=_instead))
