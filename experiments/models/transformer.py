"""A decoder of the Llama family: RMSNorm before each part, rotary positions, grouped-query attention, SwiGLU."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


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
    """Of computation; parameters are float32."""

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
        self._scale = config.dim**0.5

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(B, T) int32 -> (B, T, dim)."""
        x = self.embed(tokens) * jnp.asarray(self._scale, self.embed.dtype)
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

    def __call__(self, x: jax.Array) -> jax.Array:
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
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
        return (wide * inverse * self.scale[...]).astype(x.dtype)


class SwiGLU(nnx.Module):
    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        linear = _linear(config, rngs)
        self.gate = linear(config.dim, config.hidden)
        self.up = linear(config.dim, config.hidden)
        self.down = linear(config.hidden, config.dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Rotary positions (Su et al. 2021): pairs of features of (B, T, heads, head_dim) turned by angles that grow with
    the position, so that products of queries and keys depend on its difference."""
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies
    sin, cos = jnp.sin(angles)[:, None].astype(x.dtype), jnp.cos(angles)[:, None].astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def _linear(config: TransformerConfig, rngs: nnx.Rngs) -> Callable[[int, int], nnx.Linear]:
    return lambda inputs, outputs: nnx.Linear(inputs, outputs, use_bias=False, dtype=jnp.dtype(config.dtype), rngs=rngs)
