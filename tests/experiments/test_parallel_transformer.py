import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from experiments.models.parallel import NAMES
from experiments.models.transformer import Transformer, TransformerConfig, sharded_loss, shardings
from memjax import linear_cross_entropy

SIZES = {"vocabulary": 32, "dim": 16, "layers": 1, "heads": 4, "kv_heads": 4, "hidden": 24}


def _plain(model, tokens, labels):
    return linear_cross_entropy(model(tokens), model.head, labels, reduction="sum", implementation="full")


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in NAMES), ("metp", {"recompute": False, "head_chunks": 1})]
)
def test_loss_and_gradients_are_those_of_one_device(name, options):
    """On a mesh of two by four devices; parameters and gradients sharded."""
    mesh = jax.make_mesh((2, 4), ("data", "ring"), axis_types=(AxisType.Auto,) * 2)
    text = np.random.default_rng(0).integers(0, 32, (2, 17))
    tokens, labels = jnp.asarray(text[:, :-1], jnp.int32), jnp.asarray(text[:, 1:], jnp.int32)
    one = Transformer(TransformerConfig(**SIZES), rngs=nnx.Rngs(0))
    model = Transformer(TransformerConfig(**SIZES, parallelism=name, **options), rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    placed = jax.device_put(params, shardings(params, mesh))

    @jax.jit
    def step(params):
        return jax.value_and_grad(lambda p: sharded_loss(nnx.merge(graph, p), mesh, tokens, labels))(params)

    graph_of_one, params_of_one = nnx.split(one)
    plain = jax.jit(jax.value_and_grad(lambda p: _plain(nnx.merge(graph_of_one, p), tokens, labels)))
    loss, gradients = step(placed)
    expected_loss, expected = plain(params_of_one)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
    sharded = [g for g in jax.tree.leaves(gradients) if g.ndim == 2]
    assert all(g.addressable_shards[0].data.size == g.size // 4 for g in sharded)
