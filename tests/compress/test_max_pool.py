"""The ends of max-pooling that keeps indices; with `compressed` around it, see `test_compressed`."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from memjax.compress._max_pool import max_pool


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
    x = jnp.round(2 * jax.random.normal(jax.random.key(0), shape))  # many are equal
    results = []
    for pool in pools(size, strides, padding):
        out, pull = jax.vjp(pool, x)
        results.append((out, pull(jnp.arange(out.size, dtype=out.dtype).reshape(out.shape))))
    chex.assert_trees_all_equal(*results)


def test_signed_zeros_and_nans():
    plain, pool = pools((2,), (2,), ((0, 0),))
    x = jnp.array([-0.0, 0.0, 0.0, -0.0, jnp.nan, 1.0, 1.0, jnp.nan])
    out, pull = jax.vjp(pool, x)
    np.testing.assert_array_equal(out, plain(x))
    np.testing.assert_array_equal(jnp.signbit(out)[:2], jnp.signbit(plain(x))[:2])
    np.testing.assert_array_equal(pull(jnp.ones(4))[0][4:], [1, 0, 0, 1])  # to the NaN


def test_explicit_sharding():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    plain, pool = pools((1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))
    with jax.set_mesh(mesh):
        x = jax.device_put(jax.random.normal(jax.random.key(0), (4, 8, 8, 2)), NamedSharding(mesh, PartitionSpec("d")))
        wanted, got = (jax.grad(lambda x, f=f: jnp.sum(f(jnp.tanh(x))))(x) for f in (plain, pool))
    chex.assert_trees_all_close(wanted, got)
