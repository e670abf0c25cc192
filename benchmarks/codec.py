"""Codecs on one GPU: `python -m benchmarks.codec speed`, some minutes, `python -m benchmarks.codec bound`, `... dense`, a minute.

speed: encoding and decoding, with signs and without, in TB/s of the array's bytes, and bits per value. First arrays of the
shapes of ResNet-50's activations after ReLUs, rectified Gaussians; then several kinds of data at several bounds.
bound: what `ErrorBounded` promises, checked for random float32 bit patterns, 10^9 of them per bound, with signs and without.
dense: `PositionQuantized` and, to compare with, `BlockQuantized`, in TB/s of the array's bytes: alone, and with what makes and
reads the values.

`--batch 1 --seconds 0.1 --values 65536`, `--patterns 1e6 --chunk 65536` and `--positions 256 --seconds 0.1` try them anywhere.
Rows are saved as they come.
"""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.progress import Progress

from benchmarks import record
from memjax.compress import BlockQuantized, ErrorBounded, PositionQuantized
from memjax.compress._codecs.codec import largest_error

# Image size and channels.
RESNET_50 = [(112, 64), (56, 64), (56, 256), (28, 512), (14, 1024), (7, 2048)]
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Speed:
    batch: int = 256
    values: int = 2**27
    """Number of values of the arrays that are not of ResNet-50's shapes."""
    seconds: float = 0.25
    """How long calls are timed for each number."""
    dtypes: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16", "float32")
    bounds: tuple[float, ...] = (0.25, 2.0**-5, 2.0**-9)
    time_limit: float = 600.0
    """Start no row after this many seconds."""
    name: str = "codec"


@dataclasses.dataclass(frozen=True)
class Bound:
    patterns: float = 1e9
    chunk: int = 2**26
    bounds: tuple[float, ...] = (1e-30, 1e-4, 2.0**-7, 0.37, 1e20)
    name: str = "codec_bound"


@dataclasses.dataclass(frozen=True)
class Dense:
    positions: int = 16384
    features: int = 8192
    seconds: float = 0.25
    dtypes: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16", "float32")
    name: str = "codec_dense"


def gaussian(key: Any, shape: tuple[int, ...]) -> Any:
    return jax.random.normal(key, shape)


def rectified(key: Any, shape: tuple[int, ...]) -> Any:
    return jnp.maximum(gaussian(key, shape), 0)


def sparse(key: Any, shape: tuple[int, ...]) -> Any:
    """Magnitudes of a Gaussian, of which 90% are zeros."""
    values, chance = jax.random.split(key)
    return jnp.where(jax.random.uniform(chance, shape) < 0.1, jnp.abs(gaussian(values, shape)), 0)


def adversarial(key: Any, shape: tuple[int, ...]) -> Any:
    """Random bits, with NaNs and infinities: nothing can be compressed."""
    return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint32), jnp.float32)


