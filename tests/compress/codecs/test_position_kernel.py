"""The kernel that encodes `PositionQuantized` on GPUs, against XLA's code: interpreted here, compiled on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.compress import PositionQuantized
from memjax.compress._codecs import position_kernel
from memjax.compress._codecs.position_quantized import _view_of


def _values(dtype, shape=(2, 64, 256)):
    values, sizes = jax.random.split(jax.random.key(0))
    x = jax.random.normal(values, shape) * jnp.exp(2 * jax.random.normal(sizes, shape[-1:]))
    x = x.at[0, 3, 5].set(jnp.nan).at[1, 2, 200].set(jnp.inf).at[1, 9].set(0).at[1, 10].set(3e38).at[0, 11].set(-1e-38)
    return x.astype(dtype)


def _both(codec, x, interpret):
    """Levels, lowest levels and distances by the kernel and by XLA."""
    view = _view_of(x.shape, codec.group)
    shift = jnp.linspace(-1, 1, x.shape[-1], dtype=jnp.float32)
    inverse = jnp.linspace(1e-3, 1 / 8, x.shape[-1], dtype=jnp.float32)
    by_kernel = jax.jit(lambda x: codec._encode_by_kernel(view, x, shift, inverse, interpret=interpret))
    by_xla = jax.jit(lambda x: codec._encode_scaled(x.astype(jnp.float32) * inverse - shift, view))
    return by_kernel(x), by_xla(x)


def _check(codec, x, interpret):
    (planes, *ranges), (expected_planes, *expected_ranges) = _both(codec, x, interpret)
    for got, expected in zip([*planes, *ranges], [*expected_planes, *expected_ranges], strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    low, distance = (np.asarray(a, np.float32) for a in ranges)
    expected_low, expected_distance = (np.asarray(a, np.float32) for a in expected_ranges)
    whole = np.isfinite(distance)
    np.testing.assert_array_equal(whole, np.isfinite(expected_distance))
    assert whole.mean() > 0.98
    # A product and a sum are rounded once or twice, so that the last digit of a range may differ.
    np.testing.assert_allclose(low[whole], expected_low[whole], rtol=2**-7, atol=1e-37)
    np.testing.assert_allclose(distance[whole], expected_distance[whole], rtol=2**-7, atol=1e-37)
    same = whole & (low == expected_low) & (distance == expected_distance)
    assert same.mean() > 0.95
    for got, expected in zip(planes, expected_planes, strict=True):
        assert (np.asarray(got) != np.asarray(expected))[same].mean() < 1e-3


@pytest.mark.parametrize("bits", [8, 6, 5, 4, 3])
def test_interpreted_kernel(bits):
    _check(PositionQuantized(bits), _values(jnp.bfloat16 if bits % 2 else jnp.float32), interpret=True)


def test_interpreted_kernel_in_vmap():
    codec, x = PositionQuantized(4), _values(jnp.bfloat16, (3, 2, 32, 128))
    run = lambda x: _both(codec, x, True)[0]
    of_all, of_one = jax.jit(lambda x: (jax.vmap(run)(x), run(x[1])))(x)
    for together, alone in zip(jax.tree.leaves(of_all), jax.tree.leaves(of_one), strict=True):
        np.testing.assert_array_equal(np.asarray(together[1], np.float32), np.asarray(alone, np.float32))


def _check_channels(interpret):
    """Centres are means, and sizes in proportion to the mean distance from them where that is more than usual in a group."""
    groups, width = 3, 64
    deviations = jnp.ones((groups, width)).at[0, 5].set(50).at[2].set(7)
    means = (jnp.arange(groups * width) / 32 - 3).reshape(groups, width)  # their sums are exact
    x = means + deviations * jax.random.normal(jax.random.key(1), (2, 768, groups, width))
    view = _view_of((2, 768, groups * width), width)
    encode = jax.jit(lambda x: PositionQuantized(8, group=width)._encode_by_kernels(view, x, interpret=interpret)[1:])
    centre, size = (one.reshape(groups, width) for one in encode(x.reshape(2, 768, -1)))
    assert np.max(np.abs(centre - means) / deviations) < 5 / 256**0.5
    usual = np.mean(np.asarray(deviations) ** 0.5, -1, keepdims=True) ** 2
    np.testing.assert_allclose(size, 8 * np.maximum(1, deviations / usual), rtol=0.25)
    still = jnp.broadcast_to(means, x.shape).reshape(2, 768, -1)
    centre, size = encode(still)
    np.testing.assert_allclose(centre, means.reshape(-1), rtol=2**-7)
    np.testing.assert_array_equal(size, 8)


def test_interpreted_measure():
    _check_channels(interpret=True)


@pytest.mark.gpu
def test_compiled_measure():
    _check_channels(interpret=False)


def test_the_kernel_is_for_gpus_and_shapes_that_fill_its_blocks():
    if jax.default_backend() != "gpu":
        assert not position_kernel.suits(jax.core.ShapedArray((512, 512), jnp.bfloat16), (512, 4, 128))
    for positions, width in ((511, 128), (512, 96), (512, 2048)):
        aval = jax.core.ShapedArray((positions, 4 * width), jnp.bfloat16)
        assert not position_kernel.suits(aval, (positions, 4, width))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("bits", [8, 6, 5, 4, 3])
def test_compiled_kernel(bits, dtype):
    x = _values(jnp.float32, (4, 1024, 512))
    x = jnp.clip(x, -6e4, 6e4).astype(dtype)
    _check(PositionQuantized(bits), x, interpret=False)
    assert position_kernel.suits(jax.typeof(x), (4096, 4, 128)) == (jax.device_count() == 1)
    finite = jnp.nan_to_num(x)
    codec = PositionQuantized(bits)
    step = codec.steps(finite)
    got = jax.jit(lambda x: codec.decode(codec.encode(x)))(finite)
    error = jnp.abs(got.astype(jnp.float32) - finite.astype(jnp.float32))
    assert float((error / (step * 0.51 + jnp.abs(finite).astype(jnp.float32) * 2**-7 + 1e-4)).max()) <= 1
