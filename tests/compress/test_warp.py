"""The instructions of the kernels for GPUs against what the rest of the code says in `jax.numpy`."""

import jax.numpy as jnp
import numpy as np
import pytest

from memjax.compress import _warp
from memjax.compress._dither import LEAST
from memjax.compress._quantize import dequantize, inverse_step, step
from memjax.compress._warp import INTEGER, Warp, two_bfloat16s
from tests.compress import ptx

HERE, NATIVE = Warp(False), Warp(True)
EXPONENTS = (-119, -118, -60, -7, 0, 3, 60, 118, 123)
BFLOAT16S = np.arange(2**16, dtype=np.uint32)
PAIRS = BFLOAT16S | (BFLOAT16S[::-1] << 16)


@pytest.fixture(autouse=True)
def instructions(monkeypatch):
    monkeypatch.setattr(_warp, "_asm", ptx.run)


def bits(x, dtype=np.uint32):
    return np.asarray(x).view(dtype)


@pytest.mark.smoke
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_bfloat16s_are_counted(exponent):
    """All of them: as halves of eighths, as odd ones, and one by one."""
    both = exponent, exponent
    inverse = two_bfloat16s(*(inverse_step(jnp.int32(exponent - 2)),) * 2)
    here, there = (np.asarray(w.bfloat16_quarters(PAIRS, both, inverse)) for w in (HERE, NATIVE))
    for shift in (0, 16):
        expected, got = ((x >> shift) & 0xFFFF for x in (here, there))
        is_short = expected != 0xFFFF
        np.testing.assert_array_equal(got[is_short], expected[is_short])
        assert (got[~is_short] & 0xBC80).all()
    assert is_short.any()

    fours = list(PAIRS.reshape(4, -1))
    odds = [np.asarray(w.bfloat16_odds(fours, list(here.reshape(4, -1)), both, inverse)) for w in (HERE, NATIVE)]
    places = [i + shift for shift in (0, 16) for i in range(4)]
    short = np.stack([(here.reshape(4, -1)[p % 16] >> (p - p % 16)) & 0xFFFF != 0xFFFF for p in places])
    expected, got = (np.stack([(x >> p) & 1 for p in places]) for x in odds)
    np.testing.assert_array_equal(got[short], expected[short])
    if -60 <= exponent <= 60:
        assert expected[short].mean() > 0.01

    wide = BFLOAT16S << 16
    inverse = inverse_step(jnp.int32(exponent - 3))
    here, there = (np.asarray(w.eighths(wide, exponent, inverse, jnp.bfloat16)) for w in (HERE, NATIVE))
    is_large = here >= INTEGER + 2**23
    np.testing.assert_array_equal(there[~is_large], here[~is_large])
    assert (there[is_large] >= INTEGER + 2**23).all()


@pytest.mark.parametrize("exponent", [-119, -20, 0, 100, 127])
def test_float32s_are_counted(exponent):
    """Random ones of a size that matters, eighths of steps, and the special ones; and which are zero."""
    rng = np.random.default_rng(exponent + 200)
    with np.errstate(over="ignore"):
        near = (rng.normal(size=10000) * np.exp2(exponent + rng.uniform(-6, 20, 10000))).astype(np.float32)
        whole = (np.arange(1, 4001) * np.exp2(exponent - 3.0)).astype(np.float32)
    special = np.array([0, -0.0, 1e-45, -1e-45, np.inf, -np.inf, np.nan, 3.4e38], np.float32)
    wide = bits(np.concatenate([near, whole, special, special * np.float32(1e-7)]))
    inverse = inverse_step(jnp.int32(exponent - 3))
    here, there = (np.asarray(w.eighths(wide, exponent, inverse, jnp.float32)) for w in (HERE, NATIVE))
    is_large = here >= INTEGER + 2**23
    np.testing.assert_array_equal(there[~is_large], here[~is_large])
    assert (there[is_large] >= INTEGER + 2**23).all()
    numbers = np.where(np.isnan(wide.view(np.float32)), 0, wide).reshape(4, -1)  # of NaNs anything may be said
    here, there = (np.asarray(w.flags([list(numbers), list(numbers[::-1])])) for w in (HERE, NATIVE))
    np.testing.assert_array_equal(there & 0xF0F, here & 0xF0F)


def test_which_bfloat16s_are_zero():
    fours = list(PAIRS.reshape(4, -1))
    here, there = (np.asarray(w.bfloat16_flags(fours)) & 0x000F000F for w in (HERE, NATIVE))
    np.testing.assert_array_equal(there, here)


@pytest.mark.smoke
@pytest.mark.parametrize("exponent", [-109, -7, 0, 3, 119])
def test_values_are_those_of_the_quantiser(exponent):
    """All magnitudes and all eighths of dither, of the instructions for a pair and for one float32."""
    q, d = (x.reshape(-1) for x in np.meshgrid(np.arange(32, dtype=np.uint32), np.arange(8, dtype=np.uint32)))
    k = jnp.int32(exponent)
    expected = np.asarray(dequantize(jnp.asarray(q), q < 0, k, jnp.asarray(d), jnp.bfloat16)).view(np.uint16)

    def scale(factor):
        return np.asarray(two_bfloat16s(*(step(k) * jnp.float32(factor),) * 2))

    numbers, first = 8 * q + 7 - d, np.uint32(0)
    word = (numbers & 0x7F) | 0x80
    word = word | (word[::-1] << 16)
    scales = (scale(x) for x in (1, LEAST, -17.375, -16.875 * LEAST))
    got = np.asarray(NATIVE.bfloat16_values(word, first, *scales))
    np.testing.assert_array_equal(got[q < 16] & 0xFFFF, expected[q < 16])
    np.testing.assert_array_equal(got[::-1][q < 16] >> 16, expected[q < 16])

    word, odd = (numbers >> 1) | 0x80, numbers & 1
    word, odd = (x << 8 | (x[::-1] << 24) for x in (word, odd))
    scales = tuple(scale(x) for x in (2, 1 / 8, -1.375, 2 * LEAST, LEAST / 8, -0.875 * LEAST))
    got = np.asarray(NATIVE.bfloat16_values_of_two(word, odd, np.uint32(1), scales))
    np.testing.assert_array_equal(got & 0xFFFF, expected)
    np.testing.assert_array_equal(got[::-1] >> 16, expected)

    for index in range(4):
        got = NATIVE.float_of_byte(numbers << (8 * index), np.uint32(index))
        np.testing.assert_array_equal(got, 2.0**20 + numbers / 8)
        np.testing.assert_array_equal(HERE.float_of_byte(numbers << (8 * index), np.uint32(index)), got)


def test_bytes_and_bits_of_words():
    a, b = np.random.default_rng(0).integers(0, 2**32, (2, 100), dtype=np.uint32)
    for which in ((0, 4, 2, 6), (1, 5, 3, 7), (0, 1, 4, 5), (3, 7, 3, 7), (0, 1, 6, 7), (1, 5, 1, 5), (2, 6, 2, 6)):
        np.testing.assert_array_equal(NATIVE.bytes_of((a, b), which), HERE.bytes_of((a, b), which))
    for mask in (0x0F0F0F0F, 0x33333333, 0x55555555):
        np.testing.assert_array_equal(NATIVE.choose(mask, a, b), (a & mask) | (b & (mask ^ 0xFFFFFFFF)))
        np.testing.assert_array_equal(HERE.choose(mask, a, b), NATIVE.choose(mask, a, b))
