"""What `remat.scan` keeps of a step: of less than a byte, replicated over devices, handed on unchanged, or inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from memjax.remat import scan
from tests.remat.scan.scan_cases import HIDDEN, MIXED, arguments, close, loss

pytestmark = pytest.mark.usefixtures("x64")


SUB_BYTE = {"int4": jnp.int4, "uint2": jnp.uint2}


@pytest.mark.parametrize("strategy", ["mixed", "internal", None])
@pytest.mark.parametrize("dtype", SUB_BYTE)
def test_residuals_of_less_than_a_byte(dtype, strategy):
    """Packed, as the schedule counts them, where a row holds words."""
    rounded = jax.custom_vjp(lambda x: x)
    rounded.defvjp(
        lambda x: (x, jnp.round(x).astype(SUB_BYTE[dtype])), lambda kept, ct: (ct * (1 + kept.astype(ct.dtype)),)
    )

    def cell(h, x):
        return jnp.abs(jnp.sort(rounded(h * x))), None

    def total(scan, h, **options):
        return scan(cell, h, jnp.linspace(0.5, 1.2, 11), **options)[0].sum()

    h = jnp.linspace(0.1, 2.9, 21)
    close(
        jax.jit(jax.grad(functools.partial(total, scan, slots=4, strategy=strategy)))(h),
        jax.grad(functools.partial(total, lax.scan))(h),
    )


@pytest.mark.parametrize("strategy", ["mixed", "internal", "hidden"])
@pytest.mark.parametrize("extra", [1, 300], ids=["few replicated", "many replicated"])
def test_replicated_residuals_in_shard_map(strategy, extra):
    """Values that vary over the mesh and values that do not share the slots, and come back as they went in."""

    def run(scan, w, x, **options):
        def cell(carry, w):
            h, n = carry
            scale = jnp.sort(jnp.sin(n * jnp.linspace(1.0, 2.0, extra)))  # the same on all devices
            return (jnp.tanh(h @ w) * jnp.exp(scale).mean(), n + jnp.sin(n) * scale.sum()), None

        (h, n), _ = scan(cell, (x, jnp.float64(0.3)), w, **options)
        return lax.psum((h**2).sum() + n, "b")

    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((4,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    values = jax.device_put([np.random.default_rng(0).normal(size=shape) for shape in ((9, 3, 3), (8, 3))])

    def gradient(scan, **options):
        f = functools.partial(run, scan, **options)
        outside = jax.shard_map(f, mesh=mesh, in_specs=(spec(), spec("b")), out_specs=spec())
        return jax.jit(jax.grad(outside, (0, 1)))(*values)

    close(gradient(scan, slots=12, strategy=strategy), gradient(lax.scan))


def test_what_a_step_hands_on_unchanged_is_no_part_of_the_carry():
    """It takes no slot, keeps its gradient, and comes back as the very array."""
    h, w = jnp.linspace(0.1, 0.9, 3), jnp.linspace(0.5, 0.7, 3)

    def cell(carry, x):
        return {"h": jnp.sin(carry["h"] * carry["w"] + x), "w": carry["w"]}, carry["w"].sum()

    def total(scan, h, w, **options):
        carry, ys = scan(cell, {"h": h, "w": w}, jnp.linspace(0.0, 1.0, 7), **options)
        return (carry["h"] * carry["w"]).sum() + ys.sum()

    for way in ({"slots": 2, "strategy": "hidden"}, {"slots": 8, "strategy": "mixed"}, {"budget": "min"}):
        got = jax.jit(jax.grad(functools.partial(total, scan, **way), (0, 1)))(h, w)
        close(got, jax.grad(functools.partial(total, lax.scan), (0, 1))(h, w))

    def either(x, y):
        same = lambda _, y: scan(lambda y, _: (y, None), y, None, length=2, slots=2)[0]
        return lax.cond(x < 0, same, same, x, y)

    assert jax.vmap(either, (0, None), None)(jnp.arange(3.0), 3.0) == 3.0  # which fails where y was computed
    with pytest.raises(
        ValueError, match=f"the least possible is {2 * 3 * 8 + 3 * 8} bytes"
    ):  # two states and residuals of h
        total(scan, h, w, budget=8)


def test_values_without_differentiation():
    params, h, xs = arguments(9)
    np.testing.assert_array_equal(loss(scan, params, h, xs, slots=2), loss(lax.scan, params, h, xs))


@pytest.mark.parametrize("way", [HIDDEN, MIXED, {"budget": "1MiB"}], ids=str)
def test_inputs_are_not_copied(way):
    """Outside jit the backward pass reads the arrays that it was given."""
    params, h, xs = arguments(20)
    _, vjp = jax.vjp(lambda *values: loss(scan, *values, **way), params, h, xs)
    held = [leaf for leaf in jax.tree.leaves(vjp) if isinstance(leaf, jax.Array)]
    inputs = jax.tree.leaves((params, xs))
    assert all(any(leaf is x for leaf in held) for x in inputs)
    assert not [leaf for leaf in held if any(leaf is not x and _equal(leaf, x) for x in inputs)]


def _equal(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())
