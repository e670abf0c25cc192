"""Transformers of pre-norm blocks with GELU: GPT (Radford et al. 2019) on bytes, and ViT (Dosovitskiy et al. 2021) on patches."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class BlocksConfig:
    """Sizes of a stack of blocks.

    Raises:
      ValueError: heads that do not divide.
    """

    dim: int
    layers: int
    heads: int
    dtype: str = "float32"
    """The dtype of the computation. Parameters and logits are float32."""

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"dim must be a multiple of heads = {self.heads}, got {self.dim}")


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: BlocksConfig, *, causal: bool, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        linear = lambda inputs, outputs, scale: nnx.Linear(
            inputs, outputs, dtype=dtype, kernel_init=nnx.initializers.normal(scale * inputs**-0.5), rngs=rngs
        )
        norm = lambda: nnx.LayerNorm(config.dim, dtype=dtype, rngs=rngs)
        depth = (2 * config.layers) ** -0.5  # of what is added to the residual stream
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.qkv = linear(config.dim, 3 * config.dim, 1)
        self.out = linear(config.dim, config.dim, depth)
        self.up = linear(config.dim, 4 * config.dim, 1)
        self.down = linear(4 * config.dim, config.dim, depth)
        self._heads, self._causal = config.heads, causal

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, T, dim) -> (B, T, dim)."""
        heads = lambda a: a.reshape(*a.shape[:-1], self._heads, -1)
        q, k, v = map(heads, jnp.split(self.qkv(self.attention_norm(x)), 3, -1))
        with jax.numpy_dtype_promotion("standard"):  # it mixes bfloat16 with float32
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=self._causal)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class GPT(nnx.Module):
    """Tokens to logits."""

    def __init__(self, config: BlocksConfig, *, vocabulary: int, length: int, rngs: nnx.Rngs):
        dtype, init = jnp.dtype(config.dtype), nnx.initializers.normal(0.02)
        # Read in float32: its gradient adds up many tokens of few kinds, which GPUs do slowly, and roughly, in bfloat16.
        self.tokens = nnx.Embed(vocabulary, config.dim, embedding_init=init, rngs=rngs)
        self.positions = nnx.Param(init(rngs.params(), (length, config.dim)))
        self.blocks = nnx.List([Block(config, causal=True, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.dim, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(config.dim, vocabulary, use_bias=False, dtype=dtype, rngs=rngs)
        self._dtype = dtype

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(B, T) int32 -> (B, T, vocabulary) float32."""
        x = self.tokens(tokens).astype(self._dtype)
        x = x + self.positions[...][: x.shape[1]].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


class ViT(nnx.Module):
    """Images to logits, by the mean of all patches."""

    def __init__(self, config: BlocksConfig, *, classes: int, image_size: int, patch: int, rngs: nnx.Rngs):
        dtype, init = jnp.dtype(config.dtype), nnx.initializers.normal(0.02)
        self.patches = nnx.Linear(3 * patch**2, config.dim, dtype=dtype, rngs=rngs)
        self.positions = nnx.Param(init(rngs.params(), ((image_size // patch) ** 2, config.dim)))
        self.blocks = nnx.List([Block(config, causal=False, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.dim, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(config.dim, classes, dtype=dtype, rngs=rngs)
        self._patch = patch

    def __call__(self, images: jax.Array) -> jax.Array:
        """(B, H, W, 3) floats -> (B, classes) float32."""
        b, h, w, c = images.shape
        p = self._patch
        cut = images.reshape(b, h // p, p, w // p, p, c).transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, p * p * c)
        x = self.patches(cut)
        x = x + self.positions[...].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1)).astype(jnp.float32)
