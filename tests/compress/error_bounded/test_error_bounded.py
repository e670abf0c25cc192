"""The bound is never broken, sizes are what they are said to be, and bad input is refused."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from memjax.compress import ErrorBounded
from memjax.compress._error_bounded import tiles
from memjax.compress._error_bounded.quantize import dither_of_group
from tests.compress.codecs.round_trip import normal
from tests.compress.error_bounded.kernel_cases import columns_of_all_kinds
from tests.compress.patterns import check_bound, every_16_bit_pattern, in_lanes, random_float32_patterns, to_bits

# From below the least subnormal bfloat16 to beyond the largest; powers of two and not.
BOUNDS = [
    *(2.0**k for k in (-127, -126, -125, -124, -120, -100, -70, -40, -25, -24, -20, -14, -10, -7, -4, -1, 0, 3, 8, 60)),
    *(1e-45, 1e-38, 7e-5, 1e-3, 0.01, 0.3, 1.9, 300.0, 1e30, 3.4e38),
]


SHAPE = 64, 64, 64  # of most arrays: what takes time is to compile for another one


@functools.partial(jax.jit, static_argnames="bits_per_value")
def round_trip(x, bound, bits_per_value=None):
    codec = ErrorBounded(bound, bits_per_value=bits_per_value)
    code = codec.encode(x)
    return codec.decode(code), code


@jax.jit
def both_ways(x, bound):
    """Decoded with signs and without, and the code."""
    decoded, code = round_trip(x, bound)
    return decoded, ErrorBounded(bound).without_signs().decode(code), code


def check_both_ways(x, bound):
    kept, free, _ = both_ways(x, np.float32(bound))
    check_bound(x, kept, float(np.float32(bound)))
    check_bound(x, free, float(np.float32(bound)), keeps_signs=False)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_bound_holds_for_every_16_bit_value(dtype):
    x = every_16_bit_pattern(dtype)
    for bound in BOUNDS:
        check_both_ways(x, bound)


def test_only_columns_that_are_zero_here_and_there_have_bitmaps():
    is_some = np.zeros((32, 128), bool)
    is_some[:18] = columns_of_all_kinds(np.random.default_rng(0))
    is_some = is_some.reshape(32, 4, 2, 16)
    some, every = is_some.any((1, 3)), is_some.all((1, 3))
    bitmaps = (some & ~every).sum(1)
    bitmaps[every.any(1) & ~some.all(1)] = 1  # which of the two it is has to be said
    x = in_lanes(np.where(is_some, 5.0, 0).reshape(-1)).reshape(64, 64)
    needed = 2 * bitmaps + -(-3 * is_some.sum((1, 2, 3)) // 32)  # five steps: three bits, whatever the dither
    for dtype in (jnp.bfloat16, jnp.float32):
        decoded, code = round_trip(x.astype(dtype), np.float32(0.5))
        assert code.packed.needed == needed.sum()
        np.testing.assert_array_equal(decoded != 0, x != 0)


@pytest.mark.parametrize("bound", [1e-30, 1e-4, 2.0**-7, 0.37, 1e20])
def test_bound_holds_for_random_float32_patterns(bound):
    for seed in range(2):
        check_both_ways(random_float32_patterns(seed, 2**18).reshape(SHAPE), bound)
        # Magnitudes near the step, where quantising does something.
        rng = np.random.default_rng(seed)
        near = np.exp2(np.sort(rng.uniform(-6, 18, 2**18))) * rng.choice([-1, 1], 2**18) * float(np.float32(bound))
        check_both_ways(in_lanes(near).astype(np.float32).reshape(SHAPE), bound)


def test_values_at_and_beside_multiples_of_the_step():
    step = 2.0**-6
    multiples = (np.arange(-300, 301) * step).astype(np.float32)
    beside = [np.nextafter(multiples, np.float32(side)) for side in (-np.inf, np.inf)]
    check_both_ways(np.resize(np.stack([multiples, *beside]), SHAPE), step / 2)


@hypothesis.settings(max_examples=5, deadline=None, derandomize=True)
@hypothesis.given(
    st.lists(st.integers(1, 70), min_size=0, max_size=3),
    st.sampled_from([jnp.bfloat16, jnp.float16, jnp.float32]),
)
def test_any_shape(shape, dtype):
    x = normal(*shape, dtype=dtype)
    decoded, code = round_trip(x, np.float32(0.1))
    assert decoded.shape == x.shape
    assert decoded.dtype == x.dtype
    check_bound(x, decoded, float(np.float32(0.1)))
    assert not code.overflowed


@pytest.mark.parametrize("shape", [(0,), (3, 0, 64)])
def test_empty_arrays(shape):
    codec = ErrorBounded(0.1)
    x = jnp.zeros(shape, jnp.bfloat16)
    assert codec.decode(codec.encode(x)).shape == shape
    assert codec.error(x) == 0


def test_lanes_of_every_width_and_kind():
    """Bitmaps and none, signs and none, planes 0 to 16, raw beside coded, all at once in float32."""
    rng = np.random.default_rng(1)
    lanes = []
    for planes in range(18):
        for zeros in (0.0, 0.3, 1.0):
            for signs in (False, True):
                q = rng.integers(1, 2**planes + 1, 128) * (rng.random(128) >= zeros)
                q[0] = 2**planes * (zeros < 1)
                lanes.append(q * np.where(rng.random(128) < 0.5, -1, 1) if signs else q)
    ones, two = np.ones(128), np.ones(128)
    two[7] = 2
    lanes += [ones, -ones, two, np.where(np.arange(128) == 64, 16, 1), np.full(128, 16), np.full(128, 15)]
    lanes += [np.zeros(128)] * (-len(lanes) % 32)
    x = (in_lanes(np.concatenate(lanes)) - 0.0).astype(np.float32)
    decoded, code = round_trip(x, np.float32(0.5))
    check_bound(x, decoded, 0.5)
    assert 0 < code.raw_share < 0.1


def test_errors_of_equal_values_do_not_add_up():
    """64 arrays, each of one value: with sixteenths of dither the mean of errors is a sawtooth 16 times as fine, and its
    square a 256th of what it would be without. Between neighbours errors are hardly correlated.
    """
    steps = np.random.default_rng(0).uniform(1, 8, 64)
    x = np.broadcast_to(steps[:, None, None], SHAPE).astype(np.float32)
    errors = np.asarray(both_ways(x, np.float32(0.5))[0], np.float64) - x
    of_one = errors.mean((1, 2))
    np.testing.assert_allclose(np.mean(errors**2), 1 / 12, rtol=0.1)
    assert np.mean(of_one**2) < 2 / 12 / 256
    assert abs(of_one.mean()) < 0.02
    centred = errors - of_one[:, None, None]
    for neighbour in (np.roll(centred, 1, 1), np.roll(centred, 1, 2), np.roll(centred, 7, 1)):
        assert abs(np.mean(centred * neighbour)) < 0.01 * np.mean(centred**2)


@pytest.mark.parametrize(("dtype", "parts"), [("float32", 16), ("bfloat16", 8), ("float16", 8)])
def test_errors_of_small_values_have_hardly_a_mean_without_signs(dtype, parts):
    """The mean is half a part at most for values up to half a step, or what replaces zero. With signs it is larger."""
    values = np.concatenate([np.arange(1, 17) / 32, np.arange(8) / 16 + 1e-3])
    x = np.broadcast_to(values, (2**15, len(values))).astype(dtype)
    of_parts = [both_ways(part, np.float32(0.5))[:2] for part in x.reshape(-1, *SHAPE)]
    kept, free = (np.stack(of_all).reshape(x.shape) for of_all in zip(*of_parts, strict=True))
    check_bound(x, kept, 0.5)
    check_bound(x, free, 0.5, keeps_signs=False)
    exact, kept, free = (np.asarray(a, np.float64) for a in (x[0], kept, free))
    assert (free < 0).any()
    mean_kept, mean_free = kept.mean(0) - exact, free.mean(0) - exact
    assert 0.12 < mean_kept.max() < 0.16
    # A value stands for the middle of its part; a middle of zero is replaced by a part.
    middle = (np.ceil(exact * parts) - 0.5) / parts - exact
    np.testing.assert_allclose(mean_free, middle + 1 / parts**2, atol=0.006)
    assert np.abs(mean_free).max() < 0.5 / parts + 1 / parts**2 + 0.006


@pytest.mark.smoke
def test_without_signs_zeros_and_special_values_are_exact():
    rng = np.random.default_rng(0)
    x = rng.normal(size=SHAPE) * (rng.random(SHAPE) < 0.7)
    x[0, :3, 5], x[0, 9, 9] = (np.inf, -np.inf, np.nan), -0.0
    x = x.astype(np.float32)
    _, decoded, _ = both_ways(x, np.float32(0.3))
    check_bound(x, decoded, float(np.float32(0.3)), keeps_signs=False)
    with np.errstate(invalid="ignore"):
        assert (np.asarray(decoded) * x < 0).any()


@pytest.mark.parametrize(
    ("dtype", "first", "mean"), [("float32", 64, 0), *(("bfloat16", 4**i, -(4.0**i) / 256) for i in (1, 2, 3))]
)
def test_errors_have_the_mean_that_the_dtype_gives_them(dtype, first, mean):
    """Values of `first` to twice `first` steps have the means that the docstring of ErrorBounded gives for bfloat16."""
    x = np.random.default_rng(0).uniform(first, 2 * first, SHAPE).astype(dtype)
    errors = np.asarray(both_ways(x, np.float32(0.5))[0], np.float64) - np.asarray(x, np.float64)
    np.testing.assert_allclose(errors.mean(), mean, atol=0.004)


@pytest.mark.parametrize("shape", [(2, 32, 128), (5, 7, 24)])
def test_bound_per_channel(shape):
    bounds = np.exp2(np.random.default_rng(0).uniform(-9, 1, shape[-1])).astype(np.float32)
    x = 3 * normal(*shape)
    error = np.abs(round_trip(x, bounds)[0] - x).max(tuple(range(len(shape) - 1)))
    assert (error <= bounds).all()
    assert (error >= 0.2 * bounds).all()  # and each channel makes use of its own


def test_size_is_what_the_values_need():
    """Bits per value of a rectified Gaussian, by the format's arithmetic over the lanes, and its bytes."""
    x = np.maximum(normal(*SHAPE), 0).astype(jnp.bfloat16)
    codec = ErrorBounded(0.25)
    code = round_trip(x, np.float32(0.25))[-1]
    tile = jax.jit(
        lambda number: tiles.rows(jnp.stack([dither_of_group(number, group, x.dtype) for group in range(tiles.GROUPS)]))
    )
    eighths = [tile(np.int32(number)) for number in range(x.size // tiles.TILE_VALUES)]
    eighths = np.concatenate(eighths).reshape(x.shape)
    x32 = np.asarray(x, np.float32)
    p = np.where(x32 > 0, (np.ceil(x32 / 0.5 * 8) + eighths) // 8, 0)
    some, lanes = (a.reshape(-1, 64, 32, 2).swapaxes(1, 2).reshape(-1, 128) for a in (x32 > 0, p))
    planes = np.ceil(np.log2(lanes.max(1) + 1))
    words = 4 + np.ceil(some.sum(1) * planes / 32)
    assert int(code.packed.needed) == words.sum()
    assert 2.3 < float(code.needed_bits_per_value) < 2.8
    headers = x.size // 4096 * 36
    np.testing.assert_allclose(jax.jit(codec.ratio)(x), 2 * x.size / (4 * words.sum() + headers), rtol=1e-6)
    assert codec.nbytes(x) == 2 * x.size + headers + 8
    assert ErrorBounded(0.25, bits_per_value=3).nbytes(x) == 3 * x.size // 8 + headers + 8


def test_capacity_that_suffices_and_one_that_does_not():
    x = np.maximum(normal(*SHAPE), 0)
    code = both_ways(x, np.float32(0.25))[-1]
    needed = float(code.needed_bits_per_value)
    for bits_per_value, overflows in ((needed, False), (0.9 * needed, True)):
        decoded, code = round_trip(x, np.float32(0.25), bits_per_value)
        assert bool(code.overflowed) == overflows
        assert float(code.needed_bits_per_value) == needed
        assert bool((np.abs(decoded - x) <= 0.25).all()) == (not overflows)  # what overflowed is NaN
    assert round_trip(x, np.float32(0.25), 1e-6)[1].overflowed


def test_worst_case_capacity_holds_anything():
    for dtype in (jnp.bfloat16, jnp.float32):
        x = (1e20 * normal(*SHAPE)).astype(dtype)
        decoded, _, code = both_ways(x, np.float32(1e-3))
        assert not code.overflowed
        assert code.raw_share == 1
        np.testing.assert_array_equal(to_bits(decoded), to_bits(x))


def test_a_new_bound_does_not_compile_again():
    traces = []

    @jax.jit
    def encode(codec, x):
        traces.append(1)
        return codec.encode(x)

    x = np.linspace(-1, 1, 4096, dtype=np.float32)
    needed = [int(encode(ErrorBounded(bound), x).packed.needed) for bound in (0.1, 0.01, jnp.float32(0.3))]
    assert len(traces) <= 2  # Python numbers are weakly typed
    assert needed[1] > needed[0] > needed[2]


def test_bounds_that_no_step_serves_store_everything():
    x = np.linspace(-1, 1, 64**3, dtype=np.float32).reshape(SHAPE)
    for bound in (0.0, -1.0, np.nan, 1e-40):
        decoded, _, code = both_ways(x, np.float32(bound))
        assert code.raw_share == 1
        np.testing.assert_array_equal(decoded, x)


def test_vmap():
    x = normal(3, 50, 64)
    decoded = jax.vmap(lambda x: round_trip(x, 0.1)[0])(x)
    np.testing.assert_array_equal(decoded, np.stack([round_trip(one, 0.1)[0] for one in x]))


@pytest.mark.parametrize("bound", [0, 0.0, -1.0, float("nan"), float("inf"), np.array([0.1, 0.0])])
def test_refuses_bounds(bound):
    with pytest.raises(ValueError, match=r"bound must be a positive finite number, .* got"):
        ErrorBounded(bound)


def test_refuses():
    with pytest.raises(ValueError, match="bits_per_value must be a positive finite number, got 0"):
        ErrorBounded(0.1, bits_per_value=0)
    with pytest.raises(ValueError, match="implementation must be one of None, 'jnp'"):
        ErrorBounded(0.1, implementation="cuda")
    for dtype in (jnp.int32, jnp.complex64):
        with pytest.raises(TypeError, match="x must be bfloat16, float16 or float32, got"):
            ErrorBounded(0.1).encode(jnp.zeros(4, dtype))
    with pytest.raises(ValueError, match=r"one entry per channel of x, shape \(4,\), got \(3,\)"):
        ErrorBounded(np.ones(3, np.float32)).encode(jnp.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"fewer than 2\^31 values"):
        jax.eval_shape(ErrorBounded(0.1).encode, jax.ShapeDtypeStruct((2**32,), jnp.float32))
