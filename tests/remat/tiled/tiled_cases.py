"""A feed-forward layer on short sequences, and results compared."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

EXAMPLES, LENGTH, DIM = 2, 13, 8


def normal(seed, *shape, scale=1.0):
    return jax.device_put(np.random.default_rng(seed).normal(size=shape) * scale)


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def feed_forward(p, x):
    h = norm(x, p["scale"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def parameters(dim=DIM, hidden=16):
    shapes = {"scale": (dim,), "gate": (dim, hidden), "up": (dim, hidden), "down": (hidden, dim)}
    return {name: normal(i, *shape, scale=shape[0] ** -0.5) for i, (name, shape) in enumerate(shapes.items())}


def gradients(f, *args):
    def loss(*args):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(f(*args)))

    return jax.jit(jax.grad(loss, tuple(range(len(args)))))(*args)


def close(actual, expected):
    chex.assert_trees_all_close(*jax.device_get((actual, expected)), rtol=1e-10, atol=1e-10)
