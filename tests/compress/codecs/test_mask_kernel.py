"""The kernel that packs signs on GPUs, against XLA's code: interpreted here, compiled on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.compress import Mask
from memjax.compress._codecs import mask_kernel
from tests.compress.codecs.round_trip import normal

SHAPES = [(2, 28, 28, 64), (3, 32, 32, 96), (2**16,)]  # words in blocks of 32, 256 and 256


def _check(shape, dtype, interpret):
    x = normal(*shape)
    x.reshape(-1)[:5] = 0, -0.0, np.nan, np.inf, 1e-30
    x = jnp.asarray(x, dtype)
    words = jax.jit(functools.partial(mask_kernel.pack_positive, interpret=interpret))(x)
    wanted = jax.jit(lambda x: Mask().encode(x > 0).levels)(x)
    np.testing.assert_array_equal(words, wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_interpreted_kernel(shape):
    _check(shape, jnp.bfloat16, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_compiled_kernel(dtype):
    for shape in SHAPES:
        _check(shape, dtype, interpret=False)
    x = jnp.asarray(normal(16, 28, 28, 64), dtype)
    assert mask_kernel.suits(jax.typeof(x)) == (jax.device_count() == 1)
    code = jax.jit(mask_kernel.encode_positive)(x)
    np.testing.assert_array_equal(jax.jit(Mask().decode)(code), x > 0)


def test_programs_for_other_platforms_have_the_same_codes(monkeypatch):
    """With a GPU at hand a program may still be compiled for a CPU."""
    x = jnp.asarray(normal(4, 32, 32, 96), jnp.bfloat16)
    assert not mask_kernel.suits(jax.core.ShapedArray((2**16 + 32,), x.dtype))
    monkeypatch.setattr(mask_kernel, "has_kernels", lambda: True)
    monkeypatch.setattr(mask_kernel, "is_of_one_device", lambda aval: True)
    assert mask_kernel.suits(jax.typeof(x))
    assert not mask_kernel.suits(jax.core.ShapedArray(x.shape, jnp.float8_e5m2))
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.sharding.set_mesh(mesh):
        spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
        np.testing.assert_array_equal(
            jax.jit(lambda x: mask_kernel.encode_positive(x).levels)(spread), Mask().encode(x > 0).levels
        )
    for encode in (mask_kernel.encode_positive, lambda x: jax.vmap(mask_kernel.encode_positive)(x[None])):
        code = jax.jit(lambda x: encode(x))(x)  # noqa: B023
        np.testing.assert_array_equal(code.levels.reshape(-1), Mask().encode(x > 0).levels)
