"""The Llama decoder: every recipe's gradients against a plain model in float64, its bytes, and compressed layer inputs."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from experiments.models import llama
from experiments.models.recipe import parse

SMALL = llama.LlamaConfig(24, 16, 3, 4, 2, 4, 24, tied=True, dtype="float64", rope_base=100.0)
EXACT = [
    *(
        "checkpoint",
        "slots=2",
        "budget=1MiB",
        "tiled+plain",
        "tiled=7+checkpoint",
        "groups+plain",
        "groups=1+checkpoint",
    ),
    *("tiled+slots=1", "tiled+groups+plain", "tiled=5+groups+slots=2", "tiled=5+groups=2+budget=min"),
]


def tokens(length=13, examples=2):
    text = jax.random.randint(jax.random.key(1), (examples, length + 1), 0, SMALL.vocabulary)
    return text[:, :-1], text[:, 1:]


def plain(config, params, tokens, labels):
    """The same decoder in a few lines, with all attention and all logits."""
    x, where = params["embed"][tokens], jnp.arange(tokens.shape[1])
    norm = lambda x, scale: x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    half = config.head_dim // 2
    turn = jnp.exp(1j * where[:, None] * config.rope_base ** (-jnp.arange(half) / half))[:, None]
    for i in range(config.layers):
        p = jax.tree.map(lambda a, i=i: a[i], params["layers"])
        h = norm(x, p["attention_norm"])
        q, k, v = (jnp.tensordot(h, p[name], 1) for name in ("query", "key", "value"))
        pairs = lambda a: (a[..., :half] + 1j * a[..., half:]) * turn
        q, k = (jnp.concatenate([pairs(a).real, pairs(a).imag], -1) for a in (q, k))
        k, v = (jnp.repeat(a, config.heads // config.kv_heads, 2) for a in (k, v))
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(config.head_dim)
        weights = jax.nn.softmax(jnp.where(where[:, None] >= where, logits, -jnp.inf), -1)
        x = x + jnp.tensordot(jnp.einsum("bnts,bsnh->btnh", weights, v), p["out"], 2)
        h = norm(x, p["mlp_norm"])
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    logits = norm(x, params["norm"]) @ params.get("head", params["embed"]).T
    return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


@functools.cache
def expected(tied):
    config = dataclasses.replace(SMALL, tied=tied)
    params = llama.init(config, jax.random.key(0))
    params = jax.tree.map(lambda a: a + 0.1 * jnp.sin(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), params)
    return config, params, jax.jit(jax.value_and_grad(functools.partial(plain, config)))(params, *tokens())


@pytest.mark.parametrize("recipe", ["plain", *EXACT])
def test_every_recipe_has_the_plain_gradients(x64, recipe):
    with jax.numpy_dtype_promotion("standard"):
        config, params, wanted = expected(True)
    found = jax.jit(jax.value_and_grad(functools.partial(llama.loss, config, parse(recipe))))(params, *tokens())
    chex.assert_trees_all_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_an_untied_head(x64):
    with jax.numpy_dtype_promotion("standard"):
        config, params, wanted = expected(False)
    loss = functools.partial(llama.loss, config, parse("tiled=4+groups+slots=2"))
    chex.assert_trees_all_close(jax.jit(jax.value_and_grad(loss))(params, *tokens()), wanted, rtol=1e-10, atol=1e-10)
