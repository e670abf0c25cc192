"""Trainings side by side, as one: the same model plain and with compressed blocks, from several seeds.

A member is a training of its own: a kind and a seed. A kind is a number: plain, so many bits, or, below 1, a sigma, with bits for
each array. Members of the same seed start from the same parameters and see the same batches, so that only compression tells them
apart. Parameters of a kind's seeds are stacked, and `jax.vmap` trains them together.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import memjax
from experiments.harness.loop.step import Batch, Loss, Sums

PLAIN = 0
"""The number of bits that stands for no compression."""


def kind_name(kind: float) -> str:
    if is_sigma(kind):
        return f"sigma {kind:g}"
    return "plain" if kind == PLAIN else f"{kind} bits"


def is_sigma(kind: float) -> bool:
    """Whether the kind is the error that gradients may have, and no number of bits."""
    return PLAIN < kind < 1


def with_bits(model: Any, kind: float, of_blocks: Sequence[Any] = ()) -> Any:
    """The model, its blocks compressed. Parameters keep their paths.

    Args:
      model: with a list `blocks`.
      kind: which training it is for.
      of_blocks: bits for each array of each block, if the kind is a sigma; none: it stays as it is.
    """
    bits: Sequence[Any] = of_blocks if is_sigma(kind) else [] if kind == PLAIN else [kind] * len(model.blocks)
    if bits:
        pairs = zip(model.blocks, bits, strict=True)
        model.blocks = nnx.List([memjax.compressed(block, bits=own) for block, own in pairs])
    return model


class Members(nnx.Module):
    """All members. Each parameter has a leading axis of seeds.

    Args:
      make: the model of a seed.
      kinds: numbers of bits, `PLAIN` among them, or a sigma: `members_loss` knows its bits.
      seeds: how many there are of each kind.
      first: the first seed.
    """

    def __init__(self, make: Callable[[Any], nnx.Module], kinds: Sequence[float], seeds: int, first: int):
        self.kinds = tuple(kinds)
        self.seeds = seeds
        graphs = [nnx.graphdef(nnx.eval_shape(lambda bits=bits: with_bits(make(0), bits))) for bits in kinds]
        stacked = jax.vmap(lambda seed: nnx.state(make(jax.random.key(seed)), nnx.Param))(first + jnp.arange(seeds))
        self.models = nnx.List([nnx.merge(graph, stacked, copy=True) for graph in graphs])


def members_loss(loss: Loss, *, together: bool, of_blocks: Callable[[], Sequence[Any]] = lambda: ()) -> Loss:
    """For `Members`: the mean of a loss of one model; and the sum of each member as "kind, seed".

    Args:
      loss: of one model and its batch.
      together: whether all members read the whole batch, as in tests; else those of a seed read that seed's part of it.
      of_blocks: gives the bits of a sigma's blocks, when the loss is traced.
    """

    def sums(model: Any, batch: Batch) -> Sums:
        seeds = model.seeds
        parts = batch if together else jax.tree.map(lambda x: x.reshape(seeds, -1, *x.shape[1:]), batch)
        found: Sums = {}
        totals = []
        for bits, of_seeds in zip(model.kinds, model.models, strict=True):
            graph, params = nnx.split(of_seeds)
            own = of_blocks() if is_sigma(bits) else ()
            one = lambda params, part, graph=graph, kind=bits, own=own: loss(
                nnx.merge(graph, params) if not own else with_bits(nnx.merge(graph, params), kind, own), part
            )
            of_kind = jax.vmap(one, in_axes=(0, None if together else 0))(params, parts)
            totals.append(of_kind)
            found |= {f"{kind_name(bits)}, {seed}": of_kind["loss"][seed] for seed in range(seeds)}
        mean = jax.tree.map(lambda *of_kinds: jnp.mean(jnp.stack(of_kinds)), *totals)
        return found | mean

    return sums


def members_optimizer(inner: optax.GradientTransformation, clip: float, members: int) -> optax.GradientTransformation:
    """An elementwise optimizer for all members, each of whose gradients is clipped by itself.

    Args:
      inner: AdamW, or another whose updates of a number depend on that number's gradients alone.
      clip: the norm that a member's gradient is scaled down to first.
      members: how many there are; `members_loss` is their mean.
    """

    def clipped(updates: Any) -> Any:
        scaled = jax.tree_util.tree_leaves_with_path(jax.tree.map(lambda g: g * members, updates))
        squares: dict[Any, Any] = {}
        for path, leaf in scaled:  # ("models", i, ...): (seeds, ...)
            wide = leaf.astype(jnp.float32).reshape(len(leaf), -1)
            squares[path[1]] = squares.get(path[1], 0) + jnp.sum(wide**2, -1)
        factor = {kind: jnp.minimum(1, clip / jnp.sqrt(square)) for kind, square in squares.items()}
        new = [leaf * factor[path[1]].astype(leaf.dtype).reshape(-1, *[1] * (leaf.ndim - 1)) for path, leaf in scaled]
        return jax.tree.unflatten(jax.tree.structure(updates), new)

    return optax.chain(optax.stateless(lambda updates, params: clipped(updates)), inner)