def median_seconds(call: Callable[[], Any], seconds: float) -> float:
    """The median time of a call when many are under way, after the clock of the GPU has risen."""

    def per_call(calls: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready([call() for _ in range(calls)])
        return (time.perf_counter() - began) / calls

    # So many calls that waiting for the last one takes no time, and so few that the results fit.
    calls = max(4, min(32, round(0.02 / per_call(4))))
    warm = time.perf_counter() + seconds / 2
    while time.perf_counter() < warm:
        per_call(calls)
    end = time.perf_counter() + seconds
    times: list[float] = []
    while time.perf_counter() < end or len(times) < 3:
        times.append(per_call(calls))
    return statistics.median(times)


def measure(config: Speed, make: Callable[..., Any], shape: tuple[int, ...], dtype: str, bound: float) -> dict:
    """One row. Calls take several arrays in turn, 400 MB or more together, so that no array is in a cache and launching kernels
    takes no extra time.
    """
    row = {"data": make.__name__, "shape": list(shape), "dtype": dtype, "bound": bound}
    try:
        copies = max(1, math.ceil(4e8 / (math.prod(shape) * DTYPES[dtype].dtype.itemsize))) if config.batch > 1 else 1
        arrays = [make(jax.random.key(i), shape).astype(DTYPES[dtype]) for i in range(copies)]
        codec = ErrorBounded(bound, bits_per_value=None if make is adversarial else 16)
        encode = jax.jit(lambda arrays: [codec.encode(x) for x in arrays])
        decoders = {"decode": codec.decode, "decode_without_signs": codec.without_signs().decode}
        decode = {name: jax.jit(functools.partial(_each, decoder)) for name, decoder in decoders.items()}
        codes = encode(arrays)
        bits = 8 * float(codes[0].needed_nbytes) / arrays[0].size
        size = sum(x.nbytes for x in arrays)
        floor = (1 + bits / 8 / arrays[0].dtype.itemsize) * size / 4.1e12
        errors = [float(jax.jit(largest_error)(arrays[0], decode_all(codes)[0])) for decode_all in decode.values()]
        seconds = {"encode": median_seconds(lambda: encode(arrays), config.seconds)}
        for name, decode_all in decode.items():
            seconds[name] = median_seconds(functools.partial(decode_all, codes), config.seconds)
        return {
            **row,
            "bits_per_value": round(bits, 3),
            "raw_share": round(float(codes[0].raw_share), 4),
            **{f"{name}_tb_s": round(size / s / 1e12, 3) for name, s in seconds.items()},
            "floor_tb_s": round(size / floor / 1e12, 2),
            "error_in_bounds": round(max(errors) / bound, 4),
        }
    except Exception as error:  # one case that fails must not hide the others
        return {**row, "error": f"{type(error).__name__}: {str(error)[:300]}"}


def dense_row(config: Dense, codec: Any, dtype: str) -> dict:
    """Floors are the bytes that must be read and written, at 4.3 TB/s."""
    x = gaussian(jax.random.key(0), (4, config.positions // 4, config.features)).astype(DTYPES[dtype])
    row = {"codec": repr(codec), "shape": list(x.shape), "dtype": dtype}
    try:
        share = codec.nbytes(x) / x.nbytes
        code = jax.jit(codec.encode)(x)
        calls: dict[str, Callable[[], Any]] = {
            "encode": functools.partial(jax.jit(codec.encode), x),
            "decode": functools.partial(jax.jit(codec.decode), code),
            # With what makes the values, and with what reads them.
            "square_encode": functools.partial(jax.jit(lambda x: codec.encode(x * x)), x),
            "decode_silu": functools.partial(jax.jit(lambda code: jax.nn.silu(codec.decode(code))), code),
        }
        seconds = {name: median_seconds(call, config.seconds) for name, call in calls.items()}
        return {
            **row,
            "bits_per_value": round(8 * share * x.dtype.itemsize, 3),
            **{f"{name}_tb_s": round(x.nbytes / s / 1e12, 3) for name, s in seconds.items()},
            "floor_tb_s": round(4.3 / (1 + share), 2),
            "relative_error": round(float(_relative_error(calls["decode"](), x)), 5),
        }
    except Exception as error:  # one case that fails must not hide the others
        return {**row, "error": f"{type(error).__name__}: {str(error)[:300]}"}


@jax.jit
def _relative_error(decoded: Any, x: Any) -> Any:
    wide, off = x.astype(jnp.float32), decoded.astype(jnp.float32) - x.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(off**2) / jnp.sum(wide**2))


def dense(config: Dense) -> Iterator[dict]:
    codecs: list[Any] = [PositionQuantized(bits) for bits in (8, 6, 4, 3)]
    codecs += [BlockQuantized(bits) for bits in (8, 4)]
    for dtype, codec in itertools.product(config.dtypes, codecs):
        yield dense_row(config, codec, dtype)


def _each(f: Callable[[Any], Any], many: list[Any]) -> list[Any]:
    return [f(one) for one in many]


def speeds(config: Speed) -> Iterator[dict]:
    for dtype in config.dtypes:
        for size, channels in RESNET_50:
            yield measure(config, rectified, (config.batch, size, size, channels), dtype, 0.25)
    shape = (config.values // 64, 64)
    for dtype, make, bound in itertools.product(
        config.dtypes, (rectified, gaussian, sparse, adversarial), config.bounds
    ):
        if make is not adversarial or bound == config.bounds[0]:
            yield measure(config, make, shape, dtype, bound)


@functools.partial(jax.jit, static_argnums=1)
def patterns(key: Any, count: int) -> Any:
    """Random bits, sorted by magnitude and laid out so that a lane has values of similar magnitude, which can be quantised. In
    each tile a half of the values, one in 32, one in 4,096, or none are negative.
    """
    magnitude_key, sign_key, tile_key = jax.random.split(key, 3)
    bits = jnp.sort(jax.random.bits(magnitude_key, (count,), jnp.uint32) << 1)  # the magnitudes, without the sign
    bits = (bits >> 1).reshape(-1, 32, 4, 2, 2, 8).transpose(0, 2, 4, 5, 1, 3).reshape(-1, 4096)
    most = jax.random.choice(tile_key, jnp.uint32([1 << 31, 1 << 27, 1 << 20, 0]), (len(bits), 1))
    is_negative = jax.random.bits(sign_key, bits.shape, jnp.uint32) < most
    return jax.lax.bitcast_convert_type(bits | (is_negative.astype(jnp.uint32) << 31), jnp.float32).reshape(-1)


@functools.partial(jax.jit, static_argnums=3)
def violations(x: Any, decoded: Any, bound: Any, keeps_signs: bool) -> Any:
    """The number of values that break a promise of `ErrorBounded`. Differences are in float64, where they are exact."""
    bits, decoded_bits = (jax.lax.bitcast_convert_type(a, jnp.uint32) for a in (x, decoded))
    magnitude, decoded_magnitude = bits & jnp.uint32(0x7FFFFFFF), decoded_bits & jnp.uint32(0x7FFFFFFF)
    is_finite = magnitude < jnp.uint32(0x7F800000)
    far = ~(jnp.abs(x.astype(jnp.float64) - decoded.astype(jnp.float64)) <= bound.astype(jnp.float64))
    sign = (magnitude == 0) != (decoded_magnitude == 0)
    if keeps_signs:
        sign |= (bits >> 31 != decoded_bits >> 31) & (magnitude != 0)
    return jnp.sum(jnp.where(is_finite, far | sign, bits != decoded_bits), dtype=jnp.int32)


def bounds(config: Bound) -> Iterator[dict]:
    chunks = math.ceil(config.patterns / config.chunk)
    with Progress() as progress:
        task = progress.add_task("chunks", total=chunks * len(config.bounds))
        for bound in config.bounds:
            codec = ErrorBounded(jnp.float32(bound))
            encode, decode = jax.jit(ErrorBounded.encode), jax.jit(ErrorBounded.decode)
            broken, raw = [0, 0], []
            for chunk in range(chunks):
                x = patterns(jax.random.key(chunk), config.chunk)
                code = encode(codec, x)
                for i, way in enumerate((codec, codec.without_signs())):
                    decoded = decode(way, code)
                    with jax.enable_x64(True):
                        broken[i] += int(violations(x, decoded, np.float32(bound), way.keeps_signs))
                raw.append(float(code.raw_share))
                progress.advance(task)
            yield {
                "bound": bound,
                "patterns": chunks * config.chunk,
                "violations": broken[0],
                "violations_without_signs": broken[1],
                "raw_share": round(statistics.mean(raw), 4),
            }


def main() -> None:
    config = tyro.cli(Speed | Bound | Dense, description=__doc__)
    began, rows = time.perf_counter(), []
    made = (
        speeds(config) if isinstance(config, Speed) else dense(config) if isinstance(config, Dense) else bounds(config)
    )
    for row in made:
        rows.append(row)
        print(row, flush=True)
        record.save(config.name, rows)
        if isinstance(config, Speed) and time.perf_counter() - began > config.time_limit:
            break


if __name__ == "__main__":
    main()
