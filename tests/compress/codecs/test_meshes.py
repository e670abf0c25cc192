"""Codecs on meshes: each device encodes what it has."""

import itertools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax
from memjax.compress import BlockQuantized, ChannelQuantized, ErrorBounded, GroupQuantized


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


CODECS = {
    "default": {},
    "4 bits": {"bits": 4},
    "blocks": {"codec": BlockQuantized(8)},
    "channels": {"codec": ChannelQuantized(8)},
    "groups": {"codec": GroupQuantized(4)},
    "error bounded": {"codec": ErrorBounded(0.05, bits_per_value=8.0)},
}


@pytest.mark.parametrize(
    ("options", "sharded", "kind"),
    [
        *itertools.product(("default", "groups"), ("batch", "tokens"), (AxisType.Auto, AxisType.Explicit)),
        *itertools.product(("4 bits", "blocks", "channels"), ("tokens",), (AxisType.Auto,)),
        ("error bounded", "batch", AxisType.Auto),
    ],
)
def test_codes_are_made_of_what_a_device_has(options, sharded, kind):
    """Work and bytes of one of 8 devices are those of one device alone, over 8, and only what is small is gathered."""
    x, ws = normal(0, 8, 2048, 128), 0.1 * normal(1, 2, 128, 128)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))

    def loss(ws, x):
        for w in ws:
            x = jax.nn.gelu(x @ w)
        return jnp.mean(x**2)

    gradient = jax.jit(jax.grad(memjax.compressed(loss, **CODECS[options])))
    placed = (
        jax.device_put(ws, NamedSharding(mesh, P())),
        jax.device_put(x, NamedSharding(mesh, P("d") if sharded == "batch" else P(None, "d"))),
    )
    alone, each = (gradient.lower(*args).compile() for args in ((ws, x), placed))
    nbytes = [one.memory_analysis().temp_size_in_bytes for one in (alone, each)]
    flops = [one.cost_analysis()["flops"] for one in (alone, each)]
    assert 8 * flops[1] < 1.1 * flops[0]
    assert 8 * nbytes[1] < 1.2 * nbytes[0]
    for shape in re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", each.as_text()):
        assert math.prod(map(int, shape.split(","))) < x.size / 25
    rounded, exact = gradient(*placed), jax.grad(loss)(ws, x)
    error = jnp.linalg.norm(jax.device_get(rounded) - exact) / jnp.linalg.norm(exact)
    assert 0 < error < 0.1


@pytest.mark.parametrize("codec", [GroupQuantized(8), ErrorBounded(0.02)], ids=str)
def test_codes_of_explicit_axes_need_no_mesh_around(codec):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(normal(0, 16, 512, 64), NamedSharding(mesh, P(None, "d")))
    for encode in (codec.encode, jax.jit(codec.encode)):
        decoded = codec.decode(encode(x))
        assert jax.typeof(decoded) == jax.typeof(x)
        assert jnp.max(jnp.abs(jax.device_get(decoded) - jax.device_get(x))) < 0.05


def test_parts_along_automatic_axes_that_divide_the_examples():
    mesh = jax.make_mesh((4, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2)
    x, bound = normal(0, 12, 64, 64), jnp.linspace(0.01, 0.1, 64)
    codec = ErrorBounded(bound)
    code = jax.jit(codec.encode)(jax.device_put(x, NamedSharding(mesh, P("d", None, "t"))))
    assert code.spec == P("d")  # 12 examples are not divisible by 8
    for decoded in (codec.decode(code), jax.jit(codec.decode)(code), codec.decode(jax.tree.map(np.asarray, code))):
        assert jnp.all(jnp.abs(jax.device_get(decoded) - x) <= bound)


def test_what_a_sharded_code_tells_is_what_those_of_its_parts_do():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    parts = jnp.zeros((1, 64, 64)), normal(0, 1, 64, 64)
    x = jax.device_put(jnp.concatenate(parts), NamedSharding(mesh, P("d")))
    codec = ErrorBounded(0.02, bits_per_value=2.0)
    code, (zeros, others) = codec.encode(x), map(codec.encode, parts)
    assert zeros.needed_bits_per_value < 2 < others.needed_bits_per_value == code.needed_bits_per_value
    assert code.needed_nbytes == zeros.needed_nbytes + others.needed_nbytes
    assert code.raw_share == (zeros.raw_share + others.raw_share) / 2
    assert [bool(one.overflowed) for one in (zeros, others, code)] == [False, True, True]


@pytest.mark.parametrize("spec", [("d",), (None, None, None, "d"), ("d", "e")])
def test_channel_quantized_of_explicitly_sharded_arrays(spec):
    mesh = jax.make_mesh((2, 2), ("d", "e"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    x = jax.random.normal(jax.random.key(0), (8, 64, 64, 4))
    codec = ChannelQuantized(samples=1000)
    for array in (x, x.reshape(-1, 4)):
        with jax.set_mesh(mesh):
            placed = jax.device_put(array, NamedSharding(mesh, P(*spec[: array.ndim])))
            code = jax.jit(codec.encode)(placed)
        positions = spec[1:3] if array.ndim > 2 else spec[:1]
        whole = any(axis is not None for axis in positions)
        alone = (ChannelQuantized() if whole else codec).encode(array)
        chex.assert_trees_all_equal(jax.device_get(code), jax.device_get(alone))


@pytest.mark.parametrize("spec", [(("d", "e"),), ("d", None, "e")])
@pytest.mark.parametrize(
    "codec",
    [ErrorBounded(2**-6), ErrorBounded(np.full(64, 2**-6, np.float32)), BlockQuantized(8), GroupQuantized(8)],
    ids=["bound", "bounds", "block", "group"],
)
def test_codecs_of_explicitly_sharded_arrays(codec, spec):
    mesh = jax.make_mesh((2, 2), ("d", "e"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    x = jax.random.normal(jax.random.key(0), (4, 64, 64))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P(*spec)))
        got = jax.jit(lambda x: codec.decode(codec.encode(x)))(placed)
        assert jax.typeof(got) == jax.typeof(placed)
    assert jnp.abs(jax.device_get(got) - x).max() <= (2**-6 if isinstance(codec, ErrorBounded) else 0.05)
