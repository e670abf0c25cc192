"""`PositionQuantized`: errors, bytes, extreme values, sharding."""

import functools

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
from tests.compress.codecs.round_trip import normal, round_trip

BITS = (8, 6, 5, 4, 3)


@functools.partial(jax.jit, static_argnums=0)
def _coded(codec, x):
    """The code, the round trip, and the error that the codec tells, in one program."""
    code = codec.encode(x)
    return code, codec.decode(code), codec.relative_error(x)


def _steps(codec, code):
    """The distance of levels for each value of (positions, features), a multiple of the codec's group."""
    _, distance, _, size = code.ranges
    size = 8 if size is None else np.asarray(size, np.float64)
    return np.asarray(distance, np.float64).repeat(codec.group, 1) * size


def _relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def _activations(shape, dtype=jnp.float32, outliers=True):
    """Gaussians; positions differ in size, and two channels are far from zero and large."""
    x = normal(*shape) * np.exp(normal(*shape[:-1], 1, seed=1) / 2)
    if outliers:
        x[..., 3] *= 20
        x[..., 70] += 40
    return x.astype(dtype)


@pytest.mark.smoke
@pytest.mark.parametrize("bits", BITS)
def test_levels_are_packed_without_gaps(bits):
    assert sum(WIDTHS[bits].planes) == bits
    for shape in ((3, 5, 40), (2, 8), (0, 16)):
        level = np.random.default_rng(bits).integers(0, 2**bits, shape, np.uint32)
        planes = jax.jit(pack_levels, static_argnums=1)(level | np.uint32(0x50000), bits)
        assert sum(plane.nbytes for plane in planes) == level.size * bits // 8
        np.testing.assert_array_equal(jax.jit(unpack_levels, static_argnums=1)(planes, bits), level)


@pytest.mark.parametrize(
    ("bits", "dtype"), [*((bits, jnp.float32) for bits in BITS), (8, jnp.bfloat16), (4, jnp.bfloat16)]
)
def test_errors_are_within_half_a_step_and_as_predicted(bits, dtype):
    codec = PositionQuantized(bits)
    x = _activations((2400, 256), dtype)
    code, got, predicted = _coded(codec, x)
    step = _steps(codec, code)
    # Beside half a step, the rounding of float32 where channels are centred, and that of the dtype.
    wide, eps = np.asarray(x, np.float64), float(jnp.finfo(dtype).eps)
    error = np.abs(np.asarray(got, np.float64) - wide)
    assert (error <= step * 0.501 + np.abs(wide) * max(eps, 1e-6) * 2 + 1e-5).all()
    # Squares of errors uniform in a step deviate from their mean by 0.89 of it. A step of 8 bits is smaller than the distance of
    # large bfloat16 numbers: only a few values are off.
    chance = 0.5 * 0.89 * np.sqrt((step**4).sum()) / (step**2).sum()
    tolerance = 0.05 if bits == 8 and dtype == jnp.bfloat16 else 0.005 + 4 * chance
    assert _relative(got, x) == pytest.approx(float(predicted), rel=tolerance)
    assert np.sqrt((error**2).sum() / (wide**2).sum()) < {8: 0.008, 6: 0.03, 5: 0.055, 4: 0.11, 3: 0.22}[bits]


@pytest.mark.parametrize("bits", BITS)
def test_a_few_large_channels_do_not_make_others_coarse(bits):
    codec, others = PositionQuantized(bits), np.delete(np.arange(256), [3, 70])
    plain, loud = (_activations((2400, 256), outliers=outliers) for outliers in (False, True))
    errors = [_relative(np.asarray(_coded(codec, x)[1])[:, others], x[:, others]) for x in (plain, loud)]
    assert errors[1] < 1.15 * errors[0]


@pytest.mark.parametrize("bits", [8, 5, 3])
def test_unbiased_in_sums_over_positions(bits):
    """Rows that are all equal, the worst case without dither: errors of sums grow with the root of the number of positions."""
    positions = 16384
    x = normal(128, seed=1) + np.float32(0.01) * normal(positions, 1, seed=2)
    code, got, _ = _coded(PositionQuantized(bits), x)
    got, wanted = (np.asarray(a, np.float64) for a in (got, x))
    _, distance, _, size = (np.asarray(one, np.float64) for one in code.ranges)
    step = distance.mean() * size
    off = (got - wanted).mean(0) / (step / 12**0.5 / positions**0.5)
    assert np.abs(off).max() < 5
    assert 0.5 < np.sqrt((off**2).mean()) < 1.5


@pytest.mark.parametrize("bits", [8, 3])
def test_gradient_of_weights_errs_as_predicted(bits):
    """x^T dy for independent cotangents: the relative error of `x`, if each position counts the same."""
    x, dy = normal(4096, 128, seed=3), normal(4096, 64, seed=4)
    _, got, predicted = _coded(PositionQuantized(bits), x)
    assert _relative(np.asarray(got).T @ dy, x.T @ dy) == pytest.approx(float(predicted), rel=0.1)


