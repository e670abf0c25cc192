"""The kernels, interpreted, against the plain version: the same codes and values, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.compress import ErrorBounded
from memjax.compress._error_bounded.kernels import launch
from tests.compress.kernel_cases import check_same, values_of_all_kinds


@pytest.mark.smoke
def test_bfloat16_by_channel():
    tiles = values_of_all_kinds(jnp.bfloat16).reshape(3, 2, 64, 64)
    x = tiles.transpose(0, 2, 1, 3).reshape(3, 64, 128)  # two tiles side by side
    bounds = np.exp2(np.arange(128) % 3 - 2).astype(np.float32)
    bounds[[5, 70]] = 0, np.nan  # stored as they are, and their neighbours with them
    check_same(jnp.asarray(x), bounds)


def test_few_steps_without_signs_and_the_ends_of_exponents():
    x = np.abs(values_of_all_kinds(jnp.bfloat16, 4)[:4096])
    x = jnp.asarray(np.resize(x, 16384))  # shape and capacity as below, for what takes time is to compile
    check_same(x, np.float32(1), capacity=1000)
    for exponent in (-112, 119):
        scale = jnp.asarray(2.0**exponent, jnp.bfloat16)
        check_same(x * scale, np.float32(2.0 ** (exponent - 1)), capacity=1000)


def test_float32_with_padding_and_the_ends_of_exponents():
    x = jnp.asarray(values_of_all_kinds(jnp.float32)[:-100])
    check_same(x, np.float32(0.5))
    for exponent in (-112, 111):
        check_same(x * jnp.float32(2.0**exponent), np.float32(2.0 ** (exponent - 1)))


def test_float16_with_bounds_that_vary_within_lanes():
    x = values_of_all_kinds(jnp.float16, 4)[: 24 * 682].reshape(-1, 24)  # and padding
    bounds = np.exp2(np.arange(24) % 5 - 1).astype(np.float32)
    bounds[3] = 0  # of a channel that is stored as it is
    check_same(jnp.asarray(x), bounds)


def test_capacity_that_does_not_suffice_and_vmap():
    x = jnp.asarray(values_of_all_kinds(jnp.bfloat16, 4))
    check_same(x, np.float32(0.5), capacity=1000)
    encode = jax.jit(jax.vmap(lambda x: launch.encode(x, jnp.int32(0), 4096, interpret=True)))
    halves = x.reshape(2, -1)
    np.testing.assert_array_equal(encode(halves).words[0, :500], encode(halves[::-1]).words[1, :500])


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
