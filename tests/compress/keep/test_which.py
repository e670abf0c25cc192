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
        (None, 2),
        ("encoder", 2),
        ("encoder/second", 2),
        ("first", 1),
        (lambda path, x: path.endswith("second") and x.ndim == 4, 2),
    ],
)
def test_where_chooses_scopes(where, encoded):
    """Each layer's tanh, of which the first is read in the second, too. The sine and cosine follow from the argument."""
    f = compressed(scoped, Cast(jnp.bfloat16), where=where)
    w, x = parameters(1)[0]["w"], images()
    kept = jax.eval_shape(lambda x, w: jax.vjp(f, x, w)[1], x, w)
    narrow = [leaf for leaf in jax.tree.leaves(kept) if leaf.dtype == jnp.bfloat16]
    assert len(narrow) == encoded
