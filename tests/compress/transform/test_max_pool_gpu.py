"""The kernel of max-pooling's gradient on a GPU."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.compress.transform.test_max_pool import KERNEL_CASES, check_kernel, pools

pytestmark = pytest.mark.gpu
STEM = (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("case", [*KERNEL_CASES, ((64, 112, 112, 64), *STEM)], ids=str)
def test_compiled(case, dtype):
    check_kernel(*case, dtype, interpret=False)


def test_in_vmap_and_shard_map():
    plain, pool = pools(*STEM)
    x = jnp.round(9 * jax.random.normal(jax.random.key(0), (3, 8, 17, 30, 24)))
    gradient = lambda pool: jax.grad(lambda x: jnp.sum(jnp.sin(pool(x))))
    wanted = lax.map(gradient(plain), x)
    chex.assert_trees_all_close(jax.jit(jax.vmap(gradient(pool)))(x), wanted, rtol=1e-6)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.shard_map(gradient(pool), mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    chex.assert_trees_all_close(jax.jit(spread)(x[0]), wanted[0], rtol=1e-6)
