"""What an experiment gives the harness to train."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grain
import jax
import numpy as np
import optax
from flax import nnx

from experiments.harness import devices
from experiments.harness.devices import Layout
from experiments.harness.loop.step import Loss, TrainState, parameter_count, scaled


@dataclass(frozen=True)
class Task:
    """A model, its losses and its data.

    Attributes:
      make_model: makes the model to train.
      smaller_models: make the same model, with the same parameters, to train in less memory; the first whose step fits on the
        devices is trained, or else the last.
      loss: loss of training batches; its "loss" per "count" is minimised.
      train_batches: batches without end. Each host gives its part of every batch, or each gives whole batches.
      batch: shapes and dtypes of a batch of all hosts together.
      train_examples: number of training examples on all hosts.
      steps: optimizer steps to train for; None: as `--epochs` says.
      test_loss: loss of test batches.
      test_batches: starts one pass over the test data, in batches like those of training; None: nothing is tested.
      compare: by name, the models whose training memory is reported: this run's, and alternatives to it; empty: no table.
      layout: where the state and batches lie; by default the batch is split over all devices.
      by_device: whether each device computes its gradient by itself: see `train_step`.
      optimizer: makes the optimizer, from the number of steps; None: as the flags say.
      scale_gradient: multiplies a gradient by a number.
      count_parameters: counts the numbers that are trained.
      compile_step: makes the function that trains from a step `(state, batch) -> (state, sums)` and options of `jax.jit`;
        None: `jax.jit` does.
      settle: gives the state once nothing that trains may still take it back; called before it is
        observed, tested or saved.
      observe: gives more to be recorded, from the state after a step.
      finish: called with the last state of a complete training.
    """

    make_model: Callable[[], nnx.Module]
    loss: Loss
    train_batches: grain.DatasetIterator
    batch: dict[str, jax.ShapeDtypeStruct]
    train_examples: int
    smaller_models: Sequence[Callable[[], nnx.Module]] = ()
    steps: int | None = None
    test_loss: Loss | None = None
    test_batches: Callable[[], Iterator[dict[str, np.ndarray]]] | None = None
    compare: Mapping[str, Callable[[], nnx.Module]] = field(default_factory=dict)
    layout: Layout = field(default_factory=lambda: devices.data_parallel(devices.data_mesh()))
    by_device: bool = False
    optimizer: Callable[[int], optax.GradientTransformation] | None = None
    scale_gradient: Callable[[nnx.State, jax.Array], nnx.State] = scaled
    count_parameters: Callable[[nnx.State], int] = parameter_count
    compile_step: Callable[..., Callable] | None = None
    settle: Callable[[TrainState], TrainState] = lambda state: state
    observe: Callable[[TrainState], dict[str, Any]] = lambda state: {}
    finish: Callable[[TrainState], None] = lambda state: None
