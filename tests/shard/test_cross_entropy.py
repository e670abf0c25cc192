import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from memjax import linear_cross_entropy
from memjax.shard import vocab_cross_entropy
from tests.shard.rings import FIRST, ROWS, normal, outputs_and_gradients, sharded


@pytest.mark.parametrize(("size", "reduction"), [(1, "sum"), (8, "mean")])
def test_loss_is_that_of_one_device(x64, size, reduction):
    x, w, do = normal((2, 16, 5), (24, 5), ())
    labels = np.random.default_rng(1).integers(0, 24, (2, 16))
    labels[0, :5] = -100
    options = {"reduction": reduction, "z_loss": 0.1, "label_smoothing": 0.2, "softcap": 3.0}
    over_ring = sharded(
        lambda x, w, labels: vocab_cross_entropy(x, w, labels, axis_name="ring", **options),
        size,
        (ROWS, FIRST, ROWS),
        P(),
    )
    labels = jnp.asarray(labels, jnp.int32)
    got = outputs_and_gradients(lambda x, w: over_ring(x, w, labels), do, x, w)
    plain = lambda x, w: linear_cross_entropy(x, w, labels, implementation="full", **options)
    for a, b in zip(got, outputs_and_gradients(plain, do, x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)
    # Where nothing is differentiated, no gradients are computed with it.
    np.testing.assert_allclose(over_ring(x, w, labels), got[0], rtol=0, atol=1e-10)


def test_wrong_input_is_refused():
    x, w = normal((2, 8, 5), (24, 5), dtype=np.float32)
    with pytest.raises(ValueError, match=r"call this inside jax.shard_map"):
        vocab_cross_entropy(x, w, jnp.zeros((2, 8), jnp.int32), axis_name="ring")
