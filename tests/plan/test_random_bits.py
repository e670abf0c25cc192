"""Random bits need a key alone: a compiler may make those of all layers before the first one runs."""

import jax
import jax.numpy as jnp

import memjax

LAYERS, WIDTH, BATCH = 6, 64, 512


def dropped(key: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def loss(params: list[tuple[jax.Array, jax.Array]], x: jax.Array, key: jax.Array) -> jax.Array:
    for i, (up, down) in enumerate(params):
        x = x + dropped(jax.random.fold_in(key, 2 * i), jax.nn.gelu(x @ up)) @ down
        x = dropped(jax.random.fold_in(key, 2 * i + 1), x)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return jnp.mean(x * x)


def test_those_of_a_layer_are_made_when_it_runs() -> None:
    params = [(jnp.ones((WIDTH, WIDTH)), jnp.ones((WIDTH, WIDTH)))] * LAYERS
    args = params, jnp.ones((BATCH, WIDTH)), jax.random.key(0)
    step = lambda *args: jax.grad(loss)(*args)
    plain = memjax.jit(step, budget="1TiB").plan(*args).nbytes
    plan = memjax.jit(step, budget=int(0.4 * plain)).plan(*args)
    assert plan.nbytes <= 0.4 * plain
    assert plan.seconds <= 1.15 * plan.plain_seconds
