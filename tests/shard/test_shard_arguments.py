"""Wrong arguments: what is raised, and that it names the argument, what it got and what it must be."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.shard import (
    MetpAttention,
    MetpMlp,
    baselines,
    metp,
    metp_attention,
    metp_mlp,
    overlap,
    positions,
    ring,
    unzigzag,
    vocab_cross_entropy,
    zigzag,
)
from tests.shard.rings import FIRST, ROWS, eagerly_sharded, normal, sharded

X, W_IN, W_OUT = normal((1, 16, 4), (4, 16), (16, 4), dtype=np.float32)
(Q,) = normal((1, 16, 4, 8), dtype=np.float32)
LINK = overlap.Link((1, 2), (1.0, 1.0))
STEP = overlap.Step(1.0, 1.0)


def mlp(**changes):
    def local(x, w_in, w_out):
        arguments = {"x": x, "w_in": w_in, "w_out": w_out, "axis_name": "ring", **changes}
        return metp_mlp(arguments.pop("x"), arguments.pop("w_in"), arguments.pop("w_out"), **arguments)

    return sharded(local, 2, (ROWS, ROWS, FIRST), ROWS)(X, W_IN, W_OUT)


def baseline(name, **changes):
    x_spec = jax.sharding.PartitionSpec() if name == "tensor_parallel_mlp" else ROWS

    def local(x, w_in, w_out):
        arguments = {"x": x, "w_in": w_in, "w_out": w_out, "axis_name": "ring", **changes}
        f = getattr(baselines, name)
        return f(arguments.pop("x"), arguments.pop("w_in"), arguments.pop("w_out"), **arguments)

    return sharded(local, 2, (x_spec, ROWS, FIRST), x_spec)(X, W_IN, W_OUT)


def ulysses(**options):
    local = lambda q: baselines.ulysses_attention(q, q, q, axis_name="ring", **options)
    return sharded(local, 2, ROWS, ROWS)(Q)


def ring_scan(**changes):
    arguments = {"body": lambda carry, block, step: carry + block, "moving": X, **changes}
    return ring.scan(arguments.pop("body"), arguments.pop("moving"), 0.0, axis_name=None)


def ring_collect(**changes):
    arguments = {"body": lambda carry, block, step: (carry, block), "moving": X, "dtype": "float32", **changes}
    return ring.collect(arguments.pop("body"), arguments.pop("moving"), 0.0, axis_name=None, **arguments)


def product(f):
    return sharded(lambda *args: metp(f, *args, axis_name="ring"), 2, (ROWS, ROWS, FIRST), ROWS)(X, W_IN, W_OUT)


def attend(**changes):
    def local(q):
        arguments = {"q": q, "k": q, "v": q, "axis_name": "ring", **changes}
        return metp_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)

    return sharded(local, 2, ROWS, ROWS)(Q)


def loss(**changes):
    def local(x, w):
        labels = (0 * x[..., 0]).astype(jnp.int32)
        arguments = {"x": x, "w": w, "labels": labels, "axis_name": "ring", **changes}
        return vocab_cross_entropy(arguments.pop("x"), arguments.pop("w"), arguments.pop("labels"), **arguments)

    return sharded(local, 2, (ROWS, FIRST), jax.sharding.PartitionSpec())(X, W_OUT)


make_mlp = partial(MetpMlp, rngs=nnx.Rngs(0))
make_attention = partial(MetpAttention, rngs=nnx.Rngs(0))
mlp_step = partial(overlap.mlp_step, **{"tokens": 1, "dim": 2, "hidden": 4, "size": 1})

CALLS = [
    (mlp, {"x": None}, "x must be an array, got None"),
    (mlp, {"w_in": "text"}, "w_in must be an array, got 'text'"),
    (mlp, {"w_gate": "text"}, "w_gate must be an array, got 'text'"),
    (mlp, {"x": jnp.zeros((1, 0, 4))}, "x must be of shape"),
    (mlp, {"x": jnp.zeros(4)}, "x must be of shape"),
    (mlp, {"activation": None}, "activation must be a function, got None"),
    (mlp, {"activation": jax.nn.softmax}, "activation must be an elementwise function"),
    (mlp, {"activation": lambda z: z[:1]}, "activation must be an elementwise function"),
    (mlp, {"recompute": 1}, "recompute must be True or False, got 1"),
    (mlp, {"axis_name": "rang"}, "axis_name must be an axis of the mesh .* got 'rang'"),
    (mlp, {"axis_name": None}, "axis_name must be the name of one mesh axis, got None"),
    (product, {"f": "gelu"}, "f must be a function, got 'gelu'"),
    (product, {"f": 3}, "f must be a function, got 3"),
    (product, {"f": lambda z: None}, "f must be an elementwise function"),
    (product, {"f": lambda a, b: a}, "f must be an elementwise function"),
    (product, {"f": lambda z: jnp.cumsum(z, 0)}, "f must be an elementwise function"),
    (product, {"f": lambda z: z.T.reshape(z.shape)}, "f must be an elementwise function"),
    (product, {"f": lambda z: z / jnp.linalg.norm(z)}, "f must be an elementwise function"),
    (product, {"f": lambda z: z > 0}, "f must be an elementwise function .* that returns bool"),
    *(
        (partial(baseline, name), changes, message)
        for name in ("tensor_parallel_mlp", "sequence_parallel_mlp", "gathered_mlp")
        for changes, message in (
            ({"x": None}, "x must be an array, got None"),
            ({"w_in": None}, "w_in must be an array, got None"),
            ({"w_out": None}, "w_out must be an array, got None"),
            ({"w_gate": "text"}, "w_gate must be an array, got 'text'"),
            ({"activation": jax.nn.softmax}, "activation must be an elementwise function"),
            ({"activation": lambda z: None}, "activation must be an elementwise function"),
            ({"axis_name": "rang"}, "axis_name must be an axis of the mesh .* got 'rang'"),
        )
    ),
    (ring_scan, {"body": None}, "body must be a function, got None"),
    (ring_scan, {"body": lambda carry: carry}, "body must be a function of 3 arguments, got"),
    (ring_scan, {"moving": "text"}, "moving must be an array, got 'text'"),
    (ring_collect, {"body": None}, "body must be a function, or a pair of functions, got None"),
    (ring_collect, {"body": (3, 4)}, "body must be a function, got 3"),
    (ring_collect, {"moving": [1.0]}, "moving must be an array, got 1.0"),
    (ring_collect, {"dtype": None}, "dtype must be a dtype, got None"),
    (ring_collect, {"dtype": "abc"}, "dtype must be a dtype, got 'abc'"),
    (ring_collect, {"count": 0}, "count must be a number of pieces of at least 1, got 0"),
    (ring_collect, {"count": 1.5}, "count must be a number of pieces of at least 1, got 1.5"),
    (ring_scan, {"body": lambda carry, block, step: carry + None}, "body must take a carry of .* raises TypeError"),
    (ring_collect, {"body": lambda carry, block, step: None}, "body must be a function that returns .*carry, sums"),
    (ring_scan, {"body": lambda carry, block, step: "text"}, "the result of body must be an array or a number, got"),
    (ring_collect, {"piece": None}, "piece must be a function, got None"),
    (ring_collect, {"piece": lambda moving: moving}, "piece must be a function of 2 arguments, got"),
    (mlp, {"activation": jnp.linalg.inv}, "activation must be an elementwise function .* raises"),
    (baselines.gathered_tokens, {"x": X, "axis_name": "rang"}, "axis_name must be an axis of the mesh"),
    (baselines.scattered, {"x": X, "axis_name": "rang"}, "axis_name must be an axis of the mesh"),
    (baselines.gathered_weight, {"w": X, "axis_name": "rang", "axis": 0}, "axis_name must be an axis of the mesh"),
    (baselines.mlp, {"x": X, "w_in": None, "w_out": W_OUT, "activation": jnp.tanh}, "w_in must be an array, got None"),
    (baselines.mlp, {"x": X, "w_in": W_IN, "w_out": W_OUT, "activation": "gelu"}, "activation must be a function, got"),
    (overlap.measure_matmul, {"dtype": int}, "dtype must be a floating-point dtype, got"),
    (overlap.measure_link, {"devices": jax.devices()[:1] * 2}, "devices must be devices that differ, got"),
    (overlap.measure_link, {"devices": [1, 2]}, "devices must be devices of JAX, got"),
    (ulysses, {"layout": "zigzag"}, "options must be options of attention: causal.*, got 'layout'"),
    (ulysses, {"nonsense": 1}, "options must be options of attention: causal.*, got 'nonsense'"),
    (attend, {"q": None}, "q must be an array, got None"),
    (attend, {"k": jnp.zeros((1, 8, 8))}, "k must be an array of 4 dimensions"),
    (attend, {"v": jnp.zeros((1, 8, 4, 8), int)}, "v must be a floating-point array"),
    (attend, {"softcap": "8"}, "softcap must be a positive finite number, got '8'"),
    (attend, {"softcap": math.inf}, "softcap must be a positive finite number, got inf"),
    (attend, {"softcap": -1}, "softcap must be a positive finite number, got -1"),
    (attend, {"scale": "8"}, "scale must be a finite number, got '8'"),
    (attend, {"scale": math.inf}, "scale must be a finite number, got inf"),
    (attend, {"scale": True}, "scale must be a finite number, got True"),
    (attend, {"causal": "no"}, "causal must be True or False, got 'no'"),
    (attend, {"causal": None}, "causal must be True or False, got None"),
    (attend, {"window": 0}, "window must be an integer of at least 1, got 0"),
    (attend, {"window": True}, "window must be an integer of at least 1, got True"),
    (attend, {"head_chunks": 3}, "head_chunks must be a divisor of the 4"),
    (attend, {"head_chunks": "2"}, "head_chunks must be an integer"),
    (attend, {"layout": "zig"}, "layout must be one of 'zigzag', 'contiguous', got 'zig'"),
    (attend, {"implementation": "flash"}, "implementation must be one of .* got 'flash'"),
    (attend, {"segment_ids": [0]}, "segment_ids must be an array"),
    (attend, {"axis_name": "rang"}, "axis_name must be an axis of the mesh"),
    (loss, {"x": None}, "x must be an array, got None"),
    (loss, {"labels": None}, "labels must be an array, got None"),
    (loss, {"labels": jnp.zeros((1, 8, 8))}, "labels must be integers"),
    (loss, {"reduction": "none"}, "reduction must be one of 'mean', 'sum', got 'none'"),
    (loss, {"softcap": math.inf}, "softcap must be a positive finite number"),
    (loss, {"axis_name": "rang"}, "axis_name must be an axis of the mesh"),
    (positions, {"length": 3, "rank": 0, "size": 8, "layout": "zigzag"}, "length must be an even number"),
    (positions, {"length": 4, "rank": -1, "size": 8, "layout": "contiguous"}, r"rank must be an integer in \[0, 8\)"),
    (positions, {"length": 4, "rank": 8, "size": 8, "layout": "contiguous"}, r"rank must be an integer in \[0, 8\)"),
    (positions, {"length": "4", "rank": 0, "size": 8, "layout": "zigzag"}, "length must be an integer"),
    (positions, {"length": 4, "rank": None, "size": 8, "layout": "zigzag"}, "rank must be an integer"),
    (positions, {"length": 4, "rank": 0.5, "size": 8, "layout": "zigzag"}, "rank must be an integer"),
    (positions, {"length": 4, "rank": jnp.zeros(2), "size": 8, "layout": "zigzag"}, "rank must be an integer"),
    (positions, {"length": 4, "rank": 0, "size": 0, "layout": "zigzag"}, "size must be an integer of at least 1"),
    (positions, {"length": 4, "rank": 0, "size": 2, "layout": None}, "layout must be one of"),
    (make_mlp, {"dim": -1, "hidden": 8}, "dim must be an integer of at least 1, got -1"),
    (make_mlp, {"dim": "16", "hidden": 8}, "dim must be an integer of at least 1, got '16'"),
    (make_mlp, {"dim": 16, "hidden": 0}, "hidden must be an integer of at least 1"),
    (make_mlp, {"dim": 16, "hidden": 8, "activation": None}, "activation must be a function"),
    (make_mlp, {"dim": 16, "hidden": 8, "gated": "no"}, "gated must be True or False, got 'no'"),
    (make_mlp, {"dim": 16, "hidden": 8, "axis_name": 3}, "axis_name must be the name of one mesh axis"),
    (make_mlp, {"dim": 16, "hidden": 8, "dtype": "int32"}, "dtype must be a floating-point dtype"),
    (make_mlp, {"dim": 16, "hidden": 8, "rngs": None}, "rngs must be flax.nnx.Rngs"),
    (make_attention, {"dim": 16, "heads": 0}, "heads must be an integer of at least 1"),
    (make_attention, {"dim": 16, "heads": 4, "kv_heads": 3}, "kv_heads must be a divisor of heads = 4, got 3"),
    (make_attention, {"dim": 16, "heads": 4, "kv_heads": 0}, "kv_heads must be an integer of at least 1"),
    (make_attention, {"dim": 16, "heads": 4, "head_dim": 0}, "head_dim must be an integer of at least 1"),
    (make_attention, {"dim": 16, "heads": 4, "layout": "zig"}, "layout must be one of"),
    (make_attention, {"dim": 16, "heads": 4, "rotate": 3}, "rotate must be a function"),
    (make_attention, {"dim": 16, "heads": 4, "rotate": jnp.tanh}, "rotate must be a function of 2 arguments"),
    (make_attention, {"dim": 16, "heads": 4, "scale": "8"}, "scale must be a finite number"),
    (make_attention, {"dim": 16, "heads": 4, "head_chunks": 3}, "head_chunks must be a divisor"),
    (make_attention, {"dim": 16, "heads": 4, "casual": True}, "options must be options of metp_attention.*'casual'"),
    (make_attention, {"dim": 16, "heads": 4, "dropout_rate": "0"}, "dropout_rate must be a finite number"),
    (overlap.measure_link, {"sizes": ()}, "sizes must be a sequence of at least one"),
    (overlap.measure_link, {"sizes": (-8,)}, "sizes must be multiples of 4 bytes of at least 4, got -8"),
    (overlap.measure_matmul, {"size": -1}, "size must be an integer of at least 1, got -1"),
    (mlp_step, {"size": 0}, "size must be an integer of at least 1, got 0"),
    (mlp_step, {"tokens": -1}, "tokens must be an integer of at least 1, got -1"),
    (mlp_step, {"size": None}, "size must be an integer of at least 1, got None"),
    (mlp_step, {"gated": "no"}, "gated must be True or False"),
    (overlap.Link, {"sizes": (), "bandwidths": ()}, "sizes must be a tuple of at least one number"),
    (overlap.Link, {"sizes": (2, 1), "bandwidths": (1.0, 1.0)}, "sizes must be rising"),
    (overlap.Link, {"sizes": (1, 2), "bandwidths": (1.0,)}, "bandwidths must be 2 numbers"),
    (overlap.Link, {"sizes": (1,), "bandwidths": (0.0,)}, "bandwidths must be a positive finite number"),
    (overlap.Step, {"flops": None, "message_bytes": 1.0}, "flops must be a positive finite number"),
    (overlap.hidden_share, {"step": 3, "flops_per_second": 1.0, "link": LINK}, "step must be .*Step"),
    (overlap.hidden_share, {"step": STEP, "flops_per_second": 0, "link": LINK}, "flops_per_second must be a positive"),
    (overlap.hidden_share, {"step": STEP, "flops_per_second": 1.0, "link": 1e9}, "link must be .*Link"),
    (
        overlap.full_overlap_tokens,
        {"step": lambda: STEP, "flops_per_second": 1.0, "link": LINK},
        "step must be a function of 1 arguments, got",
    ),
    (overlap.full_overlap_tokens, {"step": 3, "flops_per_second": 1.0, "link": LINK}, "step must be a function"),
    *(
        (reorder, {"a": a, "size": size, "axis": axis}, message)
        for reorder in (zigzag, unzigzag)
        for a, size, axis, message in (
            (None, 8, 1, "a must be an array, got None"),
            ("abc", 8, 1, "a must be an array, got 'abc'"),
            (np.zeros((1, 32)), -1, 1, "size must be an integer of at least 1, got -1"),
            (np.zeros((1, 32)), 0, 1, "size must be an integer of at least 1, got 0"),
            (np.zeros((1, 32)), "8", 1, "size must be an integer of at least 1, got '8'"),
            (np.zeros((1, 32)), 8.0, 1, "size must be an integer of at least 1, got 8.0"),
            (np.zeros((1, 32)), 8, "1", "axis must be an integer, got '1'"),
            (np.zeros((1, 32)), 8, 5, "axis must be one of the 2 axes"),
            (np.zeros((1, 31)), 8, 1, "a must be of a length along axis 1 that is a multiple of 2 size = 16"),
        )
    ),
]


@pytest.mark.parametrize(
    ("f", "changes", "message"), CALLS, ids=[f"{i} {message[:40]}" for i, (*_, message) in enumerate(CALLS)]
)
def test_is_refused(f, changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        f(**changes)


@pytest.mark.parametrize(
    "name", ["gelu", "relu", "silu", "tanh", "leaky_relu", "elu", "softplus", "hard_swish", "mish"]
)
def test_activations_are_elementwise(name):
    MetpMlp(2, 2, activation=getattr(jax.nn, name), rngs=nnx.Rngs(0))


def test_a_collective_in_an_activation_is_refused():
    combining = lambda h: h - jax.lax.pmean(h, "batch")
    with pytest.raises(ValueError, match=r"activation must be an elementwise function.*: collectives combine entries"):
        jax.vmap(lambda x: mlp(activation=combining) + x, axis_name="batch")(jnp.ones(2))


def test_a_traced_option_is_refused():
    with pytest.raises(TypeError, match="causal must be True or False"):
        jax.jit(lambda causal: attend(causal=causal))(True)
    with pytest.raises(TypeError, match="scale must be a finite number known when tracing"):
        jax.jit(lambda scale: attend(scale=scale))(1.0)


OVER_RING = {
    "metp_mlp": (lambda x: metp_mlp(x, x[0].T, x[0], axis_name="ring"), (1, 16, 4), ROWS),
    "metp_attention": (lambda q: metp_attention(q, q, q, axis_name="ring"), Q.shape, ROWS),
    "vocab_cross_entropy": (
        lambda x: vocab_cross_entropy(x, x[0], (0 * x[..., 0]).astype(jnp.int32), axis_name="ring"),
        (1, 16, 4),
        jax.sharding.PartitionSpec(),
    ),
}


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        ("linearize", "metp_mlp"),
        ("jvp", "metp_mlp"),
        ("jvp", "metp_attention"),
        *itertools.product(("jit of jvp", "vmap of jvp"), OVER_RING),
    ],
)
def test_forward_mode_is_refused(name, transform):
    """Eagerly too, where JAX itself says "unhashable type"."""
    local, shape, out = OVER_RING[name]
    f = eagerly_sharded(local, 2, ROWS, out)
    (a,) = normal(shape, dtype=np.float32)
    call = {
        "jvp": lambda: jax.jvp(f, (a,), (a,)),
        "jit of jvp": lambda: jax.jit(lambda a: jax.jvp(f, (a,), (a,)))(a),
        "vmap of jvp": lambda: jax.jit(jax.vmap(lambda t: jax.jvp(f, (a,), (t,))[1]))(a[None]),
        "linearize": lambda: jax.linearize(f, a)[1](a),
    }[transform]
    with pytest.raises(TypeError, match=f"{name} cannot be differentiated in forward mode .*use reverse mode"):
        call()


@pytest.mark.parametrize("name", OVER_RING)
def test_forward_mode_over_reverse_mode_is_not_refused(name):
    local, shape, out = OVER_RING[name]
    f = sharded(local, 2, ROWS, out)
    a, b = normal(shape, shape, dtype=np.float32)
    slope = jax.grad(lambda a: jnp.sin(f(a)).sum())
    directional = jax.jit(lambda a, b: jax.jvp(slope, (a,), (b,))[1])(a, b)
    reverse = jax.jit(jax.grad(lambda a: jnp.vdot(slope(a), b)))(a)
    np.testing.assert_allclose(directional, reverse, rtol=1e-3, atol=1e-4)


def test_whole_segment_ids_with_sharded_heads_are_refused():
    """All tokens of some heads on each device: shapes agree, and the ring would take every device's tokens for others."""
    heads = jax.sharding.PartitionSpec(None, None, "ring")
    attend = lambda q, ids: metp_attention(q, q, q, segment_ids=ids, axis_name="ring")
    f = sharded(attend, 2, (heads, jax.sharding.PartitionSpec()), heads)
    message = "segment_ids must be sharded over the mesh axis 'ring' along its tokens, axis 1, got an array"
    with pytest.raises(ValueError, match=message):
        f(Q, jnp.zeros((1, 16), jnp.int32))


def test_segment_ids_made_on_each_device_are_varied_first():
    ids = jnp.zeros((1, 8), jnp.int32)
    vary = lambda ids: jax.lax.pcast(ids, "ring", to="varying")
    one = sharded(lambda q: metp_attention(q, q, q, segment_ids=vary(ids), axis_name="ring"), 2, ROWS, ROWS)(Q)
    expected = sharded(OVER_RING["metp_attention"][0], 2, ROWS, ROWS)(Q)
    np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5)


def test_padding_may_hold_anything():
    q, do = normal((1, 16, 4, 8), (1, 16, 4, 8), dtype=np.float32)
    ids = jnp.where(jnp.arange(16) < 12, 0, -1)[None]
    over_ring = sharded(
        lambda q, ids: metp_attention(q, q, q, segment_ids=ids, layout="contiguous", axis_name="ring"),
        2,
        (ROWS, ROWS),
        ROWS,
    )
    slope = jax.jit(jax.grad(lambda q: (over_ring(q, ids) * do).sum()))
    got, expected = slope(q.at[:, 12:].set(jnp.nan)), slope(q)
    np.testing.assert_array_equal(got, expected)
    assert not np.any(np.asarray(got)[:, 12:])
