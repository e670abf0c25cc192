"""Small networks that the tests of plans share."""

import jax
import jax.numpy as jnp

LAYERS, WIDTH, HIDDEN, ROWS = 5, 32, 128, 256


def layer(p, x):
    hidden = x @ p["up"]
    return x + jnp.tanh(hidden) * jax.nn.sigmoid(hidden) @ p["down"]


def parameters(dtype=jnp.float64, layers=LAYERS):
    keys = jax.random.split(jax.random.key(0), layers)
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    one = lambda key: {name: 0.1 * jax.random.normal(key, shape, dtype) for name, shape in shapes.items()}
    return [one(key) for key in keys]


def inputs(dtype=jnp.float64, rows=ROWS):
    return jax.random.normal(jax.random.key(1), (rows, WIDTH), dtype)


def stacked(params):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)


def unrolled_loss(params, x):
    for p in params:
        x = layer(p, x)
    return jnp.mean(x**2)


def scanned_loss(params, x):
    x, sums = jax.lax.scan(lambda x, p: (layer(p, x), jnp.sum(x)), x, params)
    return jnp.mean(x**2) + 1e-3 * jnp.sum(sums)
