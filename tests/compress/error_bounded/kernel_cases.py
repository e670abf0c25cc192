"""Arrays with lanes of every kind, and codes compared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from memjax.compress._error_bounded import launch, reference
from memjax.compress._error_bounded import tiles as _tiles
from memjax.compress._error_bounded.quantize import step_exponent
from memjax.compress._error_bounded.tiles import Grid
from tests.compress.patterns import in_lanes


def values_of_all_kinds(dtype, tiles: int = 6, seed: int = 0) -> np.ndarray:
    """Tiles with lanes of few and of many steps of one, all zero, half zero, with signs and without, of random bits."""
    rng = np.random.default_rng(seed)
    largest = np.exp2(rng.uniform(-2, 18, (tiles, 32, 1)))
    largest[0] = np.exp2(rng.uniform(-2, 3.9, (32, 1)))  # a tile of small ones
    values = largest * rng.random((tiles, 32, 128))
    values = np.minimum(values, 6e4)  # float16 ends soon after
    kind = rng.integers(0, 5, (tiles, 32, 1))
    values = np.where(kind == 0, 0, values)
    values = np.where((kind == 1) & (rng.random(values.shape) < 0.5), 0, values)
    values = np.where((kind == 2) & (rng.random(values.shape) < 0.5), -values, values)
    values[0] = np.abs(values[0])
    values[1, :5] = 16
    values[3] = np.minimum(values[3], 256)  # steps of one: too many for a byte by one
    values[4:5] = rng.uniform(30.3, 32.1, values[4:5].shape)  # nearly as many as five planes hold, and more
    values[5:6] = rng.uniform(0, 20, values[5:6].shape)
    values[5:6, 7, 86] *= -1  # alone, and of the second column
    values[5:6, 8:26] *= columns_of_all_kinds(rng)
    values[2, 3, 7], values[2, 4, :2], values[2, 5, 9] = np.nan, (np.inf, -np.inf), -0.0
    return in_lanes(np.asarray(jnp.asarray(values, dtype)))


def columns_of_all_kinds(rng: np.random.Generator) -> np.ndarray:
    """(18, 128): of lanes' columns zeros, ones and both, in all combinations, twice."""
    kinds = np.stack([np.zeros((4, 16)), np.ones((4, 16)), rng.integers(0, 2, (4, 16))])
    return np.stack([np.stack([first, second], 1).reshape(128) for first in kinds for second in kinds] * 2)


def kernels_and_reference(x, bound, capacity=None, interpret=True, signs=(True, False)):
    """Codes by both, that of the kernels with the words of its tiles in order, and their decoded values as bits, with signs and
    without, or as `signs` says.

    The reference runs on a CPU, where it compiles in seconds. For a GPU that takes XLA minutes.
    """
    exponent = step_exponent(bound, x.dtype)
    capacity = Grid.of(x.shape).tiles * 32 * _tiles.raw_words(x.dtype) if capacity is None else capacity
    by_kernels, by_reference = _coders(x.shape, x.dtype, capacity, interpret, signs)
    return by_kernels(x, exponent), by_reference(*jax.device_put((x, exponent), jax.devices("cpu")[0]))


@functools.lru_cache
def _coders(shape, dtype, capacity, interpret, signs):
    # XLA takes half as long for three kernels, one by one, as for a program of all.
    @jax.jit
    def encode(x, exponent):
        return launch.encode(x, exponent, capacity, interpret=interpret)

    @functools.partial(jax.jit, static_argnames="keeps_signs")
    def decode(code, exponent, keeps_signs):
        values = launch.decode(code, exponent, shape, dtype, interpret=interpret, keeps_signs=keeps_signs)
        return _tiles.to_bits(values)

    def by_kernels(x, exponent):
        code = encode(x, exponent)
        return code, [decode(code, exponent, keeps_signs=keeps) for keeps in signs]

    @jax.jit
    def by_reference(x, exponent):
        code = reference.encode(x, exponent, capacity)
        decode = functools.partial(reference.decode, code, exponent, shape, dtype)
        return code, [_tiles.to_bits(decode(keeps_signs=keeps)) for keeps in signs]

    return by_kernels, by_reference


def check_same(x, bound, capacity=None, interpret=True, signs=(True, False)) -> int:
    """The words that the code needs."""
    return _check(*kernels_and_reference(x, bound, capacity, interpret, signs))


def check_same_batched(xs, bound) -> None:
    """The same for each of `xs`, encoded by the kernels under `jax.vmap`, and decoded without signs."""
    exponent = step_exponent(bound, xs.dtype)
    capacity = Grid.of(xs[0].shape).tiles * 32 * _tiles.raw_words(xs.dtype)
    by_kernels, by_reference = _coders(xs[0].shape, xs.dtype, capacity, True, (False,))
    found = jax.vmap(by_kernels, in_axes=(0, None))(xs, exponent)
    for i, x in enumerate(xs):
        _check(jax.tree.map(lambda leaf, i=i: leaf[i], found), by_reference(x, exponent))


def _check(found, wanted) -> int:
    (code, decoded), (expected, expected_decoded) = found, wanted
    np.testing.assert_array_equal(code.headers, expected.headers)
    assert int(code.needed) == int(expected.needed)
    for own, expected_own in zip(decoded, expected_decoded, strict=True):
        np.testing.assert_array_equal(own, expected_own)
    if expected.needed > expected.words.size:
        return int(expected.needed)
    first, count = np.asarray(expected.offsets), np.diff(np.append(expected.offsets, expected.needed))
    # Tiles may lie in another order.
    index = np.arange(int(expected.needed)) + np.repeat(np.asarray(code.offsets) - first, count)
    np.testing.assert_array_equal(np.sort(index), np.arange(len(index)))
    np.testing.assert_array_equal(np.asarray(code.words)[index], np.asarray(expected.words)[: len(index)])
    return int(expected.needed)
