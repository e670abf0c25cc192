"""Small networks that the tests of plans share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

LAYERS, WIDTH, HIDDEN, ROWS = 4, 32, 128, 256


def layer(p, x):
    hidden = x @ p["up"]
    return x + jnp.tanh(hidden) * jax.nn.sigmoid(hidden) @ p["down"]


def parameters(dtype=jnp.float64, layers=LAYERS):
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    one = lambda: {name: np.asarray(0.1 * rng.normal(size=shape), dtype) for name, shape in shapes.items()}
    return jax.device_put([one() for _ in range(layers)])


def inputs(dtype=jnp.float64, rows=ROWS):
    return jax.device_put(np.asarray(np.random.default_rng(1).normal(size=(rows, WIDTH)), dtype))


def stacked(params):
    return jax.device_put(jax.tree.map(lambda *leaves: np.stack(leaves), *params))


def unrolled_loss(params, x):
    for p in params:
        x = layer(p, x)
    return jnp.mean(x**2)


def scanned_loss(params, x):
    x, sums = jax.lax.scan(lambda x, p: (layer(p, x), jnp.sum(x)), x, params)
    return jnp.mean(x**2) + 1e-3 * jnp.sum(sums)


def resnet_parameters(width=8, blocks=1):
    rng = np.random.default_rng(0)
    kernel = lambda *shape: jax.device_put(np.asarray(0.2 * rng.normal(size=shape), jnp.float32))
    stages = [
        {"down": kernel(3, 3, before, after), "blocks": [[kernel(3, 3, after, after)] * 2 for _ in range(blocks)]}
        for before, after in ((3, width), (width, 2 * width))
    ]
    return stages


def images():
    return jax.device_put(np.asarray(np.random.default_rng(1).normal(size=(8, 32, 32, 3)), jnp.float32))


def resnet_loss(params, x):
    """Convolutions and norms over the batch, in residual blocks."""

    def convolved(x, kernel, stride=1):
        x = jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5)

    for number, stage in enumerate(params):
        x = jax.nn.relu(convolved(x, stage["down"], 1 + number))
        for first, second in stage["blocks"]:
            x = jax.nn.relu(x + convolved(jax.nn.relu(convolved(x, first)), second))
    return jnp.mean(x.mean((1, 2)) ** 2)


def on_host(plan):
    """The plan with all that its loops keep on the host."""
    kept = lambda stretch: tuple(one._replace(on_host=stretch.turns is not None) for one in stretch.kept)
    return dataclasses.replace(plan, stretches=tuple(one._replace(kept=kept(one)) for one in plan.stretches))
