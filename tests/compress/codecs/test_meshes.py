"""Codecs on meshes: each device encodes what it has."""

import functools
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
from memjax.compress import BlockQuantized, ChannelQuantized, ErrorBounded, GroupQuantized, PositionQuantized
from tests.compress.codecs.round_trip import normal

CODECS = {
    "default": {},
    "blocks": {"codec": BlockQuantized(8)},
    "channels": {"codec": ChannelQuantized(8)},
    "groups": {"codec": GroupQuantized(4)},
    "error bounded": {"codec": ErrorBounded(0.05, bits_per_value=8.0)},
}


def _loss(ws, x):
    for w in ws:
        x = jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def _weights_and_x():
    return np.float32(0.1) * normal(2, 128, 128, seed=1), normal(8, 1024, 128)


@functools.cache
def _exact():
    return np.asarray(jax.jit(jax.grad(_loss))(*_weights_and_x()))


@functools.cache
def _on_one_device(options):
    """The gradient, and what it takes: bytes and operations."""
    gradient = jax.jit(jax.grad(memjax.compressed(_loss, **CODECS[options])))
    return gradient, *_needs(gradient.lower(*_weights_and_x()).compile())


def _needs(compiled):
    return compiled.memory_analysis().temp_size_in_bytes, compiled.cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("options", "sharded", "kind"),
    [
        ("default", "batch", AxisType.Auto),
        ("default", "tokens", AxisType.Explicit),
        *itertools.product(("groups", "blocks", "channels"), ("tokens",), (AxisType.Auto,)),
        ("error bounded", "batch", AxisType.Auto),
    ],
)
def test_codes_are_made_of_what_a_device_has(options, sharded, kind):
    """Work and bytes of one of 8 devices are those of one device alone, over 8, and only what is small is gathered."""
    ws, x = _weights_and_x()
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    placed = (
        jax.device_put(ws, NamedSharding(mesh, P())),
        jax.device_put(x, NamedSharding(mesh, P("d") if sharded == "batch" else P(None, "d"))),
    )
    gradient, nbytes, flops = _on_one_device(options)
    each = gradient.lower(*placed).compile()
    each_nbytes, each_flops = _needs(each)
    assert 8 * each_flops < 1.1 * flops
    assert 8 * each_nbytes < 1.2 * nbytes
    for shape in re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", each.as_text()):
        assert math.prod(map(int, shape.split(","))) < x.size / 25
    error = np.linalg.norm(jax.device_get(each(*placed)) - _exact()) / np.linalg.norm(_exact())
    assert 0 < error < 0.1


@pytest.mark.parametrize(
    ("codec", "compiled"), [(GroupQuantized(8), True), (ErrorBounded(0.02), True), (ErrorBounded(0.02), False)], ids=str
)
def test_codes_of_explicit_axes_need_no_mesh_around(codec, compiled):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    x = normal(16, 512, 64)
    placed = jax.device_put(x, NamedSharding(mesh, P(None, "d")))
    encode, decode = map(jax.jit, (codec.encode, codec.decode)) if compiled else (codec.encode, codec.decode)
    decoded = decode(encode(placed))
    assert jax.typeof(decoded) == jax.typeof(placed)
    assert np.max(np.abs(jax.device_get(decoded) - x)) < 0.05


def test_parts_along_automatic_axes_that_divide_the_examples():
    mesh = jax.make_mesh((4, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2)
    x, bound = normal(12, 64, 64), np.linspace(0.01, 0.1, 64, dtype=np.float32)
    codec = ErrorBounded(bound)
    code = jax.jit(codec.encode)(jax.device_put(x, NamedSharding(mesh, P("d", None, "t"))))
    assert code.spec == P("d")  # 12 examples are not divisible by 8
    for decoded in (codec.decode(code), jax.jit(codec.decode)(code), codec.decode(jax.tree.map(np.asarray, code))):
        assert np.all(np.abs(jax.device_get(decoded) - x) <= bound)


def test_what_a_sharded_code_tells_is_what_those_of_its_parts_do():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    parts = np.zeros((1, 64, 64), np.float32), normal(1, 64, 64)
    x = jax.device_put(np.concatenate(parts), NamedSharding(mesh, P("d")))
    encode = jax.jit(ErrorBounded(0.02, bits_per_value=2.0).encode)
    code, (zeros, others) = encode(x), map(encode, parts)
    assert zeros.needed_bits_per_value < 2 < others.needed_bits_per_value == code.needed_bits_per_value
    assert code.needed_nbytes == zeros.needed_nbytes + others.needed_nbytes
    assert code.raw_share == (zeros.raw_share + others.raw_share) / 2
    assert [bool(one.overflowed) for one in (zeros, others, code)] == [False, True, True]


@pytest.mark.parametrize("spec", [("d",), (None, None, None, "d"), ("d", "e")])
def test_channel_quantized_of_explicitly_sharded_arrays(spec):
    mesh = jax.make_mesh((2, 2), ("d", "e"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    x = normal(8, 64, 64, 4)
    codec = ChannelQuantized(samples=1000)
    for array in (x, x.reshape(-1, 4)):
        with jax.set_mesh(mesh):
            placed = jax.device_put(array, NamedSharding(mesh, P(*spec[: array.ndim])))
            code = jax.jit(codec.encode)(placed)
        positions = spec[1:3] if array.ndim > 2 else spec[:1]
        whole = any(axis is not None for axis in positions)
        alone = jax.jit((ChannelQuantized() if whole else codec).encode)(array)
        chex.assert_trees_all_equal(jax.device_get(code), jax.device_get(alone))


BOUNDS = np.exp2(-6 - np.arange(64, dtype=np.float32) // 32)  # those of the latter channels are stricter


@pytest.mark.parametrize(
    ("codec", "spec"),
    [
        (ErrorBounded(2**-6), (("d", "e"),)),
        (ErrorBounded(BOUNDS), ("d", None, "e")),
        (BlockQuantized(8), (("d", "e"),)),
        (BlockQuantized(8), ("d", None, "e")),
        (GroupQuantized(8), ("d", None, "e")),
    ],
)
def test_codecs_of_explicitly_sharded_arrays(codec, spec):
    mesh = jax.make_mesh((2, 2), ("d", "e"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    x = normal(4, 64, 64)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P(*spec)))
        got = jax.jit(lambda x: codec.decode(codec.encode(x)))(placed)  # with a bound for each channel it has no hash
        assert jax.typeof(got) == jax.typeof(placed)
    assert np.all(np.abs(jax.device_get(got) - x) <= (codec.bound if isinstance(codec, ErrorBounded) else 0.05))


@pytest.mark.parametrize("bits", [8, 6, 5, 4, 3])
def test_a_code_that_is_sharded_afterwards_is_decoded(bits):
    """On a mesh of explicit axes JAX wants all operands of an operation sharded alike."""
    codec, x = PositionQuantized(bits), normal(8, 64, 128)
    code = jax.jit(codec.encode)(x)
    wanted = jax.jit(codec.decode)(code)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        at = lambda a: NamedSharding(mesh, P("d") if a.shape[:1] == (8,) else P())
        got = jax.jit(codec.decode)(jax.tree.map(lambda a: jax.device_put(a, at(a)), code))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))
