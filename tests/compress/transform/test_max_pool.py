"""Max-pooling that keeps indices, by itself and inside `compressed`."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from memjax import compressed
from memjax.compress._transform.max_pool import _woven, axes_of, max_pool, max_pool_gradient, plan_of, with_index
from tests.compress.codecs.round_trip import normal
from tests.compress.kept import kept_of_sum
from tests.compress.networks import EXACT


def pools(size, strides, padding):
    """JAX's, and that with an index."""
    none = (1,) * len(size)
    more = {"padding": padding, "base_dilation": none, "window_dilation": none}
    return (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, size, strides, padding),
        lambda x: max_pool(x, window_dimensions=size, window_strides=strides, **more),
    )


@pytest.mark.parametrize(
    ("shape", "size", "strides", "padding"),
    [
        ((8, 64), (2, 2), (8, 9), ((0, 0), (0, 0))),  # strides beyond windows
        ((7, 9), (3, 5), (1, 2), ((2, 0), (1, 3))),
        ((9, 9), (3, 3), (2, 2), ((1, 1), (0, 2))),
        ((2,), (4,), (1,), ((0, 0),)),  # no output
        ((1, 7), (3, 3), (4, 3), ((0, 0), (0, 0))),
        ((0,), (1,), (3,), ((0, 2),)),  # no input
    ],
)
def test_values_and_gradients_are_those_of_the_primitive(shape, size, strides, padding):
    x = np.round(2 * normal(*shape))  # many are equal

    @jax.jit
    def both(x):
        results = []
        for pool in pools(size, strides, padding):
            out, pull = jax.vjp(pool, x)
            results.append((out, pull(jnp.arange(out.size, dtype=out.dtype).reshape(out.shape))))
        return results

    chex.assert_trees_all_equal(*both(x))


KERNEL_CASES = [
    ((2, 9, 40, 24), (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))),
    ((1, 12, 5, 3), (1, 3, 2, 1), (1, 1, 3, 1), ((0, 0), (0, 2), (1, 1), (0, 0))),
    ((300, 7), (4, 1), (3, 1), ((2, 1), (0, 0))),
    ((3, 40), (1, 5), (1, 2), ((0, 0), (4, 4))),
    ((7, 6, 5), (3, 3, 3), (2, 2, 2), ((1, 1), (1, 1), (1, 1))),
    ((1,), (2,), (1,), ((1, 0),)),
]


@pytest.mark.parametrize(
    ("shape", "size", "strides", "padding", "dtype"),
    [(*case, jnp.float32) for case in KERNEL_CASES] + [(*case, jnp.bfloat16) for case in KERNEL_CASES[:2]],
)
def test_the_kernel_of_the_gradient(shape, size, strides, padding, dtype):
    check_kernel(shape, size, strides, padding, dtype, interpret=True)


def check_kernel(shape, size, strides, padding, dtype, interpret):
    """Against what XLA makes of the same sums, in the same order."""
    axes = axes_of(shape, size, strides, padding)
    x = np.round(2 * normal(*shape)).astype(dtype)
    out, index = jax.jit(with_index, static_argnums=1)(x, axes)
    ct = normal(*out.shape, seed=1).astype(dtype)
    [wanted] = jax.jit(functools.partial(_woven, axes))(index, ct)
    plan = plan_of(axes)
    got = jax.jit(functools.partial(max_pool_gradient, plan, interpret=interpret))(index, ct)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32).reshape(-1))


def test_what_is_cut_off():
    plain, pool = pools((3,), (2,), ((-2, 0),))
    np.testing.assert_array_equal(*jax.jit(lambda x: (plain(x), pool(x)))(normal(9)))


def test_plan():
    axes = axes_of((256, 112, 112, 64), (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))
    plan = plan_of(axes)
    assert (plan.outer, [axis.begun for axis in plan.axes], plan.inner) == (256, [57, 57], 64)
    assert plan.share_of_lanes == 57 * 64 / 4096
    first = axes_of((256, 64, 112, 112), (1, 1, 3, 3), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1)))
    assert plan_of(first).share_of_lanes < 0.1


def test_signed_zeros_and_nans():
    plain, pool = pools((2,), (2,), ((0, 0),))
    x = np.float32([-0.0, 0.0, 0.0, -0.0, np.nan, 1.0, 1.0, np.nan])
    out, wanted, ct = jax.jit(lambda x: (pool(x), plain(x), jax.grad(lambda x: jnp.sum(pool(x)))(x)))(x)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(np.signbit(out)[:2], np.signbit(wanted)[:2])
    np.testing.assert_array_equal(ct[4:], [1, 0, 0, 1])  # to the NaN


@pytest.mark.parametrize(
    ("size", "strides", "padding"), [(3, 2, (1, 1)), (2, 3, (0, 0)), (1, 2, (0, 0)), (9, 1, (0, 0))]
)
def test_explicit_sharding(size, strides, padding):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    plain, pool = pools((1, size, size, 1), (1, strides, strides, 1), ((0, 0), padding, padding, (0, 0)))
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(4, 8, 8, 2), NamedSharding(mesh, PartitionSpec("d")))
        gradient = lambda f: jax.grad(lambda x: jnp.sum(f(jnp.tanh(x))))
        wanted, got = jax.jit(lambda x: (gradient(plain)(x), gradient(pool)(x)))(x)
    np.testing.assert_allclose(jax.device_get(wanted), jax.device_get(got), rtol=1e-6)


@pytest.mark.parametrize(
    ("window", "stride", "padding"),
    [
        ((2, 2), (2, 2), "VALID"),
        ((3, 3), (2, 2), "SAME"),
        ((3, 2), (1, 3), "SAME"),
        ((3, 2), (1, 3), "VALID"),
        ((2, 5), (4, 3), "SAME"),
    ],
)
def test_max_pool_keeps_an_index(window, stride, padding):
    """Many values are equal, in bfloat16; the gradient goes to the first."""
    x = np.round(2 * normal(4, 17, 19, 16)).astype(jnp.bfloat16)

    def pool(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, *window, 1), (1, *stride, 1), padding)

    wrapped = compressed(pool, EXACT)
    out = jax.eval_shape(pool, x)
    ct = np.round(4 * normal(*out.shape, seed=1)).astype(jnp.bfloat16)  # sums are exact

    @jax.jit
    def both(x, ct):
        results = []
        for f in (pool, wrapped):
            out, pull = jax.vjp(f, x)
            results.append((out, pull(ct)))
        return results

    chex.assert_trees_all_equal(*both(x, ct))
    assert kept_of_sum(wrapped, x) == out.size
