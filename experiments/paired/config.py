"""The flags of trainings side by side, and what the harness trains for them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import grain
import jax
import numpy as np
import optax
from flax import nnx

from experiments.harness.config import RunConfig
from experiments.harness.errors import ExperimentError
from experiments.harness.loop.optimizer import learning_rate
from experiments.harness.loop.step import Batch, Loss, TrainState
from experiments.harness.task import Task
from experiments.models.blocks import BlocksConfig
from experiments.paired import analysis
from experiments.paired.fitted import FittedTraining, sigma_gradient
from experiments.paired.members import PLAIN, Members, members_loss, members_optimizer
from memjax import compress

_ANALYSED = 16  # batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedConfig(RunConfig):
    """The Transformer, and which trainings of it go side by side."""

    dim: int = 96
    """Width of the residual stream."""
    layers: int = 4
    heads: int = 4
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the computation. Parameters are float32."""
    bits: tuple[int, ...] = (8, 4)
    """Bits per value, 8, 6, 4 or 3, of the trainings with compressed activations, beside the plain one."""
    sigma: float | None = None
    """Train another, with bits for each array with which gradients are off by at most so much, relative to themselves."""
    choose_every: int = 1000
    """Steps after which its bits are chosen again."""
    seeds: int = 1
    """Trainings of each kind, with parameters and batches of their own; all are one program."""
    test_batches: int = 8
    """Batches of a test, at most."""

    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *RunConfig.fixed_by_checkpoint,
        *("dim", "layers", "heads", "bits", "sigma", "seeds"),
    )

    def validate(self) -> None:
        super().validate()
        for name in ("dim", "layers", "heads", "choose_every", "seeds", "test_batches"):
            if getattr(self, name) < 1:
                raise ExperimentError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        for bits in self.bits:
            if bits not in (8, 6, 4, 3):
                raise ExperimentError(f"--bits must be of 8, 6, 4 and 3, got {bits}")
        if len(set(self.bits)) < len(self.bits):
            raise ExperimentError(f"--bits must differ from each other, got {' '.join(map(str, self.bits))}")
        if self.sigma is not None and not 0 < self.sigma < 1:
            raise ExperimentError(f"--sigma must be between 0 and 1, got {self.sigma}")
        if self.optimizer != "adamw":
            raise ExperimentError(f"--optimizer must be adamw here, got {self.optimizer}")
        try:
            self.blocks()
        except ValueError as error:
            raise ExperimentError(f"--{error}") from error

    def blocks(self) -> BlocksConfig:
        return BlocksConfig(self.dim, self.layers, self.heads, self.dtype)

    @property
    def kinds(self) -> tuple[float, ...]:
        return (PLAIN, *self.bits, *([] if self.sigma is None else [self.sigma]))


def paired_task(
    config: PairedConfig,
    make: Callable[[Any, BlocksConfig], nnx.Module],
    loss: Loss,
    train_batches: Callable[[int, int], grain.DatasetIterator],
    test_batches: Callable[[int], Iterator[dict[str, np.ndarray]]],
    batch: Callable[[int], dict[str, jax.ShapeDtypeStruct]],
    train_examples: int,
    positions: int,
) -> Task:
    """What the harness trains: all members at once.

    Args:
      make: the model of a seed and sizes.
      loss: of one model.
      train_batches, test_batches, batch: of so many examples; of a seed, those of training.
      train_examples: how many there are. A member sees each once in an epoch.
      positions: of an example, inside the blocks.
    """
    size = config.seeds * config.batch_size
    # bfloat16 rounds gradients by more than compression changes them; errors are looked at in float32.
    exact = dataclasses.replace(config.blocks(), dtype="float32")

    def first_member(state: TrainState, batch: Batch) -> tuple[nnx.State, Batch]:
        """Parameters and the batch of the first seed of the training with `--sigma`, the last kind."""
        params = jax.tree.map(lambda stacked: stacked[0], state.params["models"][len(config.kinds) - 1])
        return params, jax.tree.map(lambda x: x[: config.batch_size], batch)

    def tx(total_steps: int) -> optax.GradientTransformation:
        inner = optax.adamw(learning_rate(config, total_steps), weight_decay=config.weight_decay)
        return members_optimizer(inner, 1.0 if config.clip is None else config.clip, config.seeds * len(config.kinds))

    fitted = None
    if config.sigma is not None:
        one = sigma_gradient(lambda: make(0, config.blocks()), loss, config.sigma)
        controller = compress.BitsController(one, config.sigma, parts=config.layers, every=config.choose_every)
        fitted = FittedTraining(controller, first_member, config.folder / "bits.json")
    of_blocks = (lambda: ()) if fitted is None else fitted.bits

    def finish(state: TrainState) -> None:
        own = jax.tree.map(lambda stacked: stacked[0], state.params["models"][0])  # the first seed of the plain ones
        some = train_batches(config.batch_size, config.seed + 2**20)
        batches = list(map(_on_device, itertools.islice(some, _ANALYSED)))
        rows = analysis.errors(lambda: make(0, exact), own, loss, config.kinds, batches)
        x = jax.ShapeDtypeStruct((config.batch_size, positions, config.dim), config.dtype)
        kept = analysis.kept_bytes(lambda: make(0, config.blocks()), config.kinds, x, of_blocks())
        analysis.save(config.folder, rows, kept)

    return Task(
        make_model=lambda: Members(lambda seed: make(seed, config.blocks()), config.kinds, config.seeds, config.seed),
        loss=members_loss(loss, together=False, of_blocks=of_blocks),
        test_loss=members_loss(loss, together=True),
        train_batches=train_batches(size, config.seed),
        test_batches=lambda: itertools.islice(test_batches(size), config.test_batches),
        batch=batch(size),
        train_examples=train_examples,
        optimizer=tx,
        compile_step=None if fitted is None else fitted.compile_step,
        finish=finish,
    )


def _on_device(batch: dict[str, np.ndarray]) -> Batch:
    return jax.tree.map(jax.numpy.asarray, batch)
