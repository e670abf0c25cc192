"""Decoders in the shapes of Llama 3, for long sequences: the layers are one stack, and a recipe says what it keeps.

RMSNorm before each part, rotary positions, grouped-query attention, SwiGLU (Touvron et al. 2023; Grattafiori et al. 2024).
Parameters are a dict of arrays, those of layers with a leading layer axis.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

import memjax
from experiments.models.recipe import Recipe
from experiments.models.stack import run_stack
from memjax.remat import attention_in_groups, tiled

Params = dict[str, Any]
Array = jax.Array
_ROWS = 32  # queries whose products with all keys `blockwise` holds
_COLUMNS = 256  # of the embedding's gradient that are added up at a time


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a decoder."""

    vocabulary: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    """Each shared by heads / kv_heads query heads."""
    head_dim: int
    hidden: int
    """Width of the feed-forward layers."""
    tied: bool
    """Whether the head is the embedding."""
    rope_base: float = 500_000.0
    dtype: str = "bfloat16"
    """The dtype of parameters and computation; norms and rotations are computed in float32 or wider."""
    kernel: Literal["auto", "fused", "blockwise"] = "auto"
    """Which attention runs. fused: cuDNN where the program is compiled for a GPU, and cuDNN takes the dtype. blockwise: plain
    JAX, a few queries at a time. auto: fused on a machine with a GPU."""


SHAPES = {
    "tiny": LlamaConfig(256, 64, 8, 4, 2, 16, 256, tied=True),
    "1B": LlamaConfig(128_256, 2048, 16, 32, 8, 64, 8192, tied=True),
    "3B": LlamaConfig(128_256, 3072, 28, 24, 8, 128, 8192, tied=True),
    "8B": LlamaConfig(128_256, 4096, 32, 32, 8, 128, 14336, tied=False),
}


