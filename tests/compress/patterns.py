"""Arrays for tests of codecs: every bit pattern, laid out so that neighbours are coded together."""

import jax.numpy as jnp
import numpy as np


def from_bits(bits: np.ndarray, dtype):
    dtype = jnp.dtype(dtype)
    return bits.astype(np.uint32 if dtype.itemsize == 4 else np.uint16).view(dtype)


def to_bits(x) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32 if x.dtype.itemsize == 4 else np.uint16)


def in_lanes(values):
    """Flat values, a multiple of 4096, so laid out that runs of 128 are coded together."""
    return values.reshape(-1, 32, 4, 2, 2, 8).transpose(0, 2, 4, 5, 1, 3).reshape(-1)


def every_16_bit_pattern(dtype):
    """All 65,536 values by magnitude, so that few lanes hold both small and large ones; then shuffled, where many do."""
    bits = np.arange(65536, dtype=np.uint16)
    by_magnitude = bits[np.argsort(bits & 0x7FFF, kind="stable")]
    shuffled = np.random.default_rng(0).permutation(bits)
    return from_bits(np.concatenate([in_lanes(by_magnitude), shuffled]), dtype)


def random_float32_patterns(seed: int, count: int):
    """Random bit patterns by magnitude; NaNs with payloads, infinities and subnormal numbers among them."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return from_bits(in_lanes(bits[np.argsort(bits & 0x7FFFFFFF)]), jnp.float32)


def check_bound(x, decoded, bound, keeps_signs=True):
    """Everything that `ErrorBounded` promises, for every value. The comparison is exact: float64 holds the differences."""
    x_bits, decoded_bits = to_bits(x), to_bits(decoded)
    exact, got = (_exactly(bits, x.dtype) for bits in (x_bits, decoded_bits))
    finite = np.isfinite(exact)
    assert np.abs(exact[finite] - got[finite]).max(initial=0) <= bound
    kept = np.sign if keeps_signs else lambda values: values != 0
    np.testing.assert_array_equal(kept(got)[finite], kept(exact)[finite])
    np.testing.assert_array_equal(decoded_bits[~finite], x_bits[~finite])


def _exactly(bits, dtype) -> np.ndarray:
    """The values as float64, made by NumPy alone: XLA's conversions may flush subnormal numbers."""
    if dtype == jnp.bfloat16:
        bits = bits.astype(np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return bits.view(np.float16 if dtype == jnp.float16 else np.float32).astype(np.float64)
