"""`where` selects arrays by the scopes in which they are read."""

import jax
import jax.numpy as jnp
import pytest

from memjax import compressed
from memjax.compress import Cast
from tests.compress.networks import images, parameters, scoped


@pytest.mark.parametrize(
    ("where", "encoded"),
    [
        (None, 4),
        ("encoder", 4),
        ("encoder/second", 2),
        ("first", 3),
        (lambda path, x: path.endswith("second") and x.ndim == 4, 2),
    ],
)
def test_where_chooses_scopes(where, encoded):
    """The first saves cos x, sin x and its tanh, which the second's convolution reads as well; the second its own tanh."""
    f = compressed(scoped, Cast(jnp.bfloat16), where=where)
    w, x = parameters(1)[0]["w"], images()
    kept = jax.eval_shape(lambda x, w: jax.vjp(f, x, w)[1], x, w)
    narrow = [leaf for leaf in jax.tree.leaves(kept) if leaf.dtype == jnp.bfloat16]
    assert len(narrow) == encoded
