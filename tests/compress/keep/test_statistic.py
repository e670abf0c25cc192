"""Sums of a softmax are kept exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from memjax import compress, compressed
from tests.compress.codecs.round_trip import normal
from tests.compress.kept import saved


@pytest.mark.parametrize("scanned", [False, True])
def test_statistics_of_many_values_are_exact(scanned):
    """The sums of a softmax over 128 keys, more than 4096 of them, are kept as they are; what they are sums of is not."""

    def attend(x):
        scores = jnp.einsum("bqd,bkd->bqk", x, x) * 2
        return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x)

    def f(x):
        return lax.scan(lambda x, _: (attend(x), None), x, None, length=2)[0] if scanned else attend(x)

    x = normal(40, 128, 8)
    saved_by = lambda f: saved(f, x)
    coarse = saved_by(compressed(f, compress.BlockQuantized(4), inputs=True))
    statistics = 40 * 128 * (2 if scanned else 1)
    assert ("float32", statistics) in coarse
    assert ("uint4", statistics) not in coarse
    assert any(dtype == "uint4" and size >= 40 * 128 * 128 for dtype, size in coarse)


@pytest.mark.parametrize("axes", [-1, (-2, -1), 0])
def test_statistics_of_norms_over_features_are_computed_again(axes):
    """Where the norm's input is kept; over other axes, as in a batch norm, they are kept as they are."""

    def norm(x):  # as Flax computes it
        mean = jnp.mean(x, axes, keepdims=True)
        variance = jnp.maximum(0.0, jnp.mean(x * x, axes, keepdims=True) - mean * mean)
        return (x - mean) * lax.rsqrt(variance + 1e-6)

    def f(w, x):
        return jnp.sum(jax.nn.gelu(jnp.einsum("pqf,fg->pqg", norm(x), w)) ** 2)

    x, w = normal(4096, 16, 32), normal(32, 16, seed=1) / 6
    statistics = {-1: 4096 * 16, (-2, -1): 4096, 0: 512}[axes]
    kept = lambda f: saved(f, w, x).count(("float32", statistics))
    assert 2 * kept(compressed(f)) > kept(f) if axes == 0 else kept(compressed(f)) == 0
    for exact, rounded in zip(*(jax.jit(jax.grad(g, (0, 1)))(w, x) for g in (f, compressed(f))), strict=True):
        assert np.linalg.norm(rounded - exact) < 0.01 * np.linalg.norm(exact)
