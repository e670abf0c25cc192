"""Attention in groups of heads against the same attention at once, in float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import memjax
from memjax.remat import AttentionInGroups, attention_in_groups

EXAMPLES, LENGTH, DIM, HEADS, KV_HEADS, FEATURES = 2, 11, 16, 4, 2, 4


def attend(q, k, v, bias=0.0):
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], 2) for a in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) + bias
    seen = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(seen, logits, -jnp.inf)), v)


def rotary(x, positions):
    angle = positions[..., None].astype(x.dtype) / 10 ** jnp.arange(FEATURES // 2, dtype=x.dtype)
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def arguments():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jax.device_put(rng.normal(size=shape) * 0.4)
    query, key, value = normal(DIM, HEADS, FEATURES), normal(DIM, KV_HEADS, FEATURES), normal(DIM, KV_HEADS, FEATURES)
    bias = normal(LENGTH, LENGTH)
    scale = jax.device_put(1 + 0.4 * rng.normal(size=DIM))
    return normal(EXAMPLES, LENGTH, DIM), query, key, value, normal(HEADS, FEATURES, DIM), scale, bias


def at_once(x, query, key, value, out, scale, bias):
    q, k, v = (jnp.einsum("btd,dnh->btnh", norm(x, scale), kernel) for kernel in (query, key, value))
    positions = jnp.arange(LENGTH)
    o = attend(rotary(q, positions), rotary(k, positions), v, bias)
    return x + jnp.einsum("btnh,nhd->btd", o, out)


def in_groups(x, query, key, value, out, scale, bias, groups=None, keep_attention=False):
    return attention_in_groups(
        *(x, query, key, value, out),
        groups=groups,
        tile=4,
        norm=lambda x: norm(x, scale),
        rotary=rotary,
        attend=functools.partial(attend, bias=bias),
        keep_attention=keep_attention,
    )


def gradients(f, *args):
    return jax.grad(lambda args: jnp.sum(jnp.sin(f(*args))))(args)


def both(f, *args):
    """Results and gradients."""
    return jax.device_get(jax.jit(lambda *args: (f(*args), gradients(f, *args)))(*args))


@functools.cache
def wanted():
    return both(at_once, *arguments())


def close(actual, expected):
    chex.assert_trees_all_close(*jax.device_get((actual, expected)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("groups", "keep_attention"), [(None, False), (1, False), (2, False), (2, True)])
def test_equals_attention_at_once(x64, groups, keep_attention):
    """What the functions close over, a scale and a bias, is differentiated as well."""
    args, run = arguments(), functools.partial(in_groups, groups=groups, keep_attention=keep_attention)
    close(both(run, *args), wanted())


@pytest.mark.parametrize("keep_attention", [False, True])
def test_memory_is_that_of_the_formula(keep_attention):
    """Beside arguments and results."""
    length, dim, heads, kv_heads, features, groups = 4096, 64, 8, 4, 8, 4
    shapes = (1, length, dim), (dim, heads, features), *[(dim, kv_heads, features)] * 2, (heads, features, dim)
    x, *kernels = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def run(*args):
        attend = lambda q, k, v: jnp.tanh(q) * jnp.repeat(k * v, q.shape[2] // k.shape[2], 2)
        return attention_in_groups(*args, groups=groups, tile=64, attend=attend, keep_attention=keep_attention)

    def temp_bytes(f, *args):
        compiled = jax.jit(f).lower(*args).compile(memjax.remat_compiler_options())
        return compiled.memory_analysis().temp_size_in_bytes

    group, a_float = features * (heads + kv_heads) / groups, 4 * length
    keys = features * 2 * kv_heads  # and values; queries lie where the result will
    assert temp_bytes(run, x, *kernels) < 1.1 * a_float * (keys + 2 * group)
    back = temp_bytes(lambda ct, *args: jax.vjp(run, *args)[1](ct), x, x, *kernels)
    assert back < 1.1 * a_float * (features * (heads + 2 * kv_heads) + 4 * group)


class Norm(nnx.Module):
    def __init__(self, scale):
        self.scale = nnx.Param(scale)

    def __call__(self, x):
        return norm(x, self.scale[...])


def test_module(x64):
    """Gradients of kernels and of the norm's scale, by `nnx.grad`."""
    x, *_, scale, bias = arguments()
    module = AttentionInGroups(
        DIM,
        HEADS,
        kv_heads=KV_HEADS,
        norm=Norm(scale),
        rotary=rotary,
        attend=functools.partial(attend, bias=bias),
        rngs=nnx.Rngs(0),
    )
    module.out[...] += 0.1
    kernels = [param[...].astype(float) for param in (module.query, module.key, module.value, module.out)]
    found = nnx.jit(nnx.grad(lambda module: jnp.sum(jnp.sin(module(x)))))(module)
    _, expected = both(lambda *kernels: at_once(x, *kernels[:4], kernels[4], bias), *kernels, scale)
    names = ("query", "key", "value", "out")
    found_kernels = jax.device_get([found[name][...] for name in names])
    chex.assert_trees_all_close(found_kernels, list(expected[:4]), rtol=1e-5, atol=1e-5)
    close(found["norm"]["scale"][...], expected[4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "heads must be a divisor of dim = 16, got 3"),
        ({"kv_heads": 3}, "kv_heads must be a divisor of heads = 4, got 3"),
        ({"rngs": 0}, "rngs must be flax.nnx.Rngs, got 0"),
        ({"dtype": "int8"}, "dtype must be a floating-point dtype, got 'int8'"),
    ],
)
def test_errors_of_the_module(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        AttentionInGroups(**{"dim": DIM, "heads": HEADS, "rngs": nnx.Rngs(0)} | change)


@pytest.mark.parametrize("keep_attention", [False, True])
def test_examples_on_two_devices(x64, keep_attention):
    """The kernels, and what the functions close over, are the same on both."""
    x, *layer = arguments()
    examples, same = jax.P("data"), (jax.P(),) * len(layer)
    run = functools.partial(in_groups, keep_attention=keep_attention)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(examples, *same), out_specs=examples)
    close(jax.jit(functools.partial(gradients, sharded))(x, *layer), wanted()[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, "x must be an array, got None"),
        ({"query": (DIM + 1, HEADS, FEATURES)}, "query must be of shape .16, N, H., as x has 16 features, got"),
        ({"key": (DIM, 3, FEATURES)}, "key must be of shape .* with K a divisor of the 4 query heads, got"),
        ({"value": (DIM, 1, FEATURES)}, "value must be of shape .16, 2, 4., to fit x and query, got"),
        ({"out": (FEATURES, HEADS, DIM + 1)}, "out must be of shape .4, 4, 16., to fit x and query, got"),
        ({"groups": 3}, "groups must be a divisor of the 2 heads of keys and values, got 3"),
        ({"groups": 1.5}, "groups must be a number of groups of at least 1, got 1.5"),
        ({"norm": 3}, "norm must be a function, got 3"),
        ({"positions": (3,)}, "positions must be of shape .*, got an array"),
    ],
)
def test_errors(change, message):
    values = dict(zip(("x", "query", "key", "value", "out"), arguments(), strict=False))
    values |= {name: jnp.ones(value) if isinstance(value, tuple) else value for name, value in change.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        attention_in_groups(**values)


@pytest.mark.parametrize("name", ["norm", "rotary", "attend"])
@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_functions_that_return_no_floats_are_refused(name, dtype):
    x, *layer = arguments()
    with pytest.raises(TypeError, match=f"the result of {name} must be a floating-point array, got .*{dtype}"):
        attention_in_groups(x, *layer[:4], **{name: lambda a, *_: a.astype(dtype)})


@pytest.mark.parametrize("shape", [(0, LENGTH, DIM), (EXAMPLES, 0, DIM)])
def test_nothing_to_attend_to(shape):
    _, *layer = arguments()
    run = lambda x, *layer: jnp.sum(attention_in_groups(x, *layer))
    dx, *d_layer = jax.grad(run, range(5))(jnp.ones(shape), *layer[:4])
    assert dx.shape == shape
    assert not any(jnp.any(d) for d in d_layer)


def test_a_backward_pass_waits_for_its_cotangent():
    """A layer makes its buffers when its cotangent is there. So the buffers of several layers are not there at once."""
    shapes = (1, 1024, 64), (64, 8, 8), (64, 4, 8), (64, 4, 8), (8, 8, 64)
    x, *kernels = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    attend = lambda q, k, v: jnp.tanh(q) * jnp.repeat(k * v, q.shape[2] // k.shape[2], 2)

    def temp_bytes(layers):
        def loss(x, *kernels):
            for _ in range(layers):
                x = attention_in_groups(x, *kernels, groups=4, tile=64, attend=attend)
            return jnp.sum(jnp.sin(x))

        compiled = jax.jit(jax.grad(loss, range(5))).lower(x, *kernels).compile(memjax.remat_compiler_options())
        return compiled.memory_analysis().temp_size_in_bytes

    # A layer more: what it is given, and its cotangents of queries, keys and values are not there before.
    assert temp_bytes(4) < 2.2 * temp_bytes(1)
