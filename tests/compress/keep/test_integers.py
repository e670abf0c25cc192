"""What follows from integers is computed again, if that is cheap and they are smaller."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax import compressed
from memjax._residuals import residuals
from memjax.compress import Cast, ErrorBounded
from tests.compress.networks import conv


def kept_bytes(f, x, *integers):
    """Residual bytes of the gradient by `x`, of integers that nothing else keeps: inputs would not count."""
    made_before = lambda x, *integers: f(x, *[own + 1 for own in integers])
    return residuals(jax.jit(jax.grad(made_before)).trace(x, *integers).jaxpr).device.nbytes


@pytest.mark.parametrize("inputs", [True, False])
def test_what_follows_from_integers_is_computed_again(inputs):
    """Images that are bytes, resized, and classes: gradients of their weights are exact, and nothing large is kept."""
    mean = jnp.array([0.4, 0.5, 0.6])

    def f(params, pixels, labels):
        x = (pixels.astype(jnp.float32) / 255 - mean) / jnp.array([0.2, 0.3, 0.2])
        x = jax.image.resize(x, (4, 48, 48, 3), "linear").astype(jnp.bfloat16)
        mix = (jax.nn.one_hot(labels, 100) - 0.5) ** 2 @ params["classes"]
        return jnp.sum(conv(x, params["conv"]).astype(jnp.float32) * 3) + jnp.sum(mix)

    key = jax.random.key(0)
    pixels = jax.random.randint(key, (4, 24, 24, 3), 0, 256, jnp.uint8)
    labels = jax.random.randint(key, (300,), 0, 100, jnp.int16)
    params = {"conv": jnp.ones((3, 3, 3, 8), jnp.bfloat16), "classes": jnp.ones((100, 5))}
    g = compressed(f, ErrorBounded(0.5, bits_per_value=12), inputs=inputs)
    for own, wanted in zip(
        *(jax.tree.leaves(jax.jit(jax.grad(h))(params, pixels, labels)) for h in (g, f)), strict=True
    ):
        np.testing.assert_allclose(own, wanted, rtol=1e-2)  # of bfloat16s
    # From these 55,296 and 120,000 bytes follow.
    assert kept_bytes(g, params, pixels, labels) <= pixels.nbytes + labels.nbytes + 1000


def test_layers_of_a_network_of_integers_are_not_computed_again():
    def f(weights, pixels):
        x = pixels.astype(jnp.float32) / 255
        for w in weights:
            x = jax.nn.relu(x @ w)
        return jnp.sum(x**2)

    args = [jnp.eye(16)] * 4, jnp.ones((1024, 16), jnp.uint8)
    products = [
        str(jax.jit(jax.grad(g)).trace(*args).jaxpr).count("dot_general") for g in (f, compressed(f, Cast(jnp.float32)))
    ]
    assert products[0] == products[1]
    got, want = (jax.device_get(jax.jit(jax.grad(g))(*args)) for g in (compressed(f, Cast(jnp.float32)), f))
    chex.assert_trees_all_close(got, want, rtol=1e-5)


def test_integers_that_are_larger_than_what_follows_are_not_kept():
    def f(w, ids):
        return jnp.sum(w * jnp.sum(ids, 1).astype(jnp.float32)) ** 2

    ids, w = jnp.ones((5000, 64), jnp.int32), jnp.ones(5000)
    g = compressed(f, Cast(jnp.float32))
    assert kept_bytes(g, w, ids) < ids.nbytes / 4
    np.testing.assert_allclose(*(jax.jit(jax.grad(h))(w, ids) for h in (g, f)), rtol=1e-6)


def test_masks_of_integers_are_packed_if_that_is_smaller():
    def f(x, ids):
        return jnp.sum(jnp.where(jnp.concatenate([ids > 0, ids > 1]), jnp.sin(x), x))

    ids, x = jnp.arange(8192, dtype=jnp.int8) % 3, jnp.linspace(-1, 1, 16384)
    g = compressed(f, Cast(jnp.float32))
    assert kept_bytes(g, x, ids) <= kept_bytes(f, x, ids) - 16384 * 7 // 8
    np.testing.assert_allclose(*(jax.jit(jax.grad(h))(x, ids) for h in (g, f)), rtol=1e-6)
