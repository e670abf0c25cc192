"""A decoder of the Llama family: RMSNorm before each part, rotary positions, grouped-query attention, SwiGLU.

On one device or data parallel as it is. With a `parallelism` the same parameters are sharded over the "ring" axis of a mesh
("data", "ring"): `sharded_loss` runs the model inside `jax.shard_map`, and `shardings` says where parameters lie.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import memjax
from experiments.models import parallel
from experiments.models.parallel import Parallelism


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a `Transformer`.

    Raises:
      ValueError: heads that do not divide.
    """

    vocabulary: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    """Each shared by heads / kv_heads query heads."""
    hidden: int
    """Width of the feed-forward layers."""
    rope_base: float = 10_000.0
    """Wavelength, in tokens over 2 pi, of the slowest rotation."""
    dtype: str = "float32"
    """Dtype of computation; parameters are float32."""
    parallelism: Parallelism = "none"
    """How tokens and weights lie over the "ring" axis; "none" outside of `sharded_loss`."""
    head_chunks: int = 8
    """Groups of heads, at most, that METP's attention takes in turn, so that what travels stays small beside what is kept."""
    recompute: bool = True
    """Whether METP's feed-forward layers multiply again in the backward pass; False for where memory is to spare."""

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim: expected a multiple of 2 heads = {2 * self.heads}, got {self.dim}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads = {self.heads}, got {self.kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class Transformer(nnx.Module):
    """Tokens to the activations before the head, which is the embedding itself: the loss multiplies by it."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(
            config.vocabulary,
            config.dim,
            dtype=jnp.dtype(config.dtype),
            embedding_init=nnx.initializers.normal(config.dim**-0.5),
            rngs=rngs,
        )
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config.dim)
        self._scale, self._parallelism = config.dim**0.5, config.parallelism

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(B, T) int32 -> (B, T, dim)."""
        name = self._parallelism
        x = self.embed(tokens) if name == "none" else parallel.embed(name, tokens, self.head)
        x = x * jnp.asarray(self._scale, self.embed.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    @property
    def head(self) -> jax.Array:
        """(vocabulary, dim), in the dtype of the activations."""
        return self.embed.embedding[...].astype(self.embed.dtype)


class Layer(nnx.Module):
    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.dim)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nnx.Module):
    """Causal, with rotated queries and keys."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        linear = _linear(config, rngs)
        self.query = linear(config.dim, config.dim)
        self.key = linear(config.dim, config.kv_heads * config.head_dim)
        self.value = linear(config.dim, config.kv_heads * config.head_dim)
        self.out = linear(config.dim, config.dim)
        self._head_dim, self._rope_base = config.head_dim, config.rope_base
        self._parallelism, self._head_chunks = config.parallelism, config.head_chunks

    def __call__(self, x: jax.Array) -> jax.Array:
        if self._parallelism != "none":
            weights = _kernel(self.query, x), _kernel(self.key, x), _kernel(self.value, x), _kernel(self.out, x)
            turned = lambda a, where: rotate(a, self._rope_base, where)
            return parallel.attend(self._parallelism, x, weights, self._head_dim, turned, self._head_chunks)
        heads = lambda a: a.reshape(*a.shape[:-1], -1, self._head_dim)
        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        q, k = rotate(q, self._rope_base), rotate(k, self._rope_base)
        # It mixes bfloat16 with float32, which strict dtype promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.reshape(x.shape))


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2)), times a learned scale, in float32."""

    def __init__(self, dim: int):
        self.scale = nnx.Param(jnp.ones((dim,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return _normalised(x, self.scale[...])


@jax.checkpoint  # only x is kept, not what is float32
def _normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return (wide * inverse * scale).astype(x.dtype)


class SwiGLU(nnx.Module):
    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        linear = _linear(config, rngs)
        self.gate = linear(config.dim, config.hidden)
        self.up = linear(config.dim, config.hidden)
        self.down = linear(config.hidden, config.dim)
        self._parallelism, self._recompute = config.parallelism, config.recompute

    def __call__(self, x: jax.Array) -> jax.Array:
        if self._parallelism != "none":
            weights = _kernel(self.gate, x), _kernel(self.up, x), _kernel(self.down, x)
            return parallel.mlp(self._parallelism, x, *weights, self._recompute)
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def rotate(x: jax.Array, base: float, positions: jax.Array | None = None) -> jax.Array:
    """Rotary positions (Su et al. 2021): pairs of features of (B, T, heads, head_dim) turned by angles that grow with
    the position, (T,) or 0 to T - 1, so that products of queries and keys depend on its difference."""
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    where = jnp.arange(x.shape[1], dtype=jnp.int32) if positions is None else positions
    angles = where.astype(jnp.float32)[:, None] * frequencies
    sin, cos = jnp.sin(angles)[:, None].astype(x.dtype), jnp.cos(angles)[:, None].astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def _linear(config: TransformerConfig, rngs: nnx.Rngs) -> Callable[[int, int], nnx.Linear]:
    return lambda inputs, outputs: nnx.Linear(inputs, outputs, use_bias=False, dtype=jnp.dtype(config.dtype), rngs=rngs)


def _kernel(linear: nnx.Linear, x: jax.Array) -> jax.Array:
    return linear.kernel[...].astype(x.dtype)


def sharded_loss(model: Transformer, mesh: Mesh, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    """The sum of the cross-entropies of all tokens; parameters, tokens and labels sharded over a mesh ("data", "ring").

    Args:
      model: with a `parallelism`; its parameters are whole arrays, sharded as `shardings` says.
      tokens, labels: (B, S) int32, in their own order.
    """
    name = model._parallelism
    if parallel.layout(name) == "zigzag":
        size = mesh.shape[parallel.AXIS]
        tokens, labels = memjax.shard.zigzag(tokens, size), memjax.shard.zigzag(labels, size)
    graph, params = nnx.split(model)
    where = parallel.tokens_spec(name)

    def local(params: nnx.State, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        return parallel.loss(name, model(tokens), model.head, labels)

    in_specs = (_specs(params), where, where)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec())(params, tokens, labels)


def shardings(tree: object, mesh: Mesh) -> object:
    """`NamedSharding`s for a tree of parameters, or of anything with parameters in it, such as optimizer states."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), _specs(tree), is_leaf=lambda a: isinstance(a, PartitionSpec)
    )


def _specs(tree: object) -> object:
    def spec(path: tuple, leaf: jax.Array) -> PartitionSpec:
        names = tuple(str(getattr(key, "key", getattr(key, "name", ""))) for key in path)
        return parallel.weight_spec(tuple(n for n in names if n not in ("", "value")), leaf.ndim)

    return jax.tree_util.tree_map_with_path(spec, tree)
