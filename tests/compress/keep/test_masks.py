"""Masks are kept as bits, or follow from what is encoded."""

import jax
import jax.numpy as jnp
import numpy as np

from memjax import compressed
from memjax.compress import Cast, ErrorBounded
from tests.compress.kept import kept_of_sum, saved
from tests.compress.networks import conv, images


def test_masks_are_bits_unless_they_are_signs():
    x = jnp.ones((64, 64))
    relu = compressed(lambda x: jax.nn.relu(jnp.sin(x)), ErrorBounded(0.1, bits_per_value=4))
    # sin's derivative, cos, encoded, and the mask, as bits; no zeros. The argument is no part of it.
    assert ("bool", 4096) not in saved(relu, x)
    assert ("float32", 4096) not in saved(relu, x)[1:]
    assert kept_of_sum(relu, x) <= 4096 // 2 + 36 + 16 + 4096 // 8

    def square_of_relu(x):
        return jnp.square(jax.nn.relu(x))

    exact_signs = compressed(square_of_relu, ErrorBounded(0.1, bits_per_value=4), inputs=True)
    without = compressed(square_of_relu, Cast(jnp.bfloat16), inputs=True)
    assert kept_of_sum(exact_signs, x) <= 4096 // 2 + 36 + 16
    assert kept_of_sum(without, x) == 4096 * 2 + 4096 // 8
    g = jax.jit(jax.grad(lambda x: jnp.sum(exact_signs(x))))(jnp.linspace(-1, 1, 4096))
    np.testing.assert_array_equal(g != 0, np.linspace(-1, 1, 4096) > 0)


def test_masks_of_nan_are_false():
    x = jnp.linspace(-1, 1, 4096).at[7].set(jnp.nan)
    f = lambda x: jnp.sum(jnp.where(jnp.isnan(x), 0, jnp.square(jax.nn.relu(x))))
    wanted, got = (jax.grad(g)(x) for g in (f, compressed(f, ErrorBounded(0.1, bits_per_value=28))))
    np.testing.assert_array_equal(jnp.isnan(got), jnp.isnan(wanted))


def test_masks_of_what_a_convolution_reads_are_exact():
    """They are packed where its input lies in memory: zeros of both signs and a NaN among the values."""
    x = images().at[0, 0].set(0.0).at[1, 1].set(-0.0).at[2, 2, 2, 2].set(jnp.nan)
    w = jnp.ones((3, 3, 16, 16))
    f = lambda x: jnp.nansum(conv(jax.nn.relu(jnp.sin(x)), w))
    wanted, got = (jax.jit(jax.grad(g))(x) for g in (f, compressed(f, Cast(jnp.float32), inputs=True)))
    np.testing.assert_array_equal(got == 0, wanted == 0)
    np.testing.assert_array_equal(got, wanted)