class Llama(nnx.Module):
    """The parameters as a module, for training loops of modules."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.params = nnx.data(jax.tree.map(nnx.Param, init(config, rngs.params())))

    def arrays(self) -> Params:
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))["params"]


def init(config: LlamaConfig, key: Array) -> Params:
    """Normal, scaled by the inverse root of the number of inputs."""
    n, d, f = config.layers, config.dim, config.hidden
    heads, kv_heads = (config.heads, config.head_dim), (config.kv_heads, config.head_dim)
    keys = iter(jax.random.split(key, 9))
    dtype = jnp.dtype(config.dtype)

    def normal(inputs: int, *shape: int) -> Array:
        return (jax.random.normal(next(keys), shape) * inputs**-0.5).astype(dtype)

    params = {
        "embed": normal(d, config.vocabulary, d),
        "norm": jnp.ones(d, dtype),
        "layers": {
            "attention_norm": jnp.ones((n, d), dtype),
            "query": normal(d, n, d, *heads),
            "key": normal(d, n, d, *kv_heads),
            "value": normal(d, n, d, *kv_heads),
            "out": normal(config.heads * config.head_dim, n, *heads, d),
            "mlp_norm": jnp.ones((n, d), dtype),
            "gate": normal(d, n, d, f),
            "up": normal(d, n, d, f),
            "down": normal(f, n, f, d),
        },
    }
    return params if config.tied else {**params, "head": normal(d, config.vocabulary, d)}


def loss(
    config: LlamaConfig,
    recipe: Recipe,
    params: Params,
    tokens: Array,
    labels: Array,
    axis_name: str | None = None,
    **options: Any,
) -> Any:
    """The sum of the cross-entropies of `labels`, (B, T), after `tokens`; `options` are those of `linear_cross_entropy`.

    With `axis_name`, inside `jax.shard_map`: devices form a ring and hold parts of the sequence in zigzag order, and of the
    parameters what `shards` says. The sum is that of all devices.
    """
    x = hidden(config, recipe, params, tokens, axis_name)
    name = "embed" if config.tied else "head"
    head = _gathered({name: params[name]}, axis_name)[name]
    total = memjax.linear_cross_entropy(x, head, labels, reduction="sum", **options)
    return total if axis_name is None else lax.psum(total, axis_name)


def hidden(config: LlamaConfig, recipe: Recipe, params: Params, tokens: Array, axis_name: str | None = None) -> Array:
    """(B, T) -> (B, T, D), what the head multiplies."""
    table = _gathered({"embed": params["embed"]}, axis_name)["embed"]
    x = _embedded(table, tokens) if recipe.tiled else table[tokens]
    x = run_stack(lambda p, x: layer(config, recipe, p, x, axis_name), recipe, params["layers"], x)
    return _tiled(recipe, normalised, (1, None))(x, params["norm"])


def layer(config: LlamaConfig, recipe: Recipe, p: Params, x: Array, axis_name: str | None = None) -> Array:
    """One layer of (B, T, D)."""
    p = _gathered(p, axis_name)
    return feed_forward(recipe, p, attention(config, recipe, p, x, axis_name))


# Which axis of a parameter of one layer, or of the embedding and the head, devices of a ring hold parts of: D, for all have it.
_SHARDED_AXIS = {"query": 0, "key": 0, "value": 0, "out": 2, "gate": 0, "up": 0, "down": 1, "embed": 1, "head": 1}


def shards(params: Params, axis_name: str) -> Params:
    """How `loss` over a ring wants the parameters, for `in_specs` of `jax.shard_map`."""

    def spec(path: Any, _: Any) -> PartitionSpec:
        names = [key.key for key in path]
        if names[-1] not in _SHARDED_AXIS:
            return PartitionSpec()
        axis = _SHARDED_AXIS[names[-1]] + ("layers" in names)
        return PartitionSpec(*[None] * axis, axis_name)

    return jax.tree_util.tree_map_with_path(spec, params)


def _gathered(p: Params, axis_name: str | None) -> Params:
    if axis_name is None:
        return p
    gather = lambda name: lax.all_gather(p[name], axis_name, axis=_SHARDED_AXIS[name], tiled=True)
    return {name: gather(name) if name in _SHARDED_AXIS else p[name] for name in p}


def attention(config: LlamaConfig, recipe: Recipe, p: Params, x: Array, axis_name: str | None = None) -> Array:
    """The first half of a layer, x added."""
    rotary = lambda a, where: rotated(a, where, config.rope_base)
    if axis_name is None:
        where, attend = jnp.arange(x.shape[1], dtype=jnp.int32), kernel(config)
    else:
        rank, size = lax.axis_index(axis_name), lax.axis_size(axis_name)
        where = memjax.shard.positions(x.shape[1], rank, size, "zigzag")
        attend = partial(memjax.shard.metp_attention, axis_name=axis_name, causal=True)
    if recipe.groups is not None:
        return attention_in_groups(
            *(x, p["query"], p["key"], p["value"], p["out"]),
            groups=recipe.groups or None,
            tile=recipe.tile,
            norm=lambda x: normalised(x, p["attention_norm"]),
            rotary=rotary,
            positions=where,
            attend=attend,
            keep_attention=recipe.keep_attention,
        )

    def project(p: Params, x: Array, where: Array) -> tuple[Array, ...]:
        h = normalised(x, p["attention_norm"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", h, p[name]) for name in ("query", "key", "value"))
        return rotary(q, where), rotary(k, where), v

    def outward(out: Array, x: Array, o: Array) -> Array:
        return x + jnp.einsum("btnh,nhd->btd", o, out)

    inputs = {name: p[name] for name in ("attention_norm", "query", "key", "value")}
    q, k, v = _tiled(recipe, project, (None, 1, 0))(inputs, x, where)
    return _tiled(recipe, outward, (None, 1, 1))(p["out"], x, attend(q, k, v))


def feed_forward(recipe: Recipe, p: Params, x: Array) -> Array:
    """The second half of a layer, x added."""

    def swiglu(p: Params, x: Array) -> Array:
        h = normalised(x, p["mlp_norm"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    return _tiled(recipe, swiglu, (None, 1))({name: p[name] for name in ("mlp_norm", "gate", "up", "down")}, x)


def _tiled(recipe: Recipe, f: Callable[..., Any], in_axes: Any) -> Callable[..., Any]:
    return tiled(f, in_axes, 1, tile=recipe.tile) if recipe.tiled else f


def kernel(config: LlamaConfig) -> Callable[[Array, Array, Array], Array]:
    """Causal attention of (B, T, N, H) to (B, T, K, H)."""
    if config.kernel == "blockwise" or (config.kernel == "auto" and jax.default_backend() != "gpu"):
        return blockwise
    return partial(memjax.shard.baselines.attention, causal=True)


def blockwise(q: Array, k: Array, v: Array) -> Array:
    """Causal attention in plain JAX: of the products of queries and keys a few rows exist at a time, in both passes."""

    def rows(k: Array, v: Array, q: Array, where: Array) -> Array:
        grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
        products = jnp.einsum("btkgh,bskh->bkgts", grouped, k) * jnp.asarray(q.shape[3] ** -0.5, q.dtype)
        seen = where[:, None] >= jnp.arange(k.shape[1], dtype=where.dtype)
        weights = jax.nn.softmax(jnp.where(seen, products.astype(_wide(q)), -jnp.inf), -1).astype(q.dtype)
        return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)

    # Rows do not depend on each other, so queries can be tiled, with keys and values that all tiles share.
    return tiled(rows, (None, None, 1, 0), 1, tile=_ROWS)(k, v, q, jnp.arange(q.shape[1], dtype=jnp.int32))


def normalised(x: Array, scale: Array) -> Array:
    """x / sqrt(mean(x^2)), times a learned scale."""
    wide = x.astype(_wide(x))
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def rotated(x: Array, positions: Array, base: float) -> Array:
    """Rotary positions (Su et al. 2021): pairs of features of (B, T, heads, H), turned by angles that grow with the position."""
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=_wide(x)) / half)
    angles = positions.astype(_wide(x))[:, None] * frequencies
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = jnp.split(x.astype(_wide(x)), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


@jax.custom_vjp
def _embedded(table: Array, tokens: Array) -> Array:
    """Rows of the table. Their gradient is added up in float32, or wider, for some columns at a time: all of them would take
    twice the table, and the cotangents in float32 twice what they are."""
    return table[tokens]


def _embedded_back(kept: tuple[Array, Array], dy: Array) -> tuple[Array, None]:
    table, tokens = kept
    dim = table.shape[1]
    width = next(w for w in range(min(_COLUMNS, dim), 0, -1) if dim % w == 0)

    def columns(d_table: Array, start: Array) -> tuple[Array, None]:
        dy_here = lax.dynamic_slice_in_dim(dy, start, width, 2).astype(_wide(dy))
        sums = jnp.zeros((table.shape[0], width), dy_here.dtype).at[tokens].add(dy_here)
        return lax.dynamic_update_slice_in_dim(d_table, sums.astype(d_table.dtype), start, 1), None

    starts = jnp.arange(0, dim, width, dtype=jnp.int32)
    return lax.scan(columns, jnp.zeros_like(table), starts)[0], None


_embedded.defvjp(lambda table, tokens: (table[tokens], (table, tokens)), _embedded_back)


def _wide(x: Array) -> Any:
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32
