"""Steps of a Transformer spread over a ring of devices by one of several parallelisms, on a text."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import memjax
from experiments.harness import devices
from experiments.harness.devices import Layout
from experiments.harness.loop.optimizer import optimizer
from experiments.harness.loop.step import Batch, Loss, Sums, TrainState, init_state, train_step
from experiments.harness.reports import memory
from experiments.models.transformer import Transformer, sharded_loss, shardings


def model_of(config, parallelism: str) -> Transformer:
    return Transformer(config.transformer(parallelism), rngs=nnx.Rngs(config.seed))


def layout(mesh: Mesh) -> Layout:
    """Sequences over the axis "data" of the mesh, weights over its axis "ring"."""
    batch = NamedSharding(mesh, PartitionSpec("data"))
    return Layout(mesh, batch, state=lambda shapes: shardings(shapes, mesh))


def make_loss(mesh: Mesh) -> Loss:
    """The cross-entropy of the next byte, in nats, of batches of `text`, (B, length + 1) uint8."""

    def sums(model: nnx.Module, batch: Batch) -> Sums:
        assert isinstance(model, Transformer)
        text = batch["text"].astype(jnp.int32)
        tokens, labels = text[:, :-1], text[:, 1:]
        return {"loss": sharded_loss(model, mesh, tokens, labels), "count": jnp.float32(labels.size)}

    return sums


def variants(config, parallelism: str) -> list:
    """The configurations that the setting auto stands for, the fastest first."""
    if config.spend != "auto":
        return [config]
    spent = ("memory", "time") if parallelism == "metp" else ("time",)
    return [dataclasses.replace(config, spend=one) for one in spent]


class Trial:
    """A model with its optimizer, sharded, and its compiled step.

    Args:
      config: a `MetpConfig`; its `spend` is "memory" or "time".
      parallelism: how the model is spread.
      length: bytes of a sequence.
    """

    def __init__(self, config, parallelism: str, length: int):
        self.config, self.length = config, length
        mesh = config.mesh()
        make_model = functools.partial(model_of, config, parallelism)
        rule = optimizer(config, max(config.steps, 1))
        init = functools.partial(init_state, make_model, rule)
        shapes = jax.eval_shape(init)
        state_at = shardings(shapes, mesh)
        self._make = jax.jit(init, out_shardings=state_at)
        self._batch_at = layout(mesh).batch
        text = jax.ShapeDtypeStruct((config.batch_size, length + 1), jnp.uint8)
        self._shapes = {"text": text}
        jitted = jax.jit(
            train_step(make_model, make_loss(mesh), rule, 1),
            donate_argnums=0,
            out_shardings=(state_at, devices.replicated(mesh)),
        )
        lowered = jitted.lower(memory.placed(shapes, state_at), memory.placed(self._shapes, self._batch_at))
        self._step = lowered.compile(compiler_options={**memjax.remat_compiler_options()})

    @classmethod
    def fitting(cls, config, parallelism: str, length: int, limit: float = math.inf) -> "Trial":
        """The fastest of the `variants` that takes no more memory than a device has, or `limit`; if none does, the smallest."""
        for variant in variants(config, parallelism):
            trial = cls(variant, parallelism, length)
            if devices.fits(trial._step, limit):
                break
        return trial

    @property
    def bytes(self) -> int:
        """Bytes of a step on each device."""
        return devices.step_bytes(self._step)

    def start(self) -> TrainState:
        """The first state, complete: simulated devices could wait for ever in the collectives of two programs at once."""
        return jax.block_until_ready(self._make())

    def batch(self, text: np.ndarray, step: int) -> dict[str, jax.Array]:
        """Windows cut at random, the same on every host, each of which takes its part."""
        starts = np.random.default_rng((self.config.seed, step)).integers(
            len(text) - self.length - 1, size=self.config.batch_size
        )
        whole = np.stack([text[s : s + self.length + 1] for s in starts])
        return devices.put({"text": whole}, self._batch_at, self._shapes)

    def step(self, state: TrainState, batch: dict[str, jax.Array]) -> TrainState:
        """The state after the step, which is complete."""
        return jax.block_until_ready(self._step(state, batch))[0]
