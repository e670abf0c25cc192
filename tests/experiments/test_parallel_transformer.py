import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from experiments.models.parallel import NAMES, tokens_spec
from experiments.models.transformer import Layer, Transformer, TransformerConfig, _specs, sharded_loss, shardings
from memjax import linear_cross_entropy
from memjax._core.arrays import vary
from tests.shard.rings import normal

SIZES = {"vocabulary": 32, "dim": 16, "layers": 1, "heads": 4, "kv_heads": 4, "hidden": 24}


def _plain(model, tokens, labels):
    return linear_cross_entropy(model(tokens), model.head, labels, reduction="sum", implementation="full")


@functools.cache
def tokens_labels_and_expected():
    """What one device computes."""
    text = np.random.default_rng(0).integers(0, 32, (2, 17))
    tokens, labels = jnp.asarray(text[:, :-1], jnp.int32), jnp.asarray(text[:, 1:], jnp.int32)
    graph, params = nnx.split(Transformer(TransformerConfig(**SIZES), rngs=nnx.Rngs(0)))
    plain = jax.jit(jax.value_and_grad(lambda p: _plain(nnx.merge(graph, p), tokens, labels)))
    return tokens, labels, jax.device_get(plain(params))


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in NAMES), ("metp", {"recompute": False, "head_chunks": 1})]
)
def test_loss_and_gradients_are_those_of_one_device(name, options):
    """On a mesh of two by four devices; parameters and gradients sharded."""
    mesh = jax.make_mesh((2, 4), ("data", "ring"), axis_types=(AxisType.Auto,) * 2)
    tokens, labels, (expected_loss, expected) = tokens_labels_and_expected()
    model = Transformer(TransformerConfig(**SIZES, parallelism=name, **options), rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    placed = jax.device_put(params, shardings(params, mesh))

    @jax.jit
    def step(params):
        return jax.value_and_grad(lambda p: sharded_loss(nnx.merge(graph, p), mesh, tokens, labels))(params)

    loss, gradients = step(placed)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
    sharded = [g for g in jax.tree.leaves(gradients) if g.ndim == 2]
    assert all(g.addressable_shards[0].data.size == g.size // 4 for g in sharded)


def saved_bytes(parallelism, *, tokens, size, dim, hidden, heads, kv_heads, itemsize=2):
    """What a device keeps of a layer between forward and backward pass, parameters aside, for t = S / p tokens.

    Two norms of which only the inputs are kept, flash attention with its log-sum-exps, SwiGLU with its two inputs and its
    output; weights are gathered again in the backward pass.
    """
    local = tokens / size
    attention = 2 * dim + 2 * dim * kv_heads / heads  # queries, keys, values and the output
    items = {
        "metp": local * (4 * dim + attention),
        "ring": local * (4 * dim + attention),
        "ulysses": local * (5 * dim + attention),
        "tp": tokens * 4 * dim + local * (attention + 3 * hidden),
        "tp_sp": local * 2 * dim + tokens * 2 * dim + local * (attention + 3 * hidden),
    }
    return itemsize * items[parallelism] + 4 * heads * local


def test_metp_keeps_least():
    shape = {"tokens": 65536, "size": 4, "dim": 4096, "hidden": 11008, "heads": 32, "kv_heads": 32}
    kept = {name: saved_bytes(name, **shape) for name in ("metp", "ring", "ulysses", "tp", "tp_sp")}
    assert kept["metp"] == kept["ring"] < kept["ulysses"] < kept["tp_sp"] < kept["tp"]
    assert kept["metp"] < (1 - 0.417) * kept["tp"]


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_keeps_what_the_formula_says(name):
    size, tokens, shape = 4, 256, {"dim": 32, "hidden": 80, "heads": 8, "kv_heads": 8}
    mesh = jax.make_mesh((1, size), ("data", "ring"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:size])
    config = TransformerConfig(vocabulary=1, layers=1, parallelism=name, **shape)
    graph, params = nnx.split(Layer(config, rngs=nnx.Rngs(0)))
    rows = P(*tokens_spec(name), None)

    def local(params, x):
        _, pull = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, x)
        kept = {id(a): a for a in jax.tree.leaves(pull) if a.dtype == jnp.float32}
        return [vary(a.reshape(1, -1), frozenset({"data", "ring"})) for a in kept.values()]

    over_ring = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(_specs(params), rows), out_specs=P(("data", "ring"))))
    first, second = (
        jax.device_get(over_ring(params, x)) for x in normal((1, tokens, 32), (1, tokens, 32), dtype=np.float32)
    )
    # Of one device, without weights and positions, which do not depend on the input; the same numbers in another shape once.
    kept = {np.sort(a[1]).tobytes() for a, b in zip(first, second, strict=True) if not np.array_equal(a, b)}
    assert sum(map(len, kept)) == saved_bytes(name, tokens=tokens, size=size, itemsize=4, **shape)
