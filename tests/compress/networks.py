"""Small convolutional networks as functions, NNX and Linen modules, for tests of `compressed`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from memjax.compress import Cast

SHAPE = (8, 16, 16, 16)
SIZE = 8 * 16 * 16 * 16
EXACT = Cast(jnp.float32)  # changes nothing, so that gradients must not either


def images(seed=5):
    return jnp.asarray(np.random.default_rng(seed).normal(size=SHAPE), jnp.float32)


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def batch_norm(x, scale, bias):
    mean = jnp.mean(x, (0, 1, 2))
    var = jnp.mean(jnp.square(x), (0, 1, 2)) - jnp.square(mean)
    return (x - mean) * (lax.rsqrt(var + 1e-5) * scale) + bias


def parameters(layers=3):
    rng = np.random.default_rng(0)
    draw = lambda: jnp.asarray(0.1 * rng.normal(size=(3, 3, 16, 16)), jnp.float32)
    return [{"w": draw(), "scale": jnp.ones(16), "bias": jnp.zeros(16)} for _ in range(layers)]


def network(params, x):
    for layer in params:
        x = jax.nn.relu(batch_norm(conv(x, layer["w"]), layer["scale"], layer["bias"]))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def loss_of(f):
    return lambda params, x: jnp.mean(jnp.sin(f(params, x)))


def scoped(x, w):
    """Two layers, each in a named scope."""
    with jax.named_scope("encoder"):
        with jax.named_scope("first"):
            x = jnp.tanh(conv(jnp.sin(x), w))
        with jax.named_scope("second"):
            x = jnp.tanh(conv(x, w))
    return x


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(16, 16, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.relu(self.norm(self.conv(x))))


class NNXNetwork(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NNXBlock(rngs) for _ in range(2)])

    def __call__(self, x, scale=1.0):
        for block in self.blocks:
            x = block(x)
        return nnx.max_pool(x, (2, 2), (2, 2)) * scale


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        y = nn.Conv(16, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=not train)(y))
        return x + nn.Dropout(0.1, deterministic=not train)(y)


class LinenNetwork(nn.Module):
    wrap: object = None

    @nn.compact
    def __call__(self, x, train: bool):
        for _ in range(2):
            block = LinenBlock()
            x = (block if self.wrap is None else self.wrap(block))(x, train)
        return nn.max_pool(x, (2, 2), (2, 2))


def errors(got, want):
    """Relative errors, leaf by leaf."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return [float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-12)) for a, b in pairs]
