"""Codes of optimizer state: grids, zeros, no bias, errors as predicted, bytes, values that are not finite."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.compress._state import minifloat, noise, operations

BITS_AND_SIGNS = [(8, True), (8, False), (4, True), (4, False)]
each_code = pytest.mark.parametrize(("bits", "signed"), BITS_AND_SIGNS)


def encode(x, step, bits, signed):
    return operations.encode(x, noise.seed(step, 0), bits=bits, signed=signed)


@functools.partial(jax.jit, static_argnames=("bits", "signed"))
def round_trip(x, step, bits, signed):
    return minifloat.decode(encode(x, step, bits, signed))


def values(*shape, signed, seed=0, octaves=3.0):
    """Log-normal magnitudes, with signs or without."""
    rng = np.random.default_rng(seed)
    x = np.exp2(octaves * rng.normal(size=shape)).astype(np.float32)
    return jnp.asarray(x * rng.choice([-1, 1], shape).astype(np.float32) if signed else x)


def grid(bits, signed):
    """All values of a block whose largest is the largest code, by the definition in words."""
    digits = {8: 4, 4: 1}[bits]
    floats = lambda digits, start, octaves: [
        2**e * (1 + m / 2**digits) for e in range(start, start + octaves) for m in range(2**digits)
    ]
    if signed:
        steps = 2**digits
        positive = [m / steps for m in range(steps)] + floats(digits, 0, 2 ** (bits - 1) // steps - 1)
        return np.array(sorted({*positive, *(-v for v in positive)}), np.float32)
    low, high = {8: (12, 10), 4: (8, 4)}[bits]  # octaves, the subnormal numbers' included
    coarse = [m / 2 ** (digits - 1) for m in range(2 ** (digits - 1))] + floats(digits - 1, 0, low - 1)
    return np.array([*coarse, *floats(digits, low - 1, high)], np.float32)


@each_code
def test_decoded_values_are_neighbours_on_the_grid_and_stay(bits, signed):
    numbers = grid(bits, signed)
    assert len(numbers) == 2**bits - signed  # zero has two signs
    rng = np.random.default_rng(0)
    x = rng.uniform(-1 if signed else 0, 1, (64, 32)).astype(np.float32) ** 3 * numbers[-1]
    x[:, 5], x[:, 0] = 0, numbers[-1]
    for scale in (1, 2.0**20, 2.0**-30):
        found = np.asarray(round_trip(jnp.asarray(x * np.float32(scale)), jnp.int32(3), bits, signed)) / scale
        above = np.clip(np.searchsorted(numbers, x), 1, None)
        below = numbers[above - 1] if signed else np.maximum(numbers[above - 1], np.where(x > 0, numbers[1], 0))
        assert np.all((found == numbers[above]) | (found == below) | (found == x))
        again = np.asarray(round_trip(jnp.asarray(found * scale), jnp.int32(4), bits, signed)) / scale
        np.testing.assert_array_equal(again, found)


@each_code
def test_zero_is_zero_and_what_is_divided_by_never_becomes_it(bits, signed):
    x = jnp.zeros((4, 64)).at[0, 3].set(1e-38).at[1, 2].set(1.0).at[1, 3].set(1e-30).at[2, 40].set(2.5e38)
    found = np.asarray(round_trip(x, jnp.int32(0), bits, signed))
    assert np.all(found[np.asarray(x) == 0] == 0)
    assert np.all(np.isfinite(found))
    if not signed:
        assert np.all(found[np.asarray(x) > 2e-38] > 0)
        assert found[1, 3] < 2.0 ** (-22 if bits == 8 else -9)


@each_code
def test_rounding_is_right_on_average_and_by_as_much_as_predicted(bits, signed):
    x = values(8, 64, signed=signed, octaves=1.0)
    steps = 1024
    found = np.asarray(jax.lax.map(lambda i: round_trip(x, i, bits, signed), jnp.arange(steps)), np.float64)
    wanted = np.asarray(x, np.float64)
    error = found - wanted
    # Right on average: deviations of the mean are those of independent steps.
    least, step = np.min(found, 0), np.ptp(found, 0)
    share = np.where(step > 0, (wanted - least) / np.where(step > 0, step, 1), 0)
    variance = share * (1 - share)
    often = variance * steps > 10
    assert np.mean(often) > 0.7
    z = np.mean(error, 0)[often] / (step * np.sqrt(variance / steps))[often]
    assert np.all(np.abs(z) < 5)
    assert 0.8 < np.std(z) < 1.2
    # Steps of neighbours and of the same value have nothing to do with each other.
    unit = np.where(often, error / np.where(often, np.std(error, 0), 1), 0)
    spread = 4 / steps**0.5
    assert abs(np.mean(unit[:, :, 1:] * unit[:, :, :-1])) < spread
    assert abs(np.mean(unit[1:] * unit[:-1])) < spread


def test_a_round_trip_is_off_by_as_much_as_predicted():
    """A step s has an error of s / sqrt(6), root mean square: 0.30 * 2^-digits of values between powers of two."""
    for signed, digits in ((True, 4), (False, 4)):
        x = values(256, 256, signed=signed, octaves=0.7)
        error = np.asarray(round_trip(x, jnp.int32(1), 8, signed) / x - 1)
        assert np.sqrt(np.mean(error**2)) == pytest.approx(0.30 * 2.0**-digits, rel=0.1)


@pytest.mark.parametrize(("bits", "signed"), [(8, True), (4, False)])
@pytest.mark.parametrize("shape", [(64, 50), (33,), (2, 48, 3), (7, 5025)])
def test_shapes_and_bytes(bits, signed, shape):
    x = values(*shape, signed=signed)

    @jax.jit
    def coded(x):
        code = encode(x, jnp.int32(0), bits, signed)
        return code, minifloat.decode(code)

    code, found = coded(x)
    assert found.shape == x.shape
    assert found.dtype == x.dtype
    nbytes = code.codes.nbytes + code.exponents.nbytes
    assert nbytes <= (1.04 if bits == 8 else 0.56) * x.size + 1
    if bits == 8:
        assert code.codes.shape == shape
    x, found = np.asarray(x), np.asarray(found)
    largest = np.max(np.abs(x))
    assert np.max(np.abs(found - x)) <= largest / (8 if bits == 8 else 2)


def test_what_is_not_finite_is_not_hidden():
    x = jnp.ones((2, 64)).at[0, 3].set(jnp.nan).at[1, 40].set(jnp.inf)
    for bits, signed in BITS_AND_SIGNS:
        found = np.asarray(round_trip(x, jnp.int32(0), bits, signed))
        np.testing.assert_array_equal(np.isnan(found), np.repeat([[1, 0], [0, 1]], 32, 1).astype(bool))
