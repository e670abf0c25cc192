"""`RectifiedBlocks`: zeros stay zeros, positive values stay positive, and errors are at most half a distance of levels."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from memjax.compress import Codec
from memjax.compress._codecs.block_quantized import RectifiedBlocks
from memjax.compress._codecs.codec import StepErrors
from tests.compress.codecs.round_trip import normal, round_trip

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
LEAST = {jnp.float32: 2.0**-126, jnp.bfloat16: 2.0**-126, jnp.float16: 2.0**-24}
EPS = {jnp.float32: 2.0**-22, jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-11}  # of levels in float32, and of the dtype


@jax.jit(static_argnums=0)
def _encoded(codec, x):
    code = codec.encode(x)
    return code, codec.decode(code), codec.nonzero(code), x > 0


@jax.jit
def _is_positive_or_zero(y):
    return y > 0, y == 0


def check(codec, x, largest):
    """What the class promises of `x`, whose blocks have these largest values, which broadcast against it."""
    code, decoded, nonzero, positive = _encoded(codec, x)
    dtype = x.dtype.type
    chex.assert_trees_all_equal_shapes_and_dtypes(decoded, x)
    kept = jnp.dtype(jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32)  # of distances, rounded up
    assert codec.nbytes(jax.typeof(x)) == -(-x.size * codec.bits // 8) + kept.itemsize * code.ranges[0].size
    np.testing.assert_array_equal(nonzero, positive)
    is_positive, is_zero = _is_positive_or_zero(decoded)
    np.testing.assert_array_equal(is_positive, positive)
    np.testing.assert_array_equal(is_zero, ~np.asarray(positive))
    wide, got = np.asarray(x, np.float64), np.asarray(decoded, np.float64)
    distance = np.maximum(np.float64(largest) / (2**codec.bits - 1), 2 * LEAST[dtype])
    more = 1 + (2.0**-7 if kept == jnp.bfloat16 else 1e-5)
    assert (got <= largest * more + LEAST[dtype]).all()
    rounding = EPS[dtype] * np.maximum(wide, got) + LEAST[dtype] / 2
    assert (np.abs(got - wide) <= distance / 2 * more + rounding).all()
    return wide, got


def test_levels_are_the_middles_of_what_they_stand_for():
    x = np.float32([0, 1e-30, 0.5, 1, 1.5, 2, 7.2, 14, 14.1, 15])
    middles = [0, 0.5, 0.5, 0.5, 1.5, 1.5, 7.5, 13.5, 14.5, 14.5]
    np.testing.assert_array_equal(round_trip(RectifiedBlocks(4), x), np.float32(middles))
    x = np.float32([*(np.arange(255) + 0.9), 255])  # not between two levels, where rounding decides
    middles = np.minimum(np.arange(256) + 0.5, 254.5)
    np.testing.assert_allclose(round_trip(RectifiedBlocks(8), x), middles, rtol=1e-6)
    assert isinstance(RectifiedBlocks(), Codec)


@pytest.mark.parametrize(("bits", "dtype"), [(8, jnp.float32), (4, jnp.bfloat16), (8, jnp.float16)])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_zeros_are_exact_and_errors_are_half_a_distance(bits, dtype, data):
    """Three channels in a block each, with values from the dtype's smallest to its largest."""
    lowest, highest = (-24, 16) if dtype == jnp.float16 else (-149, 128)
    tops = data.draw(st.lists(st.integers(lowest, highest), min_size=3, max_size=3))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    below = rng.choice([0, 1, 2, 5, 10, 300], (64, 3))
    x = np.ldexp(rng.uniform(0.5, 1, (64, 3)), np.asarray(tops) - below) * (rng.uniform(size=(64, 3)) < 0.7)
    x = np.minimum(x, float(jnp.finfo(dtype).max)).astype(dtype)
    check(RectifiedBlocks(bits), x, np.asarray(x, np.float64).max(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("bits", [4, 8])
def test_extremes(bits, dtype):
    codec, finfo = RectifiedBlocks(bits), jnp.finfo(dtype)
    largest = float(finfo.max)
    wide, got = check(codec, np.full((64, 3), largest, dtype), largest)
    assert (got > 0.96 * wide).all()
    smallest = float(finfo.smallest_subnormal)
    check(codec, np.array([largest] + 63 * [smallest], dtype), largest)
    for value in (0.0, smallest, float(finfo.tiny), LEAST[dtype], 2 * LEAST[dtype]):
        check(codec, np.full(64, value, dtype), value)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (1, 1), (5, 0), (7, 9, 11), (5000,), (7, 4099), (2, 1021, 5)])
