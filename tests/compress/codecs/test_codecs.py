"""The fixed-rate codecs, and what all codecs have in common."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from memjax.compress import (
    BlockQuantized,
    Cast,
    ChannelQuantized,
    Codec,
    ErrorBounded,
    GroupQuantized,
    Mask,
    PositionQuantized,
)
from memjax.compress._codecs.block_quantized import RectifiedBlocks
from memjax.compress._codecs.channel_quantized import evenly_spaced
from memjax.compress._codecs.codec import StepErrors
from tests.compress.codecs.round_trip import normal, round_trip, uniform

CODECS = [
    Cast(),
    BlockQuantized(bits=8),
    GroupQuantized(bits=4),
    PositionQuantized(bits=6),
    ChannelQuantized(bits=8),
    ErrorBounded(0.1),
    ErrorBounded(0.1, bits_per_value=6),
]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_codecs_keep_shape_and_dtype_in_codes_of_known_size(codec):
    assert isinstance(codec, Codec)
    xs = [np.asarray(normal(*shape)) for shape in ((), (0, 3), (7, 9, 11))]
    codes, largest = jax.jit(lambda xs: ([codec.encode(x) for x in xs], codec.error(xs[-1])))(xs)
    every_decoded = jax.jit(lambda codes: [codec.decode(code) for code in codes])(codes)
    for x, code, decoded in zip(xs, codes, every_decoded, strict=True):
        chex.assert_trees_all_equal_shapes_and_dtypes(decoded, x)
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(code)) == codec.nbytes(jax.typeof(x))
    error = np.abs(np.asarray(x, np.float64) - np.asarray(decoded, np.float64)).max()
    np.testing.assert_allclose(largest, error, rtol=1e-6, atol=2**-21)  # values up to 4, one program or two


def test_mask_is_exact_at_one_bit_per_value():
    assert isinstance(Mask(), Codec)
    xs = [uniform(size) < 0.3 for size in (0, 1, 32, 1000)]
    codes, error = jax.jit(lambda xs: ([Mask().encode(x) for x in xs], Mask().error(xs[-1])))(xs)
    for x, code, decoded in zip(xs, codes, jax.jit(lambda codes: list(map(Mask().decode, codes)))(codes), strict=True):
        np.testing.assert_array_equal(decoded, x)
        assert code.levels.size == -(-x.size // 32)
    assert Mask().nbytes(jax.ShapeDtypeStruct((4, 1024), jnp.bool_)) == 512
    assert error == 0


def test_cast_rounds_to_nearest():
    x = np.float32([1.0, 1 + 2**-9, 3e38])
    np.testing.assert_array_equal(round_trip(Cast(jnp.bfloat16), x), x.astype(jnp.bfloat16).astype(np.float32))
    assert Cast().ratio(x) == 2


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_group_quantized_is_unbiased(bits):
    """The mean over many seeds, within four standard errors of the value, for all but as many as chance explains."""
    x = np.concatenate([normal(300), np.linspace(-5, 5, 212, dtype=np.float32)])
    seeds = 1000
    of_seed = lambda seed: round_trip.__wrapped__(GroupQuantized(bits=bits, seed=seed), x)
    decoded = np.asarray(jax.jit(jax.vmap(of_seed))(np.arange(seeds)), np.float64)
    x = x.astype(np.float64)
    distance = np.ptp(x.reshape(-1, 256), 1).repeat(256) / (2**bits - 1)
    # A value so close to a level that all draws agree says nothing about their deviation.
    deviation = np.maximum(decoded.std(0), distance / seeds**0.5)
    off = (decoded.mean(0) - x) / (deviation / seeds**0.5)
    assert np.mean(np.abs(off) > 4) < 0.01
    assert abs(off.mean()) < 4 / x.size**0.5
    assert (np.abs(decoded - x) <= distance * (1 + 1e-5) + 1e-6).all()


def test_group_quantized_sizes_and_constants():
    x = jnp.zeros((64, 64), jnp.bfloat16)
    assert GroupQuantized(bits=2).nbytes(x) == 64 * 64 // 4 + 16 * 8
    for value in (0.0, -3.5, 3e38):
        constant = np.full(100, value, np.float32)
        np.testing.assert_array_equal(round_trip(GroupQuantized(), constant), constant)
    one_nan = np.zeros(600, np.float32)
    one_nan[300] = np.nan
    assert list(np.isnan(round_trip(GroupQuantized(), one_nan)).nonzero()[0][[0, -1]]) == [256, 511]


def test_group_quantized_draws_anew_for_other_arrays_and_seeds():
    x = uniform(256)
    of_seeds = [np.asarray(round_trip(GroupQuantized(seed=seed), x)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(of_seeds[0], of_seeds[1])
    assert (of_seeds[0] != of_seeds[2]).any()
    # The same group beside another one.
    beside = [np.asarray(round_trip(GroupQuantized(), np.concatenate([x, other])))[:256] for other in (x, x + 1)]
    assert (beside[0] != beside[1]).any()


@pytest.mark.smoke
@pytest.mark.parametrize(("bits", "dtype"), [(4, jnp.float32), (8, jnp.bfloat16)])
def test_channel_quantized_errs_by_half_a_level(bits, dtype):
    x = ((normal(40, 7, 5) + 2) * np.float32([1e-30, 1.0, 3e30, 0.0, 1.0])).astype(dtype)
    codec = ChannelQuantized(bits=bits)
    got, x = np.asarray(round_trip(codec, x), np.float64), np.asarray(x, np.float64)
    half = np.ptp(x, (0, 1)) / (2**bits - 1) / 2
    rounding = np.abs(x).max((0, 1)) * (2**-8 if dtype == jnp.bfloat16 else 2**-22)
    error = np.abs(got - x).max((0, 1))
    assert (error <= half * (1 + 1e-5) + rounding).all()
    # All levels are used, and there are no others.
    assert (error[[0, 1, 2, 4]] > 0.9 * half[[0, 1, 2, 4]] - rounding[[0, 1, 2, 4]]).all()
    assert [len(np.unique(got[..., i])) for i in (1, 3)] == [min(2**bits, len(np.unique(got[..., 1]))), 1]


@pytest.mark.parametrize("bits", [4, 8])
def test_channel_quantized_takes_so_many_bits(bits):
    """In memory, not only by its own account."""
    aval = jax.ShapeDtypeStruct((64, 32, 48), jnp.bfloat16)
    codec = ChannelQuantized(bits=bits)
    levels = jax.jit(lambda x: codec.encode(x).levels).lower(aval).compile()
    assert levels.memory_analysis().output_size_in_bytes == aval.size * bits // 8
    assert codec.nbytes(aval) == aval.size * bits // 8 + 48 * 8
    assert codec.ratio(jnp.zeros(aval.shape, aval.dtype)) == pytest.approx(2 * aval.size / codec.nbytes(aval))


def test_channel_quantized_keeps_other_channels_from_a_nan():
    for bad in (jnp.nan, jnp.inf):
        x = np.ones((9, 3), np.float32)
        x[4, 1] = bad
        got = np.asarray(round_trip(ChannelQuantized(), x))
        assert np.isnan(got[:, 1]).all()
        assert (got[:, [0, 2]] == 1).all()


def test_channel_quantized_can_measure_samples():
    codec = ChannelQuantized(samples=1000)
    x = uniform(64, 20, 24, 3)
    ends = np.clip(x * 131008 - 65504, -65504, 65504).astype(np.float16)
    assert np.isfinite(round_trip(codec, ends)).all()
    x[5, 7, 1, 1] = 9  # not measured: 16 of an example's 480 values are, those at 14, 43, 72, ...
    got = np.asarray(round_trip(codec, x))
    measured = x.reshape(64, 480, 3)[:, 14::29]
    low, high = (reduce(measured, (0, 1)) for reduce in (np.min, np.max))
    half = 1.125 * (high - low) / 15 / 2
    error = np.abs(got - x)
    error[5, 7, 1, 1] = 0
    assert (error.max((0, 1, 2)) <= half + 1e-6).all()
    assert (error.max((0, 1, 2)) > 0.9 * half).all()
    assert got[5, 7, 1, 1] == pytest.approx(float((high + (high - low) / 16)[1]))


def test_channel_quantized_measures_all_of_little():
    shapes = (900, 3), (10, 90, 3), (999, 1, 3), (9, 10, 10, 3), (5,), (1, 1), (0, 4, 2), (2, 0)
    xs = [normal(*shape) for shape in shapes]
    some, every = jax.jit(
        lambda xs: [list(map(codec.encode, xs)) for codec in (ChannelQuantized(samples=1000), ChannelQuantized())]
    )(xs)
    chex.assert_trees_all_equal(some, every)


@pytest.mark.parametrize("shape", [(9000, 3), (10, 300, 3), (2, 3, 9000, 3)])
def test_channel_quantized_measures_as_much_as_it_is_asked_for(shape):
    places, every_samples = np.arange(math.prod(shape)).reshape(shape), (1, 7, 400, 1000, 1001)
    found = jax.jit(lambda places: [evenly_spaced(places, samples) for samples in every_samples])(places)
    for samples, measured in zip(every_samples, found, strict=True):
        assert samples <= measured.size // 3 <= 3 * max(samples, shape[0] if len(shape) > 2 else 1)
        assert len(np.unique(measured)) == measured.size


@pytest.mark.parametrize("bits", [4, 8])
def test_channel_quantized_under_transformations(bits):
    check_transformations(bits)


def check_transformations(bits):
    """Levels stacked by `scan`, batched by `vmap`, transposed and sliced give what they give by themselves."""
    codec, x = ChannelQuantized(bits), normal(3, 64, 20, 48)
    alone = np.stack([round_trip(codec, one) for one in x])

    @jax.jit
    def stacked(x):
        _, codes = jax.lax.scan(lambda _, x: (None, codec.encode(x)), None, x)
        return jax.lax.scan(lambda _, code: (None, codec.decode(code)), None, codes, reverse=True)[1]

    batched = jax.jit(jax.vmap(lambda x: codec.decode(codec.encode(x))))
    moved = jax.jit(lambda x: codec.encode(x).levels.transpose(2, 0, 1)[5:40:3, ::2])(x[0])
    levels = np.asarray(jax.jit(lambda x: codec.encode(x).levels)(x[0])).astype(np.uint8)
    same = lambda a: np.testing.assert_allclose(a, alone, rtol=1e-6, atol=1e-6)  # programs contract products and sums
    same(stacked(x))
    same(batched(x))
    np.testing.assert_array_equal(np.asarray(moved).astype(np.uint8), levels.transpose(2, 0, 1)[5:40:3, ::2])


def test_refuses():
    with pytest.raises(ValueError, match="bits must be 8, 4 or 2, got 3"):
        GroupQuantized(bits=3)
    with pytest.raises(ValueError, match="bits must be 8 or 4, got 2"):
        ChannelQuantized(bits=2)
    with pytest.raises(ValueError, match="samples must be None or an integer of at least 1, got 0"):
        ChannelQuantized(samples=0)
    for size in (20, 2**31):
        with pytest.raises(ValueError, match=rf"group_size must be a multiple of 16, less than 2\^31, got {size}"):
            GroupQuantized(group_size=size)
    with pytest.raises(ValueError, match="seed must be an integer of at most 64 bits, got"):
        GroupQuantized(seed=2**63).encode(jnp.ones(64))
    with pytest.raises(
        ValueError, match=r"code must be one that Cast\(dtype=float16\) made, got one of Cast\(dtype=bfloat16\)"
    ):
        Cast(jnp.float16).decode(Cast().encode(jnp.ones(3)))
    with pytest.raises(TypeError, match="dtype must be a floating-point dtype, got"):
        Cast(jnp.int8)
    with pytest.raises(TypeError, match="x must be boolean, got float32"):
        Mask().encode(jnp.zeros(3))
    for codec in (Cast(), GroupQuantized(), ChannelQuantized()):
        with pytest.raises(TypeError, match="x must be"):
            codec.encode(jnp.zeros(3, jnp.int32))


@pytest.mark.parametrize(
    "codec", [BlockQuantized(4), BlockQuantized(8), ChannelQuantized(8), GroupQuantized(8), GroupQuantized(2)], ids=repr
)
def test_quantisers_take_any_finite_values(codec):
    """Finite values decode to finite ones, at most a distance of levels away, however large or small they are."""
    rng, largest = np.random.default_rng(0), float(jnp.finfo(jnp.float32).max)
    x = rng.normal(size=(4, 64, 32)) * 10.0 ** rng.integers(-44, 38, (4, 1, 32))
    x[0, :2, 0], x[1, :, 1] = (largest, -largest), largest
    x = np.clip(x, -largest, largest).astype(np.float32)
    got = np.asarray(round_trip(codec, x), np.float64)
    assert np.isfinite(got).all()
    wide = np.asarray(x, np.float64)
    assert (np.abs(got - wide) <= np.ptp(wide) / (2**codec.bits - 1) * (1 + 1e-5)).all()


@pytest.mark.parametrize("codec", [Cast(), Cast(jnp.float16), StepErrors(PositionQuantized(4), 0, 1.0)], ids=repr)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_what_is_finite_stays_finite_and_what_is_not_is_seen(codec, dtype):
    largest = jnp.finfo(dtype).max
    extremes = np.array([[largest, -largest], [0, largest], [largest, largest]], dtype)
    if dtype == jnp.float32 or codec != Cast():  # float16's largest value rounds up in bfloat16
        assert np.isfinite(round_trip(codec, extremes)).all()
    extremes[0, 0] = np.inf
    assert not np.isfinite(np.asarray(round_trip(codec, extremes))[0, 0])
    extremes[0, 0] = np.nan
    assert np.isnan(np.asarray(round_trip(codec, extremes))[0, 0])


def test_block_quantized_has_ranges_of_its_own_for_examples_channels_and_stretches():
    """A part that is 1000 times as large leaves the others as they are."""
    codec = BlockQuantized(8, block=64)
    x = normal(4, 256, 16)
    plain = np.abs(round_trip(codec, x) - x).max()
    for place in (np.s_[1], np.s_[:, :, 3], np.s_[2, 64:128]):
        loud = x.copy()
        loud[place] *= 1000
        off = np.abs(round_trip(codec, loud) - loud)
        off[place] = 0
        assert off.max() <= plain
    assert codec.nbytes(x) == x.size + 2 * 4 * x.size // 64


def test_block_quantized_of_few_positions_and_of_lengths_that_nothing_divides():
    """Arrays of few positions have blocks that lie along memory."""
    codec, shapes = BlockQuantized(8, block=64), ((5000,), (3, 4096), (7, 4099), (1, 1, 4096), (2, 1021, 5))
    xs = [normal(*shape) for shape in shapes]
    round_trips = jax.jit(lambda xs: [codec.decode(codec.encode(x)) for x in xs])
    for x, got in zip(xs, round_trips(xs), strict=True):
        assert codec.nbytes(x) <= 1.3 * x.size
        assert np.abs(got - x).max() < 0.02


def test_block_quantized_keeps_other_blocks_from_a_nan():
    x = np.ones((2, 128, 4), np.float32)
    for bad in (np.nan, np.inf, -np.inf):
        x[1, 70, 2] = bad
        got = np.asarray(round_trip(BlockQuantized(8, block=64), x))
        assert np.isnan(got[1, 64:, 2]).all()
        assert np.isnan(got).sum() == 64


QUANTISERS = [
    *(of(bits) for of in (BlockQuantized, RectifiedBlocks, ChannelQuantized) for bits in (4, 8)),
    *(GroupQuantized(bits, size) for bits in (2, 4, 8) for size in (64, 256)),
    *(PositionQuantized(bits, group) for bits in (3, 4, 5, 6, 8) for group in (32, 128)),
]


@pytest.mark.parametrize("sharded", [False, True])
def test_codes_are_decoded_by_what_made_them_alone(sharded):
    """A code says what made it: nothing is computed."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, PartitionSpec("d")) if sharded else None
        x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)
        codecs = QUANTISERS[::3] if sharded else QUANTISERS
        codes = [jax.eval_shape(codec.encode, x) for codec in codecs]
        for codec in codecs:
            for made_by, code in zip(codecs, codes, strict=True):
                if made_by == codec:
                    decoded = jax.eval_shape(codec.decode, code)
                    assert (decoded.shape, decoded.dtype) == (x.shape, x.dtype)
                else:
                    alike = type(made_by) is type(codec)
                    with pytest.raises(ValueError if alike else TypeError, match="code must be "):
                        codec.decode(code)
    with pytest.raises(
        ValueError, match=r"code must be one that BlockQuantized\(bits=8\) made, got one of BlockQuantized\(bits=4\): "
    ):
        BlockQuantized(8).decode(jax.jit(BlockQuantized(4).encode)(np.ones((64, 64), np.float32)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("codec", "axis", "slack"),
    [
        (PositionQuantized(8), 1, 5e-37),
        (PositionQuantized(3), 1, 5e-37),
        (BlockQuantized(8), 0, 1e-37),
        (BlockQuantized(4), 0, 1e-37),
        (ChannelQuantized(8), 0, 1e-37),
        (ChannelQuantized(4), 0, 1e-37),
        (GroupQuantized(8, 128), 1, 1e-37),
        (GroupQuantized(2, 128), 1, 1e-37),
        (RectifiedBlocks(8), 0, 1e-37),
        (Cast(jnp.bfloat16), None, 1.2e-38),
        (ErrorBounded(1e-30), None, 0.0),
    ],
    ids=repr,
)
def test_errors_have_their_bound_from_the_smallest_to_the_largest_numbers(codec, axis, slack, dtype):
    rng = np.random.default_rng(0)
    values = np.clip(rng.standard_normal((256, 128)) / 3, -1, 1)
    if isinstance(codec, RectifiedBlocks):
        values = np.maximum(values, 0)
    sizes = [1e-45, 1e-41, 1e-38, 1e-37, 3e-37, 1e-36, 1e-35, 1e-34, 1e-32, 1e-20, 1.0, 1e20, 1e37, 3e38]
    mixed = [10.0 ** rng.integers(-45, 39, shape) for shape in ((256, 1), (1, 128), (256, 128))]
    for size in [*sizes, *mixed]:
        x = np.asarray(values * size, jnp.dtype(dtype))
        # In float64, which has room for all of them, and by NumPy, which takes no subnormal number for zero.
        wide, got = x.astype(np.float64), np.asarray(round_trip(codec, x)).astype(np.float64)
        rounding = np.abs(wide) * float(jnp.finfo(dtype).eps) / 2
        if isinstance(codec, Cast):
            bound = np.abs(wide) * 2.0**-8
        elif isinstance(codec, ErrorBounded):
            bound, rounding = codec.bound, 0
        else:
            low, high = wide.min(axis, keepdims=True), wide.max(axis, keepdims=True)
            steps = 1.0 if isinstance(codec, GroupQuantized) else 0.5
            bound = steps * (high - low) / (2**codec.bits - 1)
            largest = np.maximum(np.abs(low), np.abs(high))
            # Sums are rounded to float32's digits; the ranges of positions have bfloat16's, those of blocks the array's.
            of_array = isinstance(codec, BlockQuantized) and dtype == jnp.bfloat16
            digits = 2.0**-6 / (2**codec.bits - 1) if of_array or isinstance(codec, PositionQuantized) else 2.0**-22
            rounding = rounding + bound * float(jnp.finfo(dtype).eps) + largest * digits
        assert np.all(np.abs(got - wide) <= bound + rounding + slack), size


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_large_channels_beside_the_smallest_ones_keep_their_bound(dtype):
    values = np.random.default_rng(0).standard_normal((512, 128)) * 1e-37
    values[:, 5] *= 1e7
    x = np.asarray(values, jnp.dtype(dtype))
    codec = PositionQuantized(8)
    wide, got = (np.asarray(a).astype(np.float64) for a in (x, round_trip(codec, x)))
    spread = np.abs(wide).max(0) / 255
    assert np.all(np.abs(got - wide) <= np.maximum(spread, 0.5 * np.asarray(jax.jit(codec.steps)(x)) + 5e-37) * 1.1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("count", [8, 512])
def test_relative_error_is_told_from_the_smallest_to_the_largest_numbers(dtype, count):
    values = np.clip(np.random.default_rng(0).standard_normal((count, 128)) / 3, -1, 1)
    codec, relative_error = PositionQuantized(4), jax.jit(PositionQuantized(4).relative_error)
    for size in [1e-39, 1e-38, 1e-37, 1e-36, 1e-35, 1e-30, 1.0, 1e30, 1e38, 3e38]:
        x = np.asarray(values * size, jnp.dtype(dtype))
        wide, got = x.astype(np.float64), np.asarray(round_trip(codec, x)).astype(np.float64)
        true = np.linalg.norm(got - wide) / np.linalg.norm(wide)
        told = float(relative_error(x))
        assert true * (0.8 if size < 1e-35 else 0.95) <= told <= true * (2 if size < 1e-35 else 1.05), size
    assert relative_error(np.zeros((count, 128), dtype)) == 0
