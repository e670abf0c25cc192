import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from memjax.shard import baselines
from tests.shard.rings import FIRST, ROWS, normal, outputs_and_gradients, sharded


@pytest.mark.parametrize("name", ["tensor_parallel_mlp", "sequence_parallel_mlp", "gathered_mlp"])
def test_mlp_is_that_of_one_device(x64, name):
    x, w_in, w_gate, w_out, do = normal((2, 8, 4), (4, 8), (4, 8), (8, 4), (2, 8, 4))
    rows = P() if name == "tensor_parallel_mlp" else ROWS
    f = getattr(baselines, name)
    local = lambda x, w_in, w_gate, w_out: f(x, w_in, w_out, w_gate=w_gate, activation=jax.nn.silu, axis_name="ring")
    got = outputs_and_gradients(sharded(local, 4, (rows, ROWS, ROWS, FIRST), rows), do, x, w_in, w_gate, w_out)
    plain = lambda x, w_in, w_gate, w_out: baselines.mlp(x, w_in, w_out, jax.nn.silu, w_gate)
    for a, b in zip(got, outputs_and_gradients(plain, do, x, w_in, w_gate, w_out), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)
    one = P() if name == "tensor_parallel_mlp" else FIRST  # a sequence without an axis of batches
    got = sharded(local, 4, (one, ROWS, ROWS, FIRST), one)(x[0], w_in, w_gate, w_out)
    np.testing.assert_allclose(got, plain(x, w_in, w_gate, w_out)[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kv_heads", [2])
def test_ulysses_is_attention(x64, kv_heads):
    q, k, v, do = normal((2, 16, 8, 3), (2, 16, kv_heads, 3), (2, 16, kv_heads, 3), (2, 16, 8, 3))
    local = lambda *args: baselines.ulysses_attention(*args, axis_name="ring", causal=True)
    got = outputs_and_gradients(sharded(local, 4, (ROWS,) * 3, ROWS), do, q, k, v)
    plain = lambda *args: baselines.attention(*args, causal=True)
    for a, b in zip(got, outputs_and_gradients(plain, do, q, k, v), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


def test_heads_that_do_not_divide_are_refused():
    q, k = normal((1, 16, 6, 4), (1, 16, 3, 4), dtype=np.float32)
    with pytest.raises(ValueError, match=r"q must be of heads that the 4 devices of 'ring' divide, got .*4, 6, 4"):
        sharded(lambda *a: baselines.ulysses_attention(*a, axis_name="ring"), 4, (ROWS,) * 3, ROWS)(q, k, k)
