"""The five ways of spreading a Transformer over the "ring" axis of a mesh, as local functions inside `jax.shard_map`.

| name | tokens | attention | feed-forward |
|---|---|---|---|
| metp | a part, zigzag | keys and values travel | weights travel |
| tp | all | some heads | some columns, outputs added up |
| tp_sp | a part outside the matmuls | gathered, some heads | gathered, some columns, outputs scattered |
| ulysses | a part | tokens exchanged for heads | weights gathered |
| ring | a part, zigzag | keys and values travel | weights gathered |

Weights are sharded in the same way by all: columns of what widens, rows of what narrows, entries of the vocabulary. Where
tokens are spread and a weight is needed whole it is gathered, in both passes: never kept.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

import memjax
from memjax.shard import baselines

Parallelism = Literal["none", "metp", "tp", "tp_sp", "ulysses", "ring"]
NAMES: tuple[Parallelism, ...] = ("metp", "tp", "tp_sp", "ulysses", "ring")
AXIS = "ring"
Array = jax.Array
_MLP: dict[str, Callable[..., Array]] = {
    "metp": memjax.shard.metp_mlp,
    "tp": baselines.tensor_parallel_mlp,
    "tp_sp": baselines.sequence_parallel_mlp,
    "ulysses": baselines.gathered_mlp,
    "ring": baselines.gathered_mlp,
}


def layout(parallelism: str) -> str:
    """How tokens lie on the ring."""
    return "zigzag" if parallelism in ("metp", "ring") else "contiguous"


def tokens_spec(parallelism: str) -> PartitionSpec:
    """How an array (batch, tokens) is sharded."""
    return PartitionSpec("data", None if parallelism == "tp" else AXIS)


def weight_spec(path: tuple[str, ...], ndim: int) -> PartitionSpec:
    """How the parameter with this path in a `Transformer` is sharded."""
    if ndim < 2:
        return PartitionSpec()
    rows = path[-1] == "embedding" or path[-2] in ("out", "down")
    return PartitionSpec(AXIS, None) if rows else PartitionSpec(None, AXIS)


def attend(
    parallelism: str,
    x: Array,
    weights: tuple[Array, Array, Array, Array],
    head_dim: int,
    rotate: Callable[[Array, Array], Array],
    head_chunks: int,
) -> Array:
    """Causal attention with this device's columns of the query, key and value weights and rows of the output's."""
    *inputs, out = weights
    if parallelism == "tp_sp":
        x = baselines.gathered_tokens(x, AXIS)
    heads = (_product(parallelism, x, w, 1) for w in inputs)
    q, k, v = (a.reshape(*a.shape[:2], -1, head_dim) for a in heads)
    if parallelism in ("tp", "tp_sp"):
        where = jnp.arange(x.shape[1], dtype=jnp.int32)
    else:
        size, rank = lax.axis_size(AXIS), lax.axis_index(AXIS)
        where = memjax.shard.positions(x.shape[1], rank, size, layout(parallelism))
    q, k = rotate(q, where), rotate(k, where)
    if parallelism in ("tp", "tp_sp"):
        mixed = baselines.attention(q, k, v, causal=True)
    elif parallelism == "ulysses":
        mixed = baselines.ulysses_attention(q, k, v, axis_name=AXIS, causal=True)
    else:
        groups = math.gcd(k.shape[2], head_chunks) if parallelism == "metp" else 1
        mixed = memjax.shard.metp_attention(q, k, v, axis_name=AXIS, causal=True, head_chunks=groups)
    o = _product(parallelism, mixed.reshape(*x.shape[:2], -1), out, 0)
    if parallelism == "tp":
        return lax.psum(o, AXIS)
    return baselines.scattered(o, AXIS) if parallelism == "tp_sp" else o


def mlp(parallelism: str, x: Array, gate: Array, up: Array, down: Array, recompute: bool) -> Array:
    """SwiGLU."""
    f = partial(_MLP[parallelism], activation=jax.nn.silu, axis_name=AXIS)
    if parallelism == "metp":
        f = partial(f, recompute=recompute)
    call = lambda x, gate, up, down: f(x, up, down, w_gate=gate)
    # What gathers, gathers again in the backward pass; METP saves no more than this by itself.
    return (jax.checkpoint(call) if parallelism in ("ulysses", "ring") else call)(x, gate, up, down)


def embed(parallelism: str, tokens: Array, table: Array) -> Array:
    """Rows of a table of which this device holds V / p, as a product: bytes are few and often the same, so a gather's transpose
    would have all rows added to a few places, one after another, and rounded each time."""
    one_hot = lambda tokens, table: jax.nn.one_hot(tokens, table.shape[0], dtype=table.dtype)
    rows = lambda tokens, table: jnp.matmul(one_hot(tokens, table), table, precision="highest")  # exact
    if parallelism != "tp":
        return jax.checkpoint(lambda table: rows(tokens, baselines.gathered_weight(table, AXIS, 0)))(table)
    return lax.psum(jax.checkpoint(rows)(tokens - lax.axis_index(AXIS) * table.shape[0], table), AXIS)


def loss(parallelism: str, x: Array, table: Array, labels: Array) -> Array:
    """The sum of the cross-entropies of all tokens, the same on all devices."""
    if parallelism == "tp":
        total = memjax.linear_cross_entropy(x, table, labels, axis_name=AXIS, reduction="sum")
    else:
        total = memjax.shard.vocab_cross_entropy(x, table, labels, axis_name=AXIS, reduction="sum")
    return lax.psum(total, "data")


def _product(parallelism: str, x: Array, w: Array, axis: int) -> Array:
    if parallelism in ("tp", "tp_sp"):
        return x @ w
    return jax.checkpoint(lambda x, w: x @ baselines.gathered_weight(w, AXIS, axis))(x, w)
