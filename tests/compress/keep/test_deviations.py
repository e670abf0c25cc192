"""Bounds in units of the deviations that a batch norm divides by."""

import jax
import jax.numpy as jnp

from memjax import compressed
from memjax.compress import ErrorBounded
from tests.compress.networks import batch_norm, images


def negated_batch_norm(x):
    return batch_norm(jnp.negative(x), jnp.ones(16), jnp.zeros(16))


def test_batch_norm_has_the_bound_in_units_of_its_deviation():
    """Channels of scales from 0.1 to 1000: a bound on each is one on the normalised values."""
    scales = jnp.logspace(-1, 3, 16)
    x = images() * scales
    f = compressed(lambda x: negated_batch_norm(x), ErrorBounded(2**-6, bits_per_value=28), inputs=True)
    ct = images() + jax.random.normal(jax.random.key(9), x.shape)  # so that its correlation with x is the same for all
    want, got = (jax.jit(jax.grad(lambda x, f=f: jnp.sum(ct * f(x))))(x) for f in (negated_batch_norm, f))
    by_channel = jnp.linalg.norm((got - want).reshape(-1, 16), axis=0) / jnp.linalg.norm(want.reshape(-1, 16), axis=0)
    assert float(by_channel.max()) < 0.02
    assert float(by_channel.max() / by_channel.min()) < 4
