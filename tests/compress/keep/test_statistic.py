"""Sums of a softmax are kept exactly."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from memjax import compress, compressed
from tests.compress.kept import saved


@pytest.mark.parametrize("scanned", [False, True])
def test_statistics_of_many_values_are_exact(scanned):
    """The sums of a softmax over 128 keys, more than 4096 of them, are kept as they are; what they are sums of is not."""

    def attend(x):
        scores = jnp.einsum("bqd,bkd->bqk", x, x) * 2
        return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x)

    def f(x):
        return lax.scan(lambda x, _: (attend(x), None), x, None, length=2)[0] if scanned else attend(x)

    x = jax.random.normal(jax.random.key(0), (40, 128, 8))
    saved_by = lambda f: saved(f, x)
    coarse = saved_by(compressed(f, compress.BlockQuantized(4), inputs=True))
    statistics = 40 * 128 * (2 if scanned else 1)
    assert ("float32", statistics) in coarse
    assert ("uint4", statistics) not in coarse
    assert any(dtype == "uint4" and size >= 40 * 128 * 128 for dtype, size in coarse)
