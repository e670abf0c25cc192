"""Training steps of layers in a scan, and their state, for tests of state on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import memjax
from memjax import compress

LAYERS, WIDTH = 6, 64
OPTIMIZERS = {
    "float32": optax.adamw(1e-2),
    "masters and codes": compress.split_master(memjax.compressed(optax.adamw(1e-2))),
}


def layer(x, p):
    return x + jnp.tanh(x @ p["up"]) @ p["down"], None


def step_of(tx, *, moves):
    def step(params, state, x):
        gradients = jax.grad(lambda p: jnp.mean(jax.lax.scan(layer, x, p)[0].astype(jnp.float32) ** 2))(params)
        if moves:
            state = jax.device_put(state, jax.memory.Space.Device)
        updates, state = tx.update(gradients, state, params)
        if moves:
            state = jax.device_put(state, jax.memory.Space.Host)
        return optax.apply_updates(params, updates), state

    return step


def begin(tx, dtype):
    rng = np.random.default_rng(0)
    of = lambda *shape: jax.device_put(np.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), dtype))
    params = {"up": of(LAYERS, WIDTH, 2 * WIDTH), "down": of(LAYERS, 2 * WIDTH, WIDTH)}
    return params, jax.jit(tx.init)(params), of(32, WIDTH)
