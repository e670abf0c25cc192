"""The same questions for transforms of recomputation: named axes of `vmap`, manual and explicit axes of a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax
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
