"""`PositionQuantized`: errors, bytes, extreme values, sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import memjax
from memjax.compress import BlockQuantized, PositionQuantized
from memjax.compress._codecs.bits import WIDTHS, pack_levels, unpack_levels
from memjax.compress._codecs.codec import StepErrors
from memjax.compress._training.array_bits import Errors

BITS = (8, 6, 5, 4, 3)


def _round_trip(codec, x):
    return jax.jit(lambda x: codec.decode(codec.encode(x)))(x)


def _steps(codec, x):
    """The distance of levels for each value of (positions, features), a multiple of the codec's group."""
    code = jax.jit(codec.encode)(x)
    _, distance, _, size = code.ranges
    size = 8 if size is None else np.asarray(size, np.float64)
    return np.asarray(distance, np.float64).repeat(codec.group, 1) * size


def _relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def _activations(shape, dtype=jnp.float32, outliers=True):
    """Gaussians; positions differ in size, and two channels are far from zero and large."""
    values, positions = jax.random.split(jax.random.key(0))
    x = jax.random.normal(values, shape) * jnp.exp(jax.random.normal(positions, (*shape[:-1], 1)) / 2)
    if outliers:
        x = x.at[..., 3].multiply(20).at[..., 70].add(40)
    return x.astype(dtype)


@pytest.mark.smoke
@pytest.mark.parametrize("bits", BITS)
def test_levels_are_packed_without_gaps(bits):
    level = jax.random.randint(jax.random.key(bits), (3, 5, 40), 0, 2**bits).astype(jnp.uint32)
    planes = pack_levels(level, bits)
    assert sum(plane.nbytes for plane in planes) == level.size * bits // 8
    assert sum(WIDTHS[bits].planes) == bits
    np.testing.assert_array_equal(unpack_levels(planes, bits), level)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_errors_are_within_half_a_step_and_as_predicted(bits, dtype):
    codec = PositionQuantized(bits)
    x = _activations((2400, 256), dtype)
    step, got = _steps(codec, x), _round_trip(codec, x)
    # Beside half a step, the rounding of float32 where channels are centred, and that of the dtype.
    wide, eps = np.asarray(x, np.float64), float(jnp.finfo(dtype).eps)
    error = np.abs(np.asarray(got, np.float64) - wide)
    assert (error <= step * 0.501 + np.abs(wide) * max(eps, 1e-6) * 2 + 1e-5).all()
    # Squares of errors uniform in a step deviate from their mean by 0.89 of it. A step of 8 bits is smaller than the distance of
    # large bfloat16 numbers: only a few values are off.
    chance = 0.5 * 0.89 * np.sqrt((step**4).sum()) / (step**2).sum()
    tolerance = 0.05 if bits == 8 and dtype == jnp.bfloat16 else 0.005 + 4 * chance
    assert _relative(got, x) == pytest.approx(float(jax.jit(codec.relative_error)(x)), rel=tolerance)
    assert np.sqrt((error**2).sum() / (wide**2).sum()) < {8: 0.008, 6: 0.03, 5: 0.055, 4: 0.11, 3: 0.22}[bits]


@pytest.mark.parametrize("bits", BITS)
def test_a_few_large_channels_do_not_make_others_coarse(bits):
    codec, others = PositionQuantized(bits), np.delete(np.arange(256), [3, 70])
    plain, loud = (_activations((1024, 256), outliers=outliers) for outliers in (False, True))
    errors = [_relative(_round_trip(codec, x)[:, others], x[:, others]) for x in (plain, loud)]
    assert errors[1] < 1.15 * errors[0]


@pytest.mark.parametrize("bits", BITS)
def test_unbiased_in_sums_over_positions(bits):
    """Rows that are all equal, the worst case without dither: errors of sums grow with the root of the number of positions."""
    positions = 16384
    row = jax.random.normal(jax.random.key(1), (128,))
    x = jnp.broadcast_to(row, (positions, 128))
    x = x + 0.01 * jax.random.normal(jax.random.key(2), (positions, 1))
    code = jax.jit(PositionQuantized(bits).encode)(x)
    got, wanted = (np.asarray(a, np.float64) for a in (jax.jit(PositionQuantized(bits).decode)(code), x))
    _, distance, _, size = (np.asarray(one, np.float64) for one in code.ranges)
    step = distance.mean() * size
    off = (got - wanted).mean(0) / (step / 12**0.5 / positions**0.5)
    assert np.abs(off).max() < 5
    assert 0.5 < np.sqrt((off**2).mean()) < 1.5


@pytest.mark.parametrize("bits", BITS)
def test_gradient_of_weights_errs_as_predicted(bits):
    """x^T dy for independent cotangents: the relative error of `x`, if each position counts the same."""
    codec, x = PositionQuantized(bits), jax.random.normal(jax.random.key(3), (4096, 128))
    dy = jax.random.normal(jax.random.key(4), (4096, 64))
    assert _relative(_round_trip(codec, x).T @ dy, x.T @ dy) == pytest.approx(
        float(jax.jit(codec.relative_error)(x)), rel=0.1
    )


@pytest.mark.parametrize("bits", BITS)
def test_takes_so_many_bits(bits):
    """In memory, not only by its own account; widths that no group divides, heads, images."""
    codec = PositionQuantized(bits)
    for shape, limit in (
        ((8, 128, 1024), 0.32),
        ((2, 64, 12, 64), 0.26),
        ((700, 1000), 0.55),
        ((3, 4099), 0.5),
        ((2, 32, 32, 3), 0.5),
    ):
        aval = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        size = jax.jit(codec.encode).lower(aval).compile().memory_analysis().output_size_in_bytes
        assert abs(size - codec.nbytes(aval)) <= 64  # a tuple's pointers
        assert 8 * codec.nbytes(aval) / aval.size <= bits + limit


