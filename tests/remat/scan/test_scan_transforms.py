"""`remat.scan` under the transformations of JAX: vmap, shard_map, checkpoint, cond, derivatives of derivatives."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from memjax.remat import scan
from tests.remat.scan.scan_cases import LEAST, MIXED, arguments, close, loss

pytestmark = pytest.mark.usefixtures("x64")


def stacked(length):
    params, h, xs = arguments(length)
    return params, jnp.stack([h, 2 * h]), jnp.stack([xs, xs / 2], 1)


def vmap_of_gradient(run):
    params, h, xs = stacked(7)
    params = jax.tree.map(lambda w: jnp.stack([w, w / 3]), params)
    return jax.jit(jax.vmap(jax.grad(run, (0, 1, 2)), (0, None, 1)))(params, h[0], xs)


def gradient_of_vmap(run):
    return jax.grad(lambda *values: jax.vmap(run, (None, 0, 1))(*values).sum(), (0, 1, 2))(*stacked(7))


def gradient_of_gradient(run):
    def of_gradient(*values):
        return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(jax.grad(run, (0, 1, 2))(*values)))

    return jax.jit(jax.grad(of_gradient, (0, 1, 2)))(*arguments(7))


def third_derivative(run):
    params, h, xs = arguments(5)

    def again(function):
        return lambda h: jnp.sin(jax.grad(function)(h)).sum()

    return jax.jit(jax.grad(again(again(lambda h: run(params, h, xs)))))(h)


def forward_over_reverse(run):
    return jax.jit(jax.jacfwd(jax.jit(jax.grad(run, 1)), 1))(*arguments(7))


def sharded(run):
    params, h, xs = arguments(7)
    h, xs = jnp.tile(h, (8, 1)), jnp.tile(xs, (1, 8, 1)) / jnp.arange(1.0, 17.0)[:, None]
    spec = jax.sharding.PartitionSpec
    specs = (spec(), spec("b"), spec(None, "b"))
    mesh = jax.make_mesh((8,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    outside = jax.shard_map(lambda *v: lax.psum(run(*v), "b"), mesh=mesh, in_specs=specs, out_specs=spec())
    inside = jax.shard_map(jax.grad(run, (0, 1, 2)), mesh=mesh, in_specs=specs, out_specs=specs)
    return jax.jit(jax.grad(outside, (0, 1, 2)))(params, h, xs), jax.jit(inside)(params, h, xs)


def inside_scan_and_checkpoint(run):
    params, h, xs = arguments(7)

    def total(params, h, xs):
        step = jax.checkpoint(lambda h, x: (h / 2 + run(params, h, x), None))
        return lax.scan(step, h, jnp.stack([xs, xs / 3]))[0].sum()

    return jax.jit(jax.grad(total, (0, 1, 2)))(params, h, xs)


def inside_cond(run):
    params, h, xs = arguments(7)

    def either(h, xs):
        return lax.cond(h.sum() > 9e9, lambda: h.sum(), lambda: run(params, h, xs))

    return jax.jit(jax.grad(either, (0, 1)))(h, xs)


@pytest.mark.parametrize("way", [MIXED, LEAST], ids=str)
@pytest.mark.parametrize(
    "transform",
    [
        vmap_of_gradient,
        gradient_of_vmap,
        gradient_of_gradient,
        third_derivative,
        forward_over_reverse,
        sharded,
        inside_scan_and_checkpoint,
        inside_cond,
    ],
)
def test_transforms(transform, way):
    close(transform(functools.partial(loss, scan, **way)), transform(functools.partial(loss, lax.scan)))
