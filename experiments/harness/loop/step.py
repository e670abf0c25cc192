"""One training step and one evaluation step of an NNX model, as pure functions of a state and a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]


class Loss(Protocol):
    """Sums over the batch's examples, float32 scalars: "loss" and "count", and what else is to be recorded.

    Divided by "count" they are means; so micro-batches, devices and padded batches add up exactly.
    """

    def __call__(self, model: nnx.Module, batch: Batch) -> Sums: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that changes while training."""

    step: jax.Array
    """() int32, optimizer steps done."""
    params: nnx.State
    """nnx.Param variables."""
    rest: nnx.State
    """Running statistics, dropout keys."""
    optimizer: optax.OptState


def init_state(make_model: Callable[[], nnx.Module], optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step; to be called under `jax.jit` or `jax.eval_shape`."""
    _, params, rest = nnx.split(make_model(), nnx.Param, ...)  # type: ignore[misc]
    return TrainState(jnp.zeros((), jnp.int32), params, rest, optimizer.init(params))


def scaled(gradients: nnx.State, factor: jax.Array) -> nnx.State:
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)


def train_step(
    make_model: Callable[[], nnx.Module],
    loss: Loss,
    optimizer: optax.GradientTransformation,
    accumulate: int,
    mesh: Mesh | None = None,
    scale: Callable[[nnx.State, jax.Array], nnx.State] = scaled,
) -> Callable[[TrainState, Batch], tuple[TrainState, Sums]]:
    """A function `(state, batch) -> (state, sums)`.

    The batch is taken apart into `accumulate` micro-batches, each with its own batch statistics; the gradient
    of the summed loss is added up over them and divided by the total count, by `scale(gradients, 1 / count)`. With a `mesh`
    each device computes the gradient of its part of the batch by itself, with its own batch statistics, instead of letting
    the compiler spread one program.
    """
    graph = _graph(make_model, train=True)

    def summed_loss(params, rest, batch):
        model = nnx.merge(graph, params, rest, copy=True)
        sums = loss(model, batch)
        _, _, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
        return sums["loss"], (rest, sums)

    gradient = jax.grad(summed_loss, has_aux=True)
    if mesh is not None:
        gradient = _by_device(gradient, mesh)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        if accumulate == 1:
            gradients, (rest, sums) = gradient(state.params, state.rest, batch)
        else:

            def micro_step(carry, micro_batch):
                gradients, rest, sums = carry
                more, (rest, more_sums) = gradient(state.params, rest, micro_batch)
                return (
                    jax.tree.map(jnp.add, gradients, more),
                    rest,
                    jax.tree.map(jnp.add, sums, more_sums),
                ), None

            micro_batches = _micro_batches(batch, accumulate)
            first = jax.tree.map(lambda x: x[0], micro_batches)
            _, (_, shapes) = jax.eval_shape(gradient, state.params, state.rest, first)
            no_gradients = jax.tree.map(jnp.zeros_like, state.params)
            no_sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            start = (no_gradients, state.rest, no_sums)
            (gradients, rest, sums), _ = jax.lax.scan(micro_step, start, micro_batches)
        gradients = scale(gradients, 1 / sums["count"])
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam mixes its integer count with floats
            updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, rest, optimizer_state), sums

    return step


def _by_device(gradient: Callable, mesh: Mesh) -> Callable:
    def local(params, rest, batch):
        # Parameters are shared, so that their gradients come added up.
        gradients, (rest, sums) = gradient(params, rest, batch)
        mean = lambda x: jax.lax.pmean(x, "data") if "data" in jax.typeof(x).manual_axis_type.varying else x
        return gradients, (jax.tree.map(mean, rest), jax.lax.psum(sums, "data"))

    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())


def parameter_count(params: nnx.State) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def eval_step(make_model: Callable[[], nnx.Module], loss: Loss) -> Callable[[TrainState, Batch], Sums]:
    """A function `(state, batch) -> sums` that uses the running statistics and changes nothing."""
    graph = _graph(make_model, train=False)

    def step(state: TrainState, batch: Batch) -> Sums:
        return loss(nnx.merge(graph, state.params, state.rest), batch)

    return step


def _graph(make_model: Callable[[], nnx.Module], *, train: bool) -> nnx.GraphDef:
    """The model's structure without its arrays."""
    graph: list[nnx.GraphDef] = []

    def build():
        model = make_model()
        model.train() if train else model.eval()
        graph.append(nnx.graphdef(model))

    jax.eval_shape(build)
    return graph[0]


def _micro_batches(batch: Batch, accumulate: int) -> Batch:
    """(B, ...) -> (accumulate, B / accumulate, ...), strided, so that no example changes its device."""
    return {key: jnp.moveaxis(value.reshape(-1, accumulate, *value.shape[1:]), 1, 0) for key, value in batch.items()}
