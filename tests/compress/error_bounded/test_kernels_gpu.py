"""The kernels on a GPU against the plain version, and integers of four bits, which only XLA for GPUs packs in its own way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.compress._error_bounded import launch, tiles
from tests.compress.codecs.test_codecs import check_transformations
from tests.compress.error_bounded.kernel_cases import check_same, values_of_all_kinds
from tests.compress.patterns import every_16_bit_pattern, random_float32_patterns

pytestmark = pytest.mark.gpu
DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_lanes_of_all_kinds(dtype):
    values = values_of_all_kinds(dtype, 3000)
    check_same(jnp.asarray(values), np.float32(0.5), interpret=False)
    check_same(jnp.asarray(values[:-77]), np.float32(0.5), capacity=10**5, interpret=False)
    bounds = np.exp2(np.arange(96) % 7 - 4).astype(np.float32)
    check_same(jnp.asarray(values).reshape(-1, 128), np.resize(bounds, 128), interpret=False)
    check_same(jnp.asarray(values).reshape(-1, 96), bounds, interpret=False)
    check_same(jnp.asarray(values).reshape(-1, 24), bounds[:24], interpret=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_vmap(dtype):
    x = jnp.asarray(values_of_all_kinds(dtype, 9)).reshape(3, 3, 64, 64)
    encode = lambda x: launch.encode(x, jnp.int32(0), 20000)
    decode = lambda code: tiles.to_bits(launch.decode(code, jnp.int32(0), x.shape[1:], dtype))
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda x: decode(encode(x))))(x)[1], decode(encode(x[1])))


def test_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.asarray(values_of_all_kinds(jnp.bfloat16, 9)).reshape(-1, 64)

    def there_and_back(x):
        code = launch.encode(x, jnp.int32(0), 20000)
        return launch.decode(code, jnp.int32(0), x.shape, x.dtype)

    spread = jax.shard_map(there_and_back, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    np.testing.assert_array_equal(*(tiles.to_bits(jax.jit(f)(x)) for f in (spread, there_and_back)))


@pytest.mark.parametrize("bound", [1e-30, 1e-4, 2.0**-7, 0.37, 1e20])
def test_bit_patterns(bound):
    check_same(random_float32_patterns(0, 2**20), np.float32(bound), interpret=False)
    for dtype in DTYPES[:2]:
        check_same(every_16_bit_pattern(dtype), np.float32(bound), interpret=False)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_levels(bits):
    check_transformations(bits)