def test_sizes(shape):
    x = np.maximum(normal(*shape), np.float32(0))
    check(RectifiedBlocks(8), x, np.asarray(x).max(initial=0))


def test_blocks_have_distances_of_their_own():
    codec = RectifiedBlocks(8, block=64)
    x = np.maximum(normal(4, 256, 16), 0) * np.float32(10) ** np.arange(-8, 8, dtype=np.float32)
    largest = np.asarray(x).reshape(16, 64, 16).max(1).repeat(64, 0).reshape(x.shape)
    wide, got = check(codec, x, largest)
    assert np.abs(got - wide).max((0, 1)) / largest.max((0, 1)) == pytest.approx(1 / 510, rel=0.1)
    assert codec.nbytes(x) == x.size + 4 * x.size // 64


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_what_is_not_finite_makes_its_channel_of_its_block_nan(bad):
    """And the mask is right there, too."""
    codec = RectifiedBlocks(8, block=64)
    x = np.ones((2, 128, 4), np.float32)
    x[:, ::2], x[1, 71, 2] = 0, bad
    _, decoded, nonzero, positive = _encoded(codec, x)
    decoded = np.asarray(decoded)
    assert np.isnan(decoded[1, 64:, 2]).all()
    assert np.isnan(decoded).sum() == 64
    np.testing.assert_array_equal(nonzero, positive)
    x[1, 64:, 2] = 1
    np.testing.assert_allclose(np.nan_to_num(decoded, nan=1), x, atol=1 / 500)


@pytest.mark.parametrize("bits", [4, 8])
def test_under_transformations(bits):
    codec = RectifiedBlocks(bits)
    x = np.maximum(normal(3, 64, 20, 48), 0)
    alone = np.stack([round_trip(codec, one) for one in x])

    @jax.jit
    def stacked(x):
        _, codes = jax.lax.scan(lambda _, x: (None, codec.encode(x)), None, x)
        return jax.lax.scan(lambda _, code: (None, codec.decode(code)), None, codes, reverse=True)[1]

    np.testing.assert_array_equal(stacked(x), alone)
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda x: codec.decode(codec.encode(x))))(x), alone)


@pytest.mark.parametrize("spec", [(("d", "e"),), ("d", None, "e")])
def test_explicitly_sharded_arrays(spec):
    mesh = jax.make_mesh((2, 2), ("d", "e"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    x = np.maximum(normal(4, 64, 64), 0)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        _, decoded, nonzero, positive = _encoded(RectifiedBlocks(8), placed)
        assert jax.typeof(decoded) == jax.typeof(placed)
    np.testing.assert_array_equal(jax.device_get(nonzero), jax.device_get(positive))
    assert np.abs(jax.device_get(decoded) - x).max() < x.max() / 500


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_errors_of_its_steps_keep_zeros(dtype):
    codec = RectifiedBlocks(4)
    x = np.maximum(normal(256, 16), 0).astype(dtype)
    found = np.asarray(jax.jit(StepErrors(codec, 0, 1.0).encode)(x))
    np.testing.assert_array_equal(found == 0, x == 0)
    error = np.abs(np.float64(found) - np.float64(x)).max(0) / (np.float64(x).max(0) / 15)
    assert (error <= 0.5 + 15 * EPS[dtype]).all()
    assert (error > 0.4).all()
    # An error that is minus the value would make a zero of it.
    least = np.full(64, LEAST[dtype], dtype)
    assert np.asarray(jax.jit(StepErrors(codec, 0, 1e6).encode)(least)).all()
