"""The kernels, interpreted, against the plain version: the same codes and values, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.compress import ErrorBounded
from memjax.compress._error_bounded import launch
from tests.compress.error_bounded.kernel_cases import check_same, check_same_batched, values_of_all_kinds

# What takes time is to compile: all of float32 by channel is one program, with a capacity that nearly all codes keep within.
# It decodes with signs: without them, float16 is decoded.
BY_CHANNEL = 3, 64, 128
CAPACITY = 24000
check_by_channel = functools.partial(check_same, capacity=CAPACITY, signs=(True,))


def by_channel(values: np.ndarray) -> jax.Array:
    """Six tiles as three rows of two, side by side."""
    return jnp.asarray(values.reshape(3, 2, 64, 64).transpose(0, 2, 1, 3).reshape(BY_CHANNEL))


def test_float32_by_channel():
    bounds = np.exp2(np.arange(128) % 3 - 2).astype(np.float32)
    bounds[[5, 70]] = 0, np.nan  # stored as they are, and their neighbours with them
    assert check_by_channel(by_channel(values_of_all_kinds(jnp.float32)), bounds) <= CAPACITY


def test_few_steps_without_signs_and_the_ends_of_exponents():
    x = np.abs(values_of_all_kinds(jnp.float32, 4)[:4096])
    x, same = by_channel(np.resize(x, 6 * 4096)), np.ones(128, np.float32)
    assert check_by_channel(x, same) <= CAPACITY
    for exponent in (-112, 111):
        scale = jnp.float32(2.0**exponent)
        assert check_by_channel(x * scale, np.float32(2.0 ** (exponent - 1)) * same) <= CAPACITY


def test_capacity_that_does_not_suffice():
    """All is stored as it is."""
    x = jnp.full(BY_CHANNEL, 1.5, jnp.float32)
    assert check_by_channel(x, np.zeros(128, np.float32)) == x.size > CAPACITY


def test_float16_under_vmap_with_bounds_that_vary_within_lanes():
    """Two arrays, whose tiles share no counter and no words."""
    xs = values_of_all_kinds(jnp.float16, 4)[: 24 * 682].reshape(2, -1, 24)  # and padding
    bounds = np.exp2(np.arange(24) % 5 - 1).astype(np.float32)
    bounds[3] = 0  # of a channel that is stored as it is
    check_same_batched(jnp.asarray(xs), bounds)


@pytest.mark.smoke
def test_empty():
    code = launch.encode(jnp.zeros((0, 3), jnp.bfloat16), jnp.int32(0), 0, interpret=True)
    assert code.needed == 0
    assert launch.decode(code, jnp.int32(0), (0, 3), jnp.bfloat16, interpret=True).shape == (0, 3)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="refusal on machines without a GPU")
def test_kernels_refuse_a_machine_that_cannot_run_them():
    with pytest.raises(
        ValueError, match='implementation must be "jnp" or None here, got "pallas": it needs an NVIDIA GPU'
    ):
        ErrorBounded(0.1, implementation="pallas").encode(jnp.zeros(4))


def test_kernels_are_typed_inside_a_shard_map():
    """Interpreted, JAX cannot run them there; on GPUs see `test_kernels_gpu`."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def there_and_back(x):
        code = launch.encode(x, jnp.int32(0), 20000)
        return launch.decode(code, jnp.int32(0), x.shape, x.dtype)

    spread = jax.shard_map(there_and_back, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    assert jax.eval_shape(spread, jnp.ones((64, 4096))).shape == (64, 4096)
