"""The same questions for transforms of recomputation: named axes of `vmap`, manual and explicit axes of a mesh."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax
from memjax.compress import BlockQuantized, ChannelQuantized, ErrorBounded, GroupQuantized, PositionQuantized
from memjax.remat import chain, chain_costs, chain_schedule, scan

DEPTH, WIDTH = 6, 16


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def by_chain(share):
    """The scan as a chain of blocks, with a schedule for a share of what the plain chain keeps."""

    def run(f, x, ws):
        blocks, params = [lambda w, x: f(x, w)[0]] * DEPTH, list(ws)
        costs = chain_costs([lambda w, x: jnp.tanh(x @ w)] * DEPTH, params, x)
        most = chain_schedule(costs, 2**30).nbytes
        return chain(blocks, params, x, schedule=chain_schedule(costs, int(share * most))), None

    return run


WAYS = {
    "slots": functools.partial(scan, slots=2),
    "many slots": functools.partial(scan, slots=DEPTH),
    "internal": functools.partial(scan, slots=4, strategy="internal"),
    "budget": functools.partial(scan, budget="min"),
    "chain": by_chain(1),
    "chain, less": by_chain(0.75),
}
ways = pytest.mark.parametrize("way", WAYS)


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


@ways
def test_a_collective_over_a_named_axis_of_vmap(way, x64):
    ws, x = 0.3 * normal(0, DEPTH, WIDTH, WIDTH), normal(1, 3, WIDTH)

    def step(x, w):
        x = jnp.tanh(x @ w)
        return x - jax.lax.pmean(x, "batch"), None

    def gradient(run):
        losses = lambda ws, x: jax.vmap(lambda x: jnp.sum(run(step, x, ws)[0] ** 2), axis_name="batch")(x)
        return jax.jit(jax.grad(lambda ws, x: jnp.mean(losses(ws, x)), (0, 1)))(ws, x)

    close(gradient(WAYS[way]), gradient(jax.lax.scan))


@ways
@pytest.mark.parametrize("check_vma", [True, False])
def test_some_axes_are_manual(way, check_vma, x64):
    mesh = jax.make_mesh((4, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2)
    ws, x = 0.3 * normal(0, DEPTH, WIDTH, WIDTH), normal(1, 8, WIDTH)

    def gradient(run):
        of_device = lambda ws, x: jnp.sum(run(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)[None]
        specs = {"axis_names": {"d"}, "in_specs": (P(), P("d")), "out_specs": P("d")}
        sharded = jax.shard_map(of_device, mesh=mesh, check_vma=check_vma, **specs)
        return jax.jit(jax.grad(lambda ws, x: jnp.sum(sharded(ws, x)), (0, 1)))(ws, x)

    close(gradient(WAYS[way]), gradient(jax.lax.scan))


@pytest.mark.parametrize("way", ["slots", "many slots", "internal", "budget"])
@pytest.mark.parametrize("ys", ["arrays", "numbers"])
def test_explicit_axes(way, ys, x64):
    ws, x = 0.3 * normal(0, DEPTH, WIDTH, WIDTH), normal(1, 8, WIDTH)

    def gradient(run, ws, x):
        def step(x, w):
            x = jnp.tanh(x @ w)
            return x, 2 * x if ys == "arrays" else jnp.sum(x)

        def loss(ws, x):
            x, ys = run(step, x, ws)
            return jnp.sum(x**2) + jnp.sum(ys**2)

        return jax.device_get(jax.jit(jax.grad(loss, (0, 1)))(ws, x))

    expected = gradient(jax.lax.scan, ws, x)
    mesh = jax.make_mesh((8,), ("d",))
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    with jax.set_mesh(mesh):
        close(gradient(WAYS[way], place(ws), place(x, "d")), expected)


@pytest.mark.parametrize("keep", ["features", "convolutions"])
@pytest.mark.parametrize("bottleneck", [None, 2])
def test_dense_block_on_explicit_axes(keep, bottleneck):
    options = {"in_features": 8, "growth_rate": 4, "num_layers": 2, "bottleneck": bottleneck, "keep": keep}
    graph, params, rest = nnx.split(memjax.remat.DenseBlock(**options, rngs=nnx.Rngs(0)), nnx.Param, ...)
    gradient = jax.jit(jax.grad(lambda params, rest, x: jnp.mean(nnx.merge(graph, params, rest, copy=True)(x) ** 2)))
    x = normal(1, 8, 4, 4, 8)
    expected = gradient(params, rest, x)
    mesh = jax.make_mesh((8,), ("d",))
    place = lambda tree, *spec: jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P(*spec))), tree)
    with jax.set_mesh(mesh):
        found = jax.device_get(gradient(place(params), place(rest), place(x, "d")))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


CODECS = {
    "default": {},
    "4 bits": {"bits": 4},
    "blocks": {"codec": BlockQuantized(8)},
    "channels": {"codec": ChannelQuantized(8)},
    "groups": {"codec": GroupQuantized(4)},
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("sharded", ["batch", "tokens"])
@pytest.mark.parametrize("options", CODECS)
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


@pytest.mark.parametrize("codec", [GroupQuantized(8), PositionQuantized(8), ErrorBounded(0.02)], ids=str)
def test_codes_of_explicit_axes_need_no_mesh_around(codec):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(normal(0, 16, 512, 64), NamedSharding(mesh, P(None, "d")))
    for encode in (codec.encode, jax.jit(codec.encode)):
        decoded = codec.decode(encode(x))
        assert jax.typeof(decoded) == jax.typeof(x)
        assert jnp.max(jnp.abs(jax.device_get(decoded) - jax.device_get(x))) < 0.05
