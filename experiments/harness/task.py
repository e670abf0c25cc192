"""What an experiment gives the harness to train."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grain
import jax
import numpy as np
import optax
from flax import nnx

from experiments.harness.step import Loss, TrainState


@dataclass(frozen=True)
class Task:
    """A model, its losses and its data.

    Attributes:
      make_model: the model to train.
      loss: of training batches; its "loss" per "count" is minimised.
      test_loss: of test batches.
      train_batches: this host's batches, without end.
      test_batches: starts one pass over this host's test data, in batches of the same shapes.
      batch: shapes and dtypes of a batch of all hosts together.
      train_examples: how many there are, on all hosts.
      compare: by name, the models whose training memory is reported: this run's, and alternatives to it.
      by_device: whether each device computes its gradient by itself: see `train_step`.
      optimizer: of a training of so many steps; None: as the flags say.
      compile_step: makes of a step `(state, batch) -> (state, sums)` and options of `jax.jit` what trains; None: `jax.jit`.
      settle: the state, once nothing that trains may still take it back; called before it is
        observed, tested or saved.
      observe: more to be recorded, from the state after a step.
      finish: called with the last state of a complete training.
    """

    make_model: Callable[[], nnx.Module]
    loss: Loss
    test_loss: Loss
    train_batches: grain.DatasetIterator
    test_batches: Callable[[], Iterator[dict[str, np.ndarray]]]
    batch: dict[str, jax.ShapeDtypeStruct]
    train_examples: int
    compare: Mapping[str, Callable[[], nnx.Module]]
    by_device: bool = False
    optimizer: Callable[[int], optax.GradientTransformation] | None = None
    compile_step: Callable[..., Callable] | None = None
    settle: Callable[[TrainState], TrainState] = lambda state: state
    observe: Callable[[TrainState], dict[str, Any]] = lambda state: {}
    finish: Callable[[TrainState], None] = lambda state: None
