"""Random bits need a key alone: a compiler may make those of all layers before the first one runs."""

import re

import jax
import jax.numpy as jnp
import pytest

import memjax

LAYERS, WIDTH, BATCH = 4, 64, 512


def dropped(key: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def loss(params: list[tuple[jax.Array, jax.Array]], x: jax.Array, key: jax.Array) -> jax.Array:
    for i, (up, down) in enumerate(params):
        x = x + dropped(jax.random.fold_in(key, 2 * i), jax.nn.gelu(x @ up)) @ down
        x = dropped(jax.random.fold_in(key, 2 * i + 1), x)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return jnp.mean(x * x)


def before_norms(params: list[tuple[jax.Array, jax.Array]], x: jax.Array, key: jax.Array) -> jax.Array:
    for i, (up, down) in enumerate(params):
        h = jax.nn.gelu(x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) @ up)
        x = x + dropped(jax.random.fold_in(key, i), h) @ down
    return jnp.mean(x * x)


def test_those_of_a_layer_are_made_when_it_runs() -> None:
    params = [(jnp.ones((WIDTH, WIDTH)), jnp.ones((WIDTH, WIDTH)))] * LAYERS
    args = params, jnp.ones((BATCH, WIDTH)), jax.random.key(0)
    step = lambda *args: jax.grad(loss)(*args)
    plain = memjax.jit(step, budget="1TiB").plan(*args).nbytes
    plan = memjax.jit(step, budget=int(0.45 * plain), allow=("recompute",)).plan(*args)
    assert plan.nbytes <= 0.45 * plain
    assert plan.seconds <= 1.12 * plan.plain_seconds


def test_the_least_keeps_none_where_residual_sums_alone_are_kept() -> None:
    params = [(jnp.ones((WIDTH, 4 * WIDTH)), jnp.ones((4 * WIDTH, WIDTH)))] * 3
    args = params, jnp.ones((BATCH, WIDTH)), jax.random.key(0)
    step = lambda *args: jax.grad(before_norms)(*args)
    bits = BATCH * 4 * WIDTH * 4
    sums = (len(params) + 1) * BATCH * WIDTH * 4
    beside = 2 * sum(x.nbytes for x in jax.tree.leaves(params)) + args[1].nbytes
    least = memjax.jit(step, budget="min", allow=("recompute",)).plan(*args).nbytes
    assert least < beside + sums + 6 * bits
    refused = memjax.jit(step, budget=beside + sums + bits, allow=("recompute",))
    with pytest.raises(ValueError, match="least possible is") as error:
        refused.plan(*args)
    named = re.search(r"least possible is ([0-9.]+) MiB", str(error.value))
    assert named is not None
    assert float(named[1]) * 2**20 <= 1.05 * least
