import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from memjax.shard import MetpAttention, MetpMlp, baselines, unzigzag, zigzag
from tests.shard.rings import ROWS, normal, sharded


def _over_ring(module, size, rows, x):
    graph, params = nnx.split(module)
    columns = lambda path: P("ring") if path[-1].key in ("out", "w_out") else P(None, "ring")
    specs = jax.tree_util.tree_map_with_path(lambda path, a: columns(path[:1]), params)
    local = lambda params, x: nnx.merge(graph, params)(x)
    return sharded(local, size, (specs, rows), rows)(params, x)


def test_modules_are_those_of_one_device():
    (x,) = normal((2, 16, 8), dtype=np.float32)
    mlp = MetpMlp(8, 16, gated=True, activation=jax.nn.silu, recompute=False, rngs=nnx.Rngs(0))
    expected = nnx.jit(lambda m, x: baselines.mlp(x, m.w_in[...], m.w_out[...], jax.nn.silu, m.w_gate[...]))(mlp, x)
    np.testing.assert_allclose(_over_ring(mlp, 4, ROWS, x), expected, atol=1e-5)
    attention = MetpAttention(8, 4, kv_heads=4, causal=True, head_chunks=2, rngs=nnx.Rngs(0))

    @nnx.jit
    def plain(attention, x):
        q, k, v = ((x @ w[...]).reshape(2, 16, 4, 2) for w in (attention.query, attention.key, attention.value))
        return baselines.attention(q, k, v, causal=True).reshape(2, 16, 8) @ attention.out[...]

    got = unzigzag(np.asarray(_over_ring(attention, 4, ROWS, zigzag(np.asarray(x), 4))), 4)
    np.testing.assert_allclose(got, plain(attention, x), atol=1e-5)


def test_dropout_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="computes its weights again in the backward pass"):
        MetpAttention(8, 2, dropout_rate=0.1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="heads must be a divisor of dim = 8, got 3"):
        MetpAttention(8, 3, rngs=nnx.Rngs(0))
    assert jnp.isfinite(MetpMlp(8, 4, rngs=nnx.Rngs(0)).w_in[...]).all()
