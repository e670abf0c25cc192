"""`remat.scan` against `jax.lax.scan`: values, gradients of every order, and the whole contract."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from memjax.remat import scan

H = 3
WAYS = [
    {"slots": 1, "strategy": "hidden"},
    {"slots": 4, "strategy": "hidden"},
    {"slots": 3, "strategy": "internal"},
    {"slots": 9, "strategy": "mixed"},
    {"budget": 400},  # a table of single steps
    {"budget": 1000},
    {"budget": "2KiB"},  # nested loops
    {"budget": "1MiB"},  # everything is kept
]


def arguments(length):
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"w": jax.random.normal(keys[0], (H, H)), "u": jax.random.normal(keys[1], (H, H))}
    return params, jax.random.normal(keys[2], (2, H)), jax.random.normal(keys[3], (length, 2, H))


def loss(scan, params, h, xs, **options):
    def cell(carry, x):
        h = jnp.tanh(carry["h"] @ params["w"] + x @ params["u"])
        return {"h": h, "n": carry["n"] + 1}, {"y": jnp.sin(h) * x, "n": carry["n"]}

    carry, ys = scan(cell, {"h": h, "n": 0}, xs, **options)
    return (carry["h"] ** 2).sum() + (ys["y"] ** 3).sum()


def close(got, want, tolerance=1e-12):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 23])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gradients(way, length, reverse):
    values = arguments(length)

    def gradient(scan, **options):
        run = functools.partial(loss, scan, reverse=reverse, **options)
        return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2)))(*values)

    close(gradient(scan, **way), gradient(lax.scan))
