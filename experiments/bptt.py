"""Backpropagation through time within a memory budget (Gruslys et al. 2016, arXiv 1606.03401).

    python experiments/bptt.py

Trains a byte-level LSTM language model on the source of Python's standard library, by sequences of 1,000 steps, and prints
what training keeps in memory beside `jax.lax.scan`. Longer ones:

    python experiments/bptt.py --length 10000 --batch-size 8 --budget 8MiB
"""

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.data.text import check_windows, standard_library, test_windows, train_windows, windows
from experiments.harness.config import RunConfig
from experiments.harness.errors import ExperimentError
from experiments.harness.main import run
from experiments.harness.storage import records
from experiments.harness.task import Task
from experiments.models.lstm import ByteLSTM


@dataclass(frozen=True, kw_only=True)
class BpttConfig(RunConfig):
    """The model and its sequences."""

    length: int = 1000
    """Steps that the gradient goes back through; bytes of a sequence."""
    features: int = 128
    """Width of the embedding and of the LSTM's state."""
    budget: str = "2MiB"
    """What may be kept between forward and backward pass, beyond inputs and parameters."""

    experiment: ClassVar[str] = "bptt"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (*RunConfig.fixed_by_checkpoint, "length", "features")

    def validate(self) -> None:
        super().validate()
        for name in ("length", "features"):
            if getattr(self, name) < 1:
                raise ExperimentError(f"--{name} must be at least 1, got {getattr(self, name)}")


_adamw = functools.partial(BpttConfig, optimizer="adamw", schedule="cosine", weight_decay=0.0)
PRESETS = {
    "cpu": _adamw(preset="cpu", epochs=0.3, batch_size=16, learning_rate=4e-3),
    "gpu": _adamw(
        preset="gpu", epochs=4, batch_size=64, learning_rate=2e-3, features=256, budget="32MiB", log_every=10
    ),
}


def make_task(config: BpttConfig) -> Task:
    text = standard_library()
    check_windows(text, config.length, config.batch_size)
    shape = {"length": config.length, "batch_size": config.batch_size}
    make_model = functools.partial(_model, config.features, config.seed)
    batch = {"text": jax.ShapeDtypeStruct((config.batch_size, config.length + 1), jnp.uint8)}
    _check_budget(functools.partial(make_model, config.budget), batch)
    return Task(
        make_model=functools.partial(make_model, config.budget),
        loss=_loss,
        test_loss=_loss,
        train_batches=train_windows(text, seed=config.seed, **shape),
        test_batches=functools.partial(test_windows, text, **shape),
        batch=batch,
        train_examples=windows(text.train, config.length),
        compare={
            f"remat.scan, {config.budget} (this run)": functools.partial(make_model, config.budget),
            "jax.lax.scan": functools.partial(make_model, None),
        },
    )


def facts(config: BpttConfig) -> dict[str, str]:
    """What only this experiment has to report."""
    test = records.read(config.folder / "metrics.jsonl", "test")
    return {"test bits per byte": f"{test[-1]['loss'] / math.log(2):.3f}"} if test else {}


def _model(features: int, seed: int, budget: str | None) -> nnx.Module:
    return ByteLSTM(features, budget=budget, rngs=nnx.Rngs(seed))


def _check_budget(make_model: Callable[[], nnx.Module], batch: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Raises ExperimentError if the scan cannot keep to its budget, which it says when it is differentiated."""

    def loss(text):
        graph, params = nnx.split(make_model())
        return jax.grad(lambda params: _loss(nnx.merge(graph, params), {"text": text})["loss"])(params)

    try:
        jax.eval_shape(loss, batch["text"])
    except (ValueError, TypeError) as error:
        raise ExperimentError(f"--budget: {error}") from error


def _loss(model: nnx.Module, batch):
    loss, right = model(batch["text"])
    return {
        "loss": jnp.sum(loss),
        "top1": jnp.sum(right),
        "count": jnp.float32(batch["text"].shape[0] * (batch["text"].shape[1] - 1)),
    }


if __name__ == "__main__":
    sys.exit(run(PRESETS, make_task, description=__doc__ or "", facts=facts))
