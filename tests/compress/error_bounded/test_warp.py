"""The instructions of the kernels for GPUs against what the rest of the code says in `jax.numpy`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.compress._error_bounded import warp as _warp
from memjax.compress._error_bounded.decode_kernel import _value_of
from memjax.compress._error_bounded.quantize import dequantize, inverse_step, step
from memjax.compress._error_bounded.warp import INTEGER, Warp, scales_of_bfloat16_values
from tests.compress.error_bounded import ptx

HERE, NATIVE = Warp(False), Warp(True)
parts_here = jax.jit(HERE.parts)
dequantized = jax.jit(dequantize, static_argnames=("dtype", "keeps_signs"))
value_of = jax.jit(_value_of, static_argnames=("dtype", "keeps_signs"))


@pytest.fixture(autouse=True)
def instructions(monkeypatch):
    monkeypatch.setattr(_warp, "_asm", ptx.run)


def check_counted(magnitude, exponent):
    part = jnp.int32(exponent - 3)
    here, there = (np.asarray(f(magnitude, part, inverse_step(part))) for f in (parts_here, NATIVE.parts))
    is_large = here >= INTEGER + 2**23
    np.testing.assert_array_equal(there[~is_large], here[~is_large])
    assert (there[is_large] & (~INTEGER & 0xFF800000)).all()
    return here


@pytest.mark.smoke
@pytest.mark.parametrize("exponent", [-112, -60, -7, 0, 3, 60, 119])
def test_bfloat16s_are_counted(exponent):
    """All of them, without signs."""
    counts = check_counted(np.arange(2**15, dtype=np.uint32) << 16, exponent)
    assert (counts[1:] > INTEGER).all()  # of what is not zero


@pytest.mark.parametrize("exponent", [-112, -20, 0, 100, 111])
def test_float32s_are_counted(exponent):
    """Random ones of a size that matters, eighths of steps and their neighbours, and the special ones."""
    rng = np.random.default_rng(exponent + 200)
    with np.errstate(over="ignore"):
        near = np.abs(rng.normal(size=10000) * np.exp2(exponent + rng.uniform(-6, 20, 10000))).astype(np.float32)
        whole = (np.arange(1, 4001) * np.exp2(exponent - 3.0)).astype(np.float32)
    special = np.array([0, 1e-45, 1e-38, np.inf, np.nan, 3.4e38], np.float32)
    around = [np.nextafter(whole, np.float32(0)), whole, np.nextafter(whole, np.float32(np.inf))]
    check_counted(np.concatenate([near, *around, special]).view(np.uint32), exponent)


def numbers_and_values(dtype, exponent, keeps_signs):
    """For all magnitudes and all dither the numbers that kernels have, the values of the quantiser, and which are short."""
    parts = 16 if dtype == jnp.float32 else 8
    p, e = (x.reshape(-1) for x in np.meshgrid(np.arange(256, dtype=np.uint32), np.arange(parts, dtype=np.uint32)))
    is_some = (p > 0) | (e < parts - 1)  # the others do not come up, their number stands for zero, with signs
    k = jnp.int32(exponent)
    values = dequantized(p, is_some, p < 0, k, e, dtype=dtype, keeps_signs=keeps_signs)
    numbers = parts * p + parts - 1 - e
    if keeps_signs:
        numbers = np.where(is_some & (numbers < parts // 2), parts // 2, numbers)
    else:
        numbers = np.where(is_some, np.where(numbers == parts // 2, parts // 2 + 1, numbers), parts // 2)
    if dtype == jnp.bfloat16:
        numbers = np.where(numbers >= 1024, numbers | 4, numbers)
    values = np.asarray(values)
    assert ((values != 0) == is_some).all()
    assert not keeps_signs or (values[is_some] > 0).all()
    return numbers, values.view(np.uint32 if dtype == jnp.float32 else np.uint16), p < 16


@pytest.mark.parametrize("keeps_signs", [True, False])
@pytest.mark.parametrize("exponent", [-112, -7, 0, 3, 106])
def test_bfloat16_values_are_those_of_the_quantiser(exponent, keeps_signs):
    """All magnitudes and all eighths of dither, of the instructions for pairs; and zeros."""
    numbers, expected, is_short = numbers_and_values(jnp.bfloat16, exponent, keeps_signs)
    steps = (step(jnp.int32(exponent)),) * 2
    word = numbers | (numbers[::-1] << 16)
    for warp in (HERE, NATIVE):
        got = np.asarray(warp.bfloat16_values_of_halves(word, steps, keeps_signs))
        np.testing.assert_array_equal(got & 0xFFFF, expected)
        np.testing.assert_array_equal(got[::-1] >> 16, expected)

    word = (numbers[is_short] & 0x7F) | 0x80
    word = word | (word[::-1] << 16)
    scales = [np.asarray(scale) for scale in scales_of_bfloat16_values(steps, keeps_signs)]
    for first in range(2):
        got = np.asarray(NATIVE.bfloat16_values(word << (8 * first), np.uint32(first), scales))
        np.testing.assert_array_equal(got & 0xFFFF, expected[is_short])
        np.testing.assert_array_equal(got[::-1] >> 16, expected[is_short])


@pytest.mark.parametrize("keeps_signs", [True, False])
@pytest.mark.parametrize("exponent", [-112, -7, 0, 3, 109])
def test_float32_values_are_those_of_the_quantiser(exponent, keeps_signs):
    """All magnitudes and all sixteenths of dither; and zeros."""
    numbers, expected, _ = numbers_and_values(jnp.float32, exponent, keeps_signs)
    for warp in (HERE, NATIVE):
        for index in range(4):
            got = warp.float_of_byte((numbers & 0xFF) << (8 * index), np.uint32(index))
            np.testing.assert_array_equal(got, 2.0**23 + (numbers & 0xFF))
        for half in range(2):
            got = np.asarray(warp.float_of_half(numbers << (16 * half), half))
            np.testing.assert_array_equal(got, 2.0**23 + numbers)
    values = value_of(got, step(jnp.int32(exponent)), dtype=jnp.dtype(jnp.float32), keeps_signs=keeps_signs)
    np.testing.assert_array_equal(np.asarray(values).view(np.uint32), expected)


def test_bytes_and_bits_of_words():
    a, b = np.random.default_rng(0).integers(0, 2**32, (2, 100), dtype=np.uint32)
    for which in ((0, 4, 2, 6), (1, 5, 3, 7), (0, 1, 4, 5), (3, 7, 3, 7), (0, 1, 6, 7), (2, 3, 6, 7)):
        np.testing.assert_array_equal(NATIVE.bytes_of((a, b), which), HERE.bytes_of((a, b), which))
    for mask in (0x0F0F0F0F, 0x33333333, 0x55555555):
        np.testing.assert_array_equal(NATIVE.choose(mask, a, b), (a & mask) | (b & (mask ^ 0xFFFFFFFF)))
        np.testing.assert_array_equal(HERE.choose(mask, a, b), NATIVE.choose(mask, a, b))
    by = (a % 40).astype(np.uint32)
    np.testing.assert_array_equal(HERE.shift_left(b, by), np.where(by < 32, b << (by & 31), 0))
    np.testing.assert_array_equal(HERE.shift_right(b, by), np.where(by < 32, b >> (by & 31), 0))
