"""Warnings of codes that overflow."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax import compress, compressed
from memjax.compress import ErrorBounded
from memjax.compress._error_bounded import error_bounded
from tests.compress.networks import conv, images, parameters


@pytest.mark.parametrize(
    "around", [lambda f: f, jax.checkpoint, lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x[:, None])]
)
def test_an_overflow_is_said_once_with_the_bits_needed(around, monkeypatch):
    monkeypatch.setattr(error_bounded, "_warned", set())
    f = around(compressed(lambda w, x: jnp.tanh(conv(jnp.tanh(x), w)), ErrorBounded(2**-8, bits_per_value=2)))
    args = parameters(1)[0]["w"], images()
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(f(w, x)))))

    def overflowed(*args):
        assert np.isnan(gradient(*args)).any()
        jax.effects_barrier()

    with pytest.warns(compress.CapacityWarning, match=r"bits_per_value=\d+\.\d or more") as said:
        overflowed(*args)
    assert len(said) == 1
    enough = float(re.search(r"bits_per_value=(\d+\.\d) or more", str(said[0].message))[1])
    overflowed(*args)  # a second warning would be an error
    roomy = around(compressed(lambda w, x: jnp.tanh(conv(jnp.tanh(x), w)), ErrorBounded(2**-8, bits_per_value=enough)))
    assert np.isfinite(jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(roomy(w, x)))))(*args)).all()
