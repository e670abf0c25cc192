"""Triton kernels over rows of a chunk of products, through `jax_triton`: each element is read once where it
can be.

`stats_and_gradient` walks a row forwards for its log-sum-exp and then backwards, writing the gradient over
the products: the end of the row is still in the cache when the second walk begins. `stats` and `gradient` are
the halves, for rows of which other chunks or other devices hold a part. The arithmetic is that of `rows`;
soft targets are left to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl
from jax.custom_batching import sequential_vmap
from triton.language.extra import libdevice

from memjax._linear_cross_entropy.options import Array, Options, vary, varying_axes
from memjax._linear_cross_entropy.rows import Stats


@dataclass(frozen=True)
class Tiles:
    """Columns a program holds at a time, and warps that share them."""

    row_block: int = 16384
    row_warps: int = 16
    stats_block: int = 8192
    stats_warps: int = 8
    gradient_block: int = 4096
    gradient_warps: int = 8


TILES = Tiles()


@triton.jit
def _logits(products, bias, columns, mask, HAS_BIAS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr):
    z = tl.load(products + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    if SCALE != 1.0:
        z *= SCALE
    if CAP > 0.0:
        z = CAP * libdevice.tanh(z / CAP)
    return tl.where(mask, z, -float("inf"))


@triton.jit
def _row_stats(
    row,
    bias,
    label,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    SUM: tl.constexpr,
    AUX: tl.constexpr,
):
    """(max, sum of exp(z - max), sum of z, sum of exp(z - max) z, z at the label or 0)."""
    maximum = -float("inf")
    total = 0.0
    plain = 0.0
    moment = 0.0
    for start in tl.range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < WIDTH
        z = _logits(row, bias, columns, mask, HAS_BIAS, SCALE, CAP)
        larger = tl.maximum(maximum, tl.max(z, 0))
        finite = tl.where(larger == -float("inf"), 0.0, larger)
        correction = tl.exp(maximum - finite)
        e = tl.exp(z - finite)
        total = total * correction + tl.sum(e, 0)
        if SUM:
            plain += tl.sum(tl.where(mask, z, 0.0), 0)
        if AUX:
            moment = moment * correction + tl.sum(tl.where(e == 0.0, 0.0, e * z), 0)
        maximum = larger
    inside = (label >= 0) & (label < WIDTH)
    at_label = _logits(row, bias, label, inside, HAS_BIAS, SCALE, CAP)
    return maximum, total, plain, moment, tl.where(inside, at_label, 0.0)


@triton.jit
def _row_gradient(
    row,
    out,
    bias,
    label,
    lse,
    scale,
    columns,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    KEEP: tl.constexpr,
    SPREAD: tl.constexpr,
    Z_LOSS: tl.constexpr,
):
    mask = columns < WIDTH
    z = _logits(row, bias, columns, mask, HAS_BIAS, SCALE, CAP)
    d = tl.exp(z - lse) * (1.0 + 2.0 * Z_LOSS * lse)
    d = tl.where(columns == label, d - KEEP, d)
    if SPREAD > 0.0:
        d -= SPREAD
    if CAP > 0.0:
        d *= 1.0 - (z / CAP) * (z / CAP)
    tl.store(out + columns, (d * (scale * SCALE)).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _stats_kernel(
    products, bias, labels, max_out, sum_out, plain_out, moment_out, label_out,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    SUM: tl.constexpr, AUX: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    maximum, total, plain, moment, at_label = _row_stats(
        products + i * WIDTH, bias, tl.load(labels + i), WIDTH, BLOCK, HAS_BIAS, SCALE, CAP, SUM, AUX
    )
    tl.store(max_out + i, maximum)
    tl.store(sum_out + i, total)
    tl.store(plain_out + i, plain)
    tl.store(moment_out + i, moment)
    tl.store(label_out + i, at_label)


@triton.jit
def _gradient_kernel(
    products, bias, labels, lse, scale, out,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    KEEP: tl.constexpr, SPREAD: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _row_gradient(
        products + i * WIDTH, out + i * WIDTH, bias,
        tl.load(labels + i), tl.load(lse + i), tl.load(scale + i),
        columns, WIDTH, HAS_BIAS, SCALE, CAP, KEEP, SPREAD, Z_LOSS,
    )  # fmt: skip


@triton.jit
def _stats_and_gradient_kernel(
    products, bias, labels, scale, out, max_out, sum_out, plain_out, moment_out, label_out,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    SUM: tl.constexpr, AUX: tl.constexpr, KEEP: tl.constexpr, SPREAD: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = products + i * WIDTH
    label = tl.load(labels + i)
    maximum, total, plain, moment, at_label = _row_stats(row, bias, label, WIDTH, BLOCK, HAS_BIAS, SCALE, CAP, SUM, AUX)
    tl.store(max_out + i, maximum)
    tl.store(sum_out + i, total)
    tl.store(plain_out + i, plain)
    tl.store(moment_out + i, moment)
    tl.store(label_out + i, at_label)
    lse = maximum + tl.log(total)
    weight = tl.load(scale + i)
    # Every product that another thread may still need has been read: the sums above waited for all of them.
    # But the load of the label's product is every thread's own.
    tl.debug_barrier()
    last: tl.constexpr = (WIDTH - 1) // BLOCK
    for back in tl.range(0, last + 1):
        columns = (last - back) * BLOCK + tl.arange(0, BLOCK)
        _row_gradient(
            row, out + i * WIDTH, bias, label, lse, weight,
            columns, WIDTH, HAS_BIAS, SCALE, CAP, KEEP, SPREAD, Z_LOSS,
        )  # fmt: skip


def _logit_constants(bias: Array | None, options: Options) -> dict[str, Any]:
    return {"HAS_BIAS": bias is not None, "SCALE": options.logit_scale, "CAP": options.softcap or 0.0}


def _stats_constants(options: Options) -> dict[str, Any]:
    return {"SUM": options.label_smoothing > 0, "AUX": options.aux}


def _gradient_constants(options: Options) -> dict[str, Any]:
    keep, spread = 1.0 - options.label_smoothing, options.label_smoothing / options.vocabulary
    return {"KEEP": keep, "SPREAD": spread, "Z_LOSS": options.z_loss}


def _block(width: int, most: int) -> int:
    return min(most, triton.next_power_of_2(width))


def _call(kernel: Any, arrays: tuple[Array, ...], out: Any, **settings: Any) -> Any:
    """One launch; under `vmap` one after another, since a kernel knows only rows."""

    @sequential_vmap
    def launch(*arrays: Array) -> Any:
        return jax_triton.triton_call(*arrays, kernel=kernel, out_shape=out, **settings)

    return vary(launch(*arrays), varying_axes(*arrays))


def _row(tokens: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((tokens,), jnp.float32)


def _to_stats(sums: Any, options: Options) -> Stats:
    maximum, total, plain, moment, label = sums
    target = label
    if options.label_smoothing:
        spread = options.label_smoothing / options.vocabulary
        target = (1.0 - options.label_smoothing) * label + spread * plain
    return Stats(maximum, total, target, None, *((label, moment) if options.aux else (None, None)))


def stats(products: Array, bias: Array | None, labels: Array, options: Options) -> Stats:
    tokens, width = products.shape
    sums = _call(
        _stats_kernel,
        (products, labels if bias is None else bias, labels),
        [_row(tokens)] * 5,
        grid=(tokens,),
        num_warps=TILES.stats_warps,
        WIDTH=width,
        BLOCK=_block(width, TILES.stats_block),
        **_logit_constants(bias, options),
        **_stats_constants(options),
    )
    return _to_stats(sums, options)


def gradient(products: Array, bias: Array | None, labels: Array, lse: Array, scale: Array, options: Options) -> Array:
    """Written over `products`."""
    tokens, width = products.shape
    block = _block(width, TILES.gradient_block)
    return _call(
        _gradient_kernel,
        (products, labels if bias is None else bias, labels, lse, scale),
        jax.ShapeDtypeStruct(products.shape, products.dtype),
        input_output_aliases={0: 0},
        grid=(tokens, triton.cdiv(width, block)),
        num_warps=TILES.gradient_warps,
        WIDTH=width,
        BLOCK=block,
        **_logit_constants(bias, options),
        **_gradient_constants(options),
    )


def stats_and_gradient(
    products: Array, bias: Array | None, labels: Array, scale: Array, options: Options
) -> tuple[Stats, Array]:
    """For rows that are whole. The gradient is written over `products`."""
    tokens, width = products.shape
    d, *sums = _call(
        _stats_and_gradient_kernel,
        (products, labels if bias is None else bias, labels, scale),
        [jax.ShapeDtypeStruct(products.shape, products.dtype), *[_row(tokens)] * 5],
        input_output_aliases={0: 0},
        grid=(tokens,),
        num_warps=TILES.row_warps,
        WIDTH=width,
        BLOCK=_block(width, TILES.row_block),
        **_logit_constants(bias, options),
        **_stats_constants(options),
        **_gradient_constants(options),
    )
    return _to_stats(sums, options), d