@pytest.mark.parametrize(
    ("bits", "dtype"), list(zip(BITS, [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float32, jnp.bfloat16], strict=True))
)
def test_any_finite_values(bits, dtype):
    """Finite values decode to finite ones, about a step away, with channels measured (600 positions) and without."""
    largest, key = float(jnp.finfo(dtype).max), jax.random.key(0)
    for positions in (8, 600):
        x = jax.random.normal(key, (positions, 64))
        x = x * 10.0 ** jax.random.randint(key, (positions, 1), -44, 38).astype(jnp.float32)
        x = jnp.clip(x, -largest, largest).at[:2, 0].set(jnp.array([largest, -largest])).at[1].set(largest)
        x = x.at[2, :32].set(-largest).at[3].set(0).at[:, 5].set(largest).astype(dtype)
        got = np.asarray(_round_trip(PositionQuantized(bits, group=32), x), np.float64)
        assert np.isfinite(got).all()
        wide = np.asarray(x, np.float64)
        slack = max(float(jnp.finfo(dtype).eps), 1e-5)
        step = _steps(PositionQuantized(bits, group=32), x)
        assert (np.abs(got - wide) <= step * 0.51 + np.abs(wide) * 2 * slack + largest * 0.004).all()


@pytest.mark.parametrize("value", [0.0, -3.5, 3e38, 1e-40])
def test_constants(value):
    x = jnp.full((5, 100), value, jnp.float32)
    np.testing.assert_allclose(_round_trip(PositionQuantized(4), x), x, rtol=2**-8, atol=1e-37)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_nan_stays_in_its_group_of_its_position(bad):
    for positions in (8, 2048):
        x = jnp.ones((positions, 256)).at[2, 130].set(bad)
        got = _round_trip(PositionQuantized(8), x)
        assert np.isnan(got[2, 128:]).all()
        assert np.isnan(got).sum() == 128


def test_under_vmap_and_scan():
    codec, x = PositionQuantized(6), _activations((3, 520, 256))
    alone = np.stack([_round_trip(codec, one) for one in x])
    step = lambda _, x: (None, codec.decode(codec.encode(x)))
    # Programs differ in roundings, so a value may be a level away.
    for got in (jax.jit(jax.vmap(lambda x: codec.decode(codec.encode(x))))(x), jax.lax.scan(step, None, x)[1]):
        assert np.mean(np.abs(got - alone) > 1e-4) < 1e-3


@pytest.mark.parametrize("spec", [(("d", "e"),), ("d", None, "e")])
def test_explicitly_sharded_arrays(spec):
    mesh = jax.make_mesh((2, 2), ("d", "e"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    codec, x = PositionQuantized(8), _activations((4, 1024, 256))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        got = jax.jit(lambda x: codec.decode(codec.encode(x)))(placed)
        assert jax.typeof(got) == jax.typeof(placed)
        predicted = float(jax.jit(codec.relative_error)(placed))
    assert _relative(jax.device_get(got), x) == pytest.approx(predicted, rel=0.02)


def test_refuses():
    with pytest.raises(ValueError, match="bits must be 8, 6, 5, 4 or 3, got 7"):
        PositionQuantized(7)
    with pytest.raises(ValueError, match="group must be an integer of at least 8, got 4"):
        PositionQuantized(8, group=4)
    with pytest.raises(TypeError, match="x must be bfloat16, float16 or float32, got int32"):
        PositionQuantized().encode(jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeError, match=r"code must be what PositionQuantized\.encode returns"):
        PositionQuantized().decode(jnp.zeros(3))


def test_step_errors_are_as_large_as_those_of_codes():
    """Gradients through what `bits=` encodes: random errors in steps of the codes predict those of the codes."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, target = (jax.random.normal(key, (2048, 128)) for key in keys[:2])
    weights = [
        jax.random.normal(key, shape) / 128**0.5 for key, shape in zip(keys[2:], [(128, 256), (256, 128)], strict=True)
    ]

    def gradient(*how, **bits):
        def f(weights, x):
            return jax.nn.silu(x @ weights[0]) @ weights[1]

        g = memjax.compressed(f, *how, **bits, inputs="x") if how or bits else f
        return np.concatenate(
            [np.ravel(a) for a in jax.jit(jax.grad(lambda w: jnp.mean((g(w, x) - target) ** 2)))(weights)]
        )

    exact = gradient()
    by_scale = lambda scale: gradient(StepErrors(PositionQuantized(8), 0, scale))
    np.testing.assert_allclose(by_scale(jnp.float32(0)), exact, atol=1e-7)
    for bits in (8, 4):
        measured = np.linalg.norm(gradient(bits=bits) - exact)
        assert measured > 0
        assert np.linalg.norm(gradient(bits=Errors(bits)) - exact) == pytest.approx(measured, rel=0.15)
    few, many = (np.linalg.norm(by_scale(scale) - exact) for scale in (1.0, 17.0))
    assert many == pytest.approx(17 * few, rel=0.15)
    with pytest.raises(ValueError, match="bits must be one of"):
        gradient(bits=Errors(7))


@pytest.mark.parametrize(("codec", "large"), [(PositionQuantized(4), 1e30), (BlockQuantized(8), 7e37)], ids=repr)
def test_steps_are_those_of_the_code(codec, large):
    """Twice the largest error, nearly, and for ranges beyond float32's, too."""
    x = jax.random.normal(jax.random.key(0), (2, 512, 128))
    for scale in (1.0, large):
        error = np.abs(np.asarray(_round_trip(codec, x * scale), np.float64) - np.asarray(x * scale, np.float64))
        share = error / np.asarray(codec.steps(x * scale), np.float64)
        assert 0.49 < share.max() < 0.51
