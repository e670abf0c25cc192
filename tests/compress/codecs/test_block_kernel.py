"""The kernel that encodes blocks in one pass on GPUs, against XLA's code: interpreted here, compiled on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.compress import BlockQuantized
from memjax.compress._codecs import block_kernel
from memjax.compress._codecs.block_quantized import RectifiedBlocks
from tests.compress.codecs.round_trip import normal, uniform

CODECS = [BlockQuantized(8), BlockQuantized(4), RectifiedBlocks(8), RectifiedBlocks(4)]
SHAPES = [(2, 28, 28, 64), (3, 7, 7, 128), (2, 32, 64), (2, 257, 64)]  # blocks of 196, 49, 32 and 257 positions


def _values(codec, shape, dtype):
    rectified = isinstance(codec, RectifiedBlocks)
    x = normal(*shape) * np.exp(2 * normal(shape[-1], seed=1))
    x[..., 3], x[..., 4] = 0, 2
    x[..., 5] *= 1e-30
    x[..., 6] *= 1 if rectified else 1e36
    flat = (np.maximum(x, 0) if rectified else x).reshape(-1, shape[-1])
    flat[:, 7] = 0 if rectified else -3e38
    flat[::3, 7] = 3e38
    flat = np.maximum(flat, -3e38)
    flat[5, 10], flat[6, 20] = np.nan, np.inf  # beside channels 11 and 21 in a pair
    return flat.reshape(shape).astype(dtype)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _by_kernel(codec, x, interpret):
    code = codec._encode_by_kernel(x, interpret=interpret)[0]
    return code, codec.decode(code)


@functools.partial(jax.jit, static_argnums=0)
def _by_xla(codec, x):
    code = codec.measured(x).encode(x)
    return code, codec.decode(code), codec.steps(x)


def _check(codec, x, interpret):
    (got, decoded), (expected, wanted, steps) = _by_kernel(codec, x, interpret), _by_xla(codec, x)
    assert got.levels.nbytes * 8 == expected.levels.size * codec.bits
    distance = np.asarray(expected.ranges[-1]).reshape(got.ranges[-1].shape)
    spoilt = np.isnan(distance)
    np.testing.assert_array_equal(np.isnan(np.asarray(got.ranges[-1])), spoilt)
    assert 0 < spoilt.sum() < 0.1 * spoilt.size
    # Quotients may differ in the last digit, and what is in the middle of two numbers of bfloat16 be rounded to either.
    found = np.asarray(got.ranges[-1])
    np.testing.assert_allclose(found, distance, rtol=1e-6 if found.dtype == np.float32 else 2.0**-7)
    assert np.mean(np.abs(found - distance)[~spoilt] > 1e-6 * distance[~spoilt]) < 1e-2
    decoded, wanted, steps = (np.asarray(a, np.float32) for a in (decoded, wanted, steps))
    np.testing.assert_array_equal(np.isnan(decoded), np.isnan(wanted))
    assert np.nanmax(np.abs(decoded - wanted) - 1.01 * steps - 2**-7 * np.abs(wanted)) <= 0  # another level at a tie
    assert np.mean((decoded != wanted)[~np.isnan(wanted)]) < 1e-2
    if isinstance(codec, RectifiedBlocks):
        np.testing.assert_array_equal(jax.jit(codec.nonzero)(got), np.asarray(x, np.float32) > 0)


# Each codec with two shapes, each shape with a code that starts from zero and one that does not.
PAIRS = ((0, 0), (0, 1), (1, 2), (1, 3), (2, 0), (2, 2), (3, 1), (3, 3))


@pytest.mark.parametrize(("codec", "shape"), [(CODECS[i], SHAPES[j]) for i, j in PAIRS], ids=str)
def test_interpreted_kernel(codec, shape):
    _check(codec, _values(codec, shape, jnp.bfloat16 if codec.bits == 8 else jnp.float32), interpret=True)


@pytest.mark.parametrize("codec", [BlockQuantized(4), RectifiedBlocks(8)], ids=str)
def test_interpreted_kernel_in_vmap(codec):
    x = _values(codec, (3, 2, 8, 8, 64), jnp.bfloat16)
    together = jax.jit(jax.vmap(lambda x: codec._encode_by_kernel(x, interpret=True)[0]))(x)
    for of_all, alone in zip(*map(jax.tree.leaves, (together, _by_kernel(codec, x[1], True)[0])), strict=True):
        np.testing.assert_array_equal(np.asarray(of_all)[1], alone)


@pytest.mark.parametrize(
    ("bits", "size"), [(bits, size) for bits in (4, 8) for size in (2.0 ** (bits - 125), 1.0, 2.0**127)]
)
def test_interpreted_kernel_of_any_size(bits, size):
    codec = BlockQuantized(bits)
    x = (np.float32(size) * (2 * uniform(1, 64, 64) - 1)).astype(jnp.bfloat16)
    got = _by_kernel(codec, x, True)[1]
    error = np.abs(np.asarray(got, np.float64) - np.asarray(x, np.float64))
    assert np.max(error) <= (0.7 * 2 / (2**bits - 1) + 2**-8) * size


@pytest.mark.parametrize(("bits", "dtype"), [(8, jnp.bfloat16), (4, jnp.float16)])
def test_levels_of_the_interpreted_kernel_are_nearly_the_nearest(bits, dtype):
    x = (2 * uniform(4, 250, 64) - 1).astype(dtype)
    codec = BlockQuantized(bits)
    code = _by_kernel(codec, x, True)[0]
    decoded = codec.decode(dataclasses.replace(code, dtype=np.dtype(np.float32)))  # not rounded to 16 bits
    error = np.abs(np.asarray(decoded, np.float64) - x.astype(np.float64)) / np.asarray(code.ranges[-1])
    assert 0.49 < error.max() < 0.505


def _check_sums(codec, shape, interpret):
    x = normal(*shape) + 3
    x = (np.maximum(x, 0) if isinstance(codec, RectifiedBlocks) else x).astype(jnp.bfloat16)
    code, sums = jax.jit(lambda x: codec._encode_by_kernel(x, with_sums=True, interpret=interpret))(x)
    wanted = np.asarray(x, np.float64).reshape(-1, shape[-1])
    np.testing.assert_allclose(np.sum(sums, 0), [wanted.sum(0), np.square(wanted).sum(0)], rtol=2e-6)
    alone = _by_kernel(codec, x, interpret)[0]
    for got, expected in zip(jax.tree.leaves(code), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("codec", "shape"), list(zip([BlockQuantized(4), RectifiedBlocks(8)] * 2, SHAPES, strict=True)), ids=str
)
def test_sums_of_the_interpreted_kernel(codec, shape):
    _check_sums(codec, shape, interpret=True)


@pytest.mark.parametrize("codec", [BlockQuantized(8), RectifiedBlocks(4)], ids=str)
def test_programs_for_other_platforms_have_the_same_codes(codec, monkeypatch):
    """With a GPU at hand a program may still be compiled for a CPU. Derivatives of codes are zero on both."""
    x = _values(codec, (2, 28, 28, 64), jnp.bfloat16)
    run = lambda x: (codec.encode(x), codec.decode(codec.encode(x)))
    _, wanted = jax.jit(lambda x: run(x))(x)
    monkeypatch.setattr(block_kernel, "has_kernels", lambda: True)
    monkeypatch.setattr(block_kernel, "is_of_one_device", lambda aval: True)
    got, decoded = jax.jit(lambda x: run(x))(x)
    assert got.levels.nbytes * 8 == x.size * codec.bits
    np.testing.assert_array_equal(np.asarray(decoded, np.float32), np.asarray(wanted, np.float32))
    through = lambda x: jnp.sum(jnp.nan_to_num(x + codec.decode(codec.encode(x))).astype(jnp.float32))
    ones = np.ones(x.shape, x.dtype)
    np.testing.assert_array_equal(jax.jit(jax.grad(through))(ones), ones)


def _check_decoder(codec, x, interpret):
    code, expected = _by_kernel(codec, x, interpret)
    got = jax.jit(lambda code: codec._decode_by_kernel(code, interpret=interpret))(code)
    expected = np.asarray(expected, np.float32)
    assert (got.dtype, got.shape) == (x.dtype, x.shape)
    # Compilers may round a product and a sum at once.
    rounding = (
        2.0**-8 if x.dtype == jnp.bfloat16 else 2.0**-20 * jax.jit(codec.steps)(x) / np.maximum(np.abs(expected), 1e-30)
    )
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    assert np.nanmax(np.abs(np.asarray(got, np.float32) - expected) - rounding * np.abs(expected)) <= 0


@pytest.mark.parametrize(
    ("codec", "shape"),
    [
        *((codec, SHAPES[0]) for codec in CODECS[::3]),
        *((codec, (2, 8, 8, 192)) for codec in CODECS[1:3]),
        *((codec, (1, 8, 8, 512)) for codec in CODECS[1:3]),
    ],
    ids=str,
)
def test_interpreted_decoder(codec, shape):
    _check_decoder(codec, _values(codec, shape, jnp.bfloat16), interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_compiled_kernel(codec, dtype):
    for shape in [(16, 28, 28, 64), (16, 7, 7, 256), (4, 56, 56, 128), (8, 512, 64), (8, 1021, 64)]:
        x = _values(codec, shape, jnp.float32)
        x = (jnp.clip(x, -6e4, 6e4) if dtype == jnp.float16 else x).astype(dtype)
        assert codec.reads_once(jax.typeof(x)) == (jax.device_count() == 1)
        _check(codec, x, interpret=False)
        _check_decoder(codec, x, interpret=False)
        _check_sums(codec, shape, interpret=False)


def test_the_kernel_is_for_gpus_and_channels_that_fill_its_tiles():
    large = lambda *shape: jax.core.ShapedArray(shape, jnp.bfloat16)
    for aval in (large(64, 28, 28, 96), large(64, 28, 28, 3), large(64, 64), large(2**20)):
        assert not BlockQuantized(8).reads_once(aval)
    if jax.default_backend() != "gpu":
        assert not BlockQuantized(8).reads_once(large(64, 28, 28, 64))


def test_the_kernel_is_not_for_programs_that_the_compiler_divides(monkeypatch):
    """A kernel is not divided: all devices would have all of the array."""
    aval = jax.core.ShapedArray((64, 28, 28, 64), jnp.bfloat16)
    monkeypatch.setattr(block_kernel, "has_kernels", lambda: True)
    assert BlockQuantized(8).reads_once(aval) == (jax.device_count() == 1)
    seen = []

    def inside(x):
        seen.append(BlockQuantized(8).reads_once(jax.typeof(x)))
        return x

    spec, count = jax.sharding.PartitionSpec("x"), jax.device_count()
    for shape, names in (((count,), ("x",)), ((count // 2, 2), ("x", "y"))):
        if count == 1 and len(names) == 2:
            continue
        mesh = jax.sharding.Mesh(np.reshape(jax.devices(), shape), names)
        on_each = jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"x"})
        jax.eval_shape(jax.jit(on_each), jax.ShapeDtypeStruct((64 * count, 28, 28, 64), jnp.bfloat16))
    assert seen == [True, False][: len(seen)]  # what is left to the compiler may be divided


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1e-38, 1e-37, 1e-36, 1e-34, 3e38])
def test_the_kernel_keeps_the_bound_for_the_smallest_and_largest_numbers(bits, size):
    codec, values = BlockQuantized(bits), np.clip(np.random.default_rng(0).standard_normal((256, 64)) / 3, -1, 1)
    x = np.asarray(values * size, jnp.dtype(jnp.bfloat16))
    wide, got = x.astype(np.float64), _by_kernel(codec, x, True)[1]
    half_step = (wide.max(0) - wide.min(0)) / (2**bits - 1) / 2
    bound = half_step * (1 + 1 / 16) + np.abs(wide).max(0) * 2.0**-8 + 1e-37
    assert np.all(np.abs(np.asarray(got).astype(np.float64) - wide) <= bound)