@pytest.mark.parametrize("bits", BITS)
def test_takes_so_many_bits(bits):
    """In memory, not only by its own account; widths that no group divides, heads, images."""
    codec, limits = PositionQuantized(bits), (0.32, 0.26, 0.55, 0.5, 0.5)
    shapes = (8, 128, 1024), (2, 64, 12, 64), (700, 1000), (3, 4099), (2, 32, 32, 3)
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    compiled = jax.jit(lambda xs: list(map(codec.encode, xs))).lower(avals).compile()
    size = compiled.memory_analysis().output_size_in_bytes
    assert abs(size - sum(map(codec.nbytes, avals))) <= 64 * len(avals)  # a tuple's pointers
    for aval, limit in zip(avals, limits, strict=True):
        assert 8 * codec.nbytes(aval) / aval.size <= bits + limit


@pytest.mark.parametrize(
    ("bits", "dtype"), list(zip(BITS, [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float32, jnp.bfloat16], strict=True))
)
def test_any_finite_values(bits, dtype):
    """Finite values decode to finite ones, about a step away, with channels measured (600 positions) and without."""
    codec, largest, rng = PositionQuantized(bits, group=32), float(jnp.finfo(dtype).max), np.random.default_rng(0)
    for positions in (8, 600):
        x = rng.normal(size=(positions, 64)) * 10.0 ** rng.integers(-44, 38, (positions, 1))
        x = np.clip(x, -largest, largest)
        x[0, 0], x[1], x[2, :32], x[3], x[:, 5] = largest, largest, -largest, 0, largest
        x = x.astype(dtype)
        code, got, _ = _coded(codec, x)
        got = np.asarray(got, np.float64)
        assert np.isfinite(got).all()
        wide = np.asarray(x, np.float64)
        slack = max(float(jnp.finfo(dtype).eps), 1e-5)
        step = _steps(codec, code)
        assert (np.abs(got - wide) <= step * 0.51 + np.abs(wide) * 2 * slack + largest * 0.004).all()


@pytest.mark.parametrize("value", [0.0, -3.5, 3e38, 1e-40])
def test_constants(value):
    x = np.full((5, 100), value, np.float32)
    np.testing.assert_allclose(round_trip(PositionQuantized(4), x), x, rtol=2**-8, atol=1e-37)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_nan_stays_in_its_group_of_its_position(bad):
    for positions in (8, 2048):
        x = np.ones((positions, 256), np.float32)
        x[2, 130] = bad
        got = np.asarray(round_trip(PositionQuantized(8), x))
        assert np.isnan(got[2, 128:]).all()
        assert np.isnan(got).sum() == 128


def test_under_vmap_and_scan():
    codec, x = PositionQuantized(6), _activations((3, 520, 256))
    alone = np.stack([round_trip(codec, one) for one in x])
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
        _, got, predicted = _coded(codec, placed)
        assert jax.typeof(got) == jax.typeof(placed)
    assert _relative(jax.device_get(got), x) == pytest.approx(float(predicted), rel=0.02)


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
    x, target = normal(2048, 128), normal(2048, 128, seed=1)
    weights = [normal(*shape, seed=2) / np.float32(128**0.5) for shape in ((128, 256), (256, 128))]

    def f(weights, x):
        return jax.nn.silu(x @ weights[0]) @ weights[1]

    def loss(weights, x, target, bits=None, scale=None):
        how = {"bits": bits} if bits else {"codec": StepErrors(PositionQuantized(8), 0, scale)}
        g = f if bits is scale is None else memjax.compressed(f, **how, inputs="x")
        return jnp.mean((g(weights, x) - target) ** 2)

    # Of arguments, not of constants: compilers compute with these, slowly.
    gradient = jax.jit(jax.grad(loss), static_argnames="bits")
    flat = lambda **how: np.concatenate([np.ravel(a) for a in gradient(weights, x, target, **how)])
    exact = flat()
    off = lambda **how: np.linalg.norm(flat(**how) - exact)
    np.testing.assert_allclose(flat(scale=0.0), exact, atol=1e-7)
    few = off(scale=1.0)
    assert few > 0
    assert few == pytest.approx(off(bits=8), rel=0.15)
    assert off(scale=17.0) == pytest.approx(17 * few, rel=0.15)
    assert off(bits=Errors(4)) == pytest.approx(off(bits=4), rel=0.15)
    with pytest.raises(ValueError, match="bits must be one of"):
        off(bits=Errors(7))


@pytest.mark.parametrize(("codec", "large"), [(PositionQuantized(4), 1e30), (BlockQuantized(8), 7e37)], ids=repr)
def test_steps_are_those_of_the_code(codec, large):
    """Twice the largest error, nearly, and for ranges beyond float32's, too."""
    steps = jax.jit(codec.steps)
    for scale in (1.0, large):
        x = normal(2, 512, 128) * np.float32(scale)
        error = np.abs(np.asarray(round_trip(codec, x), np.float64) - x.astype(np.float64))
        share = error / np.asarray(steps(x), np.float64)
        assert 0.49 < share.max() < 0.51
