import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from experiments.models.parallel import NAMES, tokens_spec
from experiments.models.transformer import Layer, TransformerConfig, _specs
from memjax._core.arrays import vary
from memjax.shard import overlap
from tests.shard.rings import normal


def test_condition_of_full_overlap_is_where_hop_and_step_take_the_same_time():
    link = overlap.Link((2**10, 2**40), (100e9, 100e9))
    rate = 800e12
    # 2 bytes an entry, 2 FLOP an entry and token: tokens = rate / bandwidth.
    step = lambda t: overlap.mlp_step(t, dim=512, hidden=2048, size=8)
    assert overlap.full_overlap_tokens(step, rate, link) == 8000
    # 6 bytes an entry for 5 matmuls instead of 2: 1.2 times as many.
    backward = lambda t: overlap.mlp_step(t, dim=512, hidden=2048, size=8, backward=True)
    assert overlap.full_overlap_tokens(backward, rate, link) == 9600
    # Grouped heads travel as they are; half of the products are masked.
    attention = lambda t: overlap.attention_step(t, heads=32, kv_heads=8, head_dim=128, causal=True)
    assert overlap.full_overlap_tokens(attention, rate, link) == 2 * 8000 // 4
    assert overlap.hidden_share(step(4000), rate, link) == pytest.approx(0.5)
    with pytest.raises(
        ValueError, match="limit must be a number of tokens per device with which hops are hidden, got 100"
    ):
        overlap.full_overlap_tokens(step, rate, link, limit=100)


def test_bandwidth_is_interpolated():
    link = overlap.Link((2**20, 2**22), (10.0, 30.0))
    assert [link.bandwidth(2**n) for n in (18, 20, 21, 24)] == pytest.approx([10, 10, 20, 30])


def test_metp_keeps_least():
    shape = {"tokens": 65536, "size": 4, "dim": 4096, "hidden": 11008, "heads": 32, "kv_heads": 32}
    kept = {name: overlap.saved_bytes(name, **shape) for name in ("metp", "ring", "ulysses", "tp", "tp_sp")}
    assert kept["metp"] == kept["ring"] < kept["ulysses"] < kept["tp_sp"] < kept["tp"]
    assert kept["metp"] < (1 - 0.417) * kept["tp"]
    with pytest.raises(ValueError, match="parallelism must be one of"):
        overlap.saved_bytes("dp", **shape)


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
    first, second = (over_ring(params, x) for x in normal((1, tokens, 32), (1, tokens, 32), dtype=np.float32))
    # Of one device, without weights and positions, which do not depend on the input; the same numbers in another shape once.
    kept = {
        np.sort(np.asarray(a[1])).tobytes() for a, b in zip(first, second, strict=True) if not jnp.array_equal(a, b)
    }
    assert sum(map(len, kept)) == overlap.saved_bytes(name, tokens=tokens, size=size, itemsize=4, **shape)


def test_the_machine_is_measured():
    assert overlap.measure_matmul(64, "float32") > 0
    link = overlap.measure_link(jax.devices()[:2], sizes=(2**10, 2**12))
    assert link.sizes == (2**10, 2**12)
    assert min(link.bandwidths) > 0
    with pytest.raises(ValueError, match="devices must be at least two"):
        overlap.measure_link(jax.devices()[:1])
