"""Chains for tests: residual MLPs, unequal convolutions, transformers; and the oracle, the blocks one after the other."""

import jax
import jax.numpy as jnp
import numpy as np


def plain(blocks, params, x):
    for f, p in zip(blocks, params, strict=True):
        x = f(p, x)
    return x


def _normal(seed, *shape, dtype=None):
    return jax.device_put(np.asarray(np.random.default_rng(seed).normal(size=shape) * 0.3, dtype or float))


def mlp(p, x):
    return x + jax.nn.gelu(x @ p["up"] + p["inner"]) @ p["down"] + p["outer"]


def mlps(count=6, width=8, batch=4, dtype=None):
    """Equal blocks."""
    params = [
        {
            "up": _normal(i, width, 4 * width, dtype=dtype),
            "inner": _normal(i + 2, 4 * width, dtype=dtype),
            "down": _normal(i + 1, 4 * width, width, dtype=dtype),
            "outer": _normal(i + 3, width, dtype=dtype),
        }
        for i in range(count)
    ]
    return [mlp] * count, params, _normal(99, batch, width, dtype=dtype)


def convolution(p, x):
    stride = 2 if p["kernel"].shape[-1] == 2 * x.shape[-1] else 1
    y = jax.lax.conv_general_dilated(
        x, p["kernel"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    y = (y - y.mean((0, 1, 2))) * jax.lax.rsqrt(y.var((0, 1, 2)) + 1e-3)
    return jax.nn.relu(y * p["scale"] + p["bias"])


def convolutions(widths=(4, 4, 8, 8, 8, 16), size=8, batch=2):
    """Unequal blocks: half the resolution wherever the width doubles."""
    params, channels = [], 3
    for i, width in enumerate(widths):
        params.append({"kernel": _normal(i, 3, 3, channels, width), "scale": jnp.ones(width), "bias": jnp.zeros(width)})
        channels = width
    return [convolution] * len(widths), params, _normal(99, batch, size, size, 3)


def _normalised(x, scale):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale


def transformer_block(p, x):
    batch, length, _ = x.shape
    q, k, v = (a.reshape(batch, length, 4, -1) for a in jnp.split(_normalised(x, p["scale1"]) @ p["qkv"], 3, -1))
    scores = jnp.einsum("bthc,bshc->bhts", q, k) / np.sqrt(q.shape[-1]).astype(x.dtype)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, jnp.asarray(-1e9, x.dtype))
    mixed = jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(scores), v).reshape(x.shape)
    x = x + mixed @ p["out"]
    return x + jax.nn.gelu(_normalised(x, p["scale2"]) @ p["up"]) @ p["down"]


def transformers(count=6, width=16, length=16, batch=2):
    """A token embedding, equal blocks, and the loss as the last block."""

    def embed(p, tokens):
        return p[tokens]

    def loss(p, x):
        return (jax.nn.logsumexp(x @ p, axis=-1) ** 2).mean()

    def block(seed):
        return {
            "scale1": jnp.ones(width),
            "scale2": jnp.ones(width),
            "qkv": _normal(seed, width, 3 * width),
            "out": _normal(seed + 1, width, width),
            "up": _normal(seed + 2, width, 4 * width),
            "down": _normal(seed + 3, 4 * width, width),
        }

    blocks = [embed, *[transformer_block] * count, loss]
    params = [_normal(7, 32, width), *(block(10 * i) for i in range(count)), _normal(8, width, 32)]
    tokens = np.random.default_rng(0).integers(32, size=(batch, length), dtype=np.int32)
    return blocks, params, jax.device_put(tokens)


def close(got, want, tolerance=1e-12):
    """Equal to within `tolerance` of the largest element of each leaf."""

    def check(a, b):
        if jnp.issubdtype(b.dtype, jnp.inexact):
            scale = float(np.max(np.abs(b), initial=0.0)) or 1.0
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)
        else:
            np.testing.assert_array_equal(a, b)

    jax.tree.map(check, *jax.device_get((got, want)))
