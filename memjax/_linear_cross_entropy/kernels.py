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
    """Columns a program holds at a time, warps that share them, and blocks of columns on their way to it."""

    row_block: int = 4096
    row_warps: int = 8
    row_stages: int = 4
    stats_block: int = 2048
    stats_warps: int = 4
    stats_stages: int = 3
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
def _finite(maximum):
    """A row without any possible entry has a maximum of -inf, which must not be subtracted from itself."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def _row_stats(
    row, bias, label,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, SCALE: tl.constexpr,
    CAP: tl.constexpr, SUM: tl.constexpr, AUX: tl.constexpr,
):  # fmt: skip
    """(max, sum of exp(z - max), sum of z, sum of exp(z - max) z, z at the label or 0).

    Threads keep sums of their own over the whole row, relative to the first block's maximum; waiting for one
    another at every block costs more. Where a later maximum is so much larger that they may have overflowed,
    they are taken again.
    """
    first = tl.arange(0, BLOCK)
    reference = tl.max(_logits(row, bias, first, first < WIDTH, HAS_BIAS, SCALE, CAP), 0)
    maximum = reference
    total, plain, moment = 0.0, 0.0, 0.0
    again = 1
    while again > 0:
        again -= 1
        shift = _finite(reference)
        maxima = tl.full((BLOCK,), -float("inf"), tl.float32)
        totals = tl.zeros((BLOCK,), tl.float32)
        plains = tl.zeros((BLOCK,), tl.float32)
        moments = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, WIDTH, BLOCK, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < WIDTH
            z = _logits(row, bias, columns, mask, HAS_BIAS, SCALE, CAP)
            maxima = tl.maximum(maxima, z)
            e = tl.exp(z - shift)
            totals += e
            if SUM:
                plains += tl.where(mask, z, 0.0)
            if AUX:
                moments += tl.where(e == 0.0, 0.0, e * z)
        maximum = tl.max(maxima, 0)
        total, plain, moment = tl.sum(totals, 0), tl.sum(plains, 0), tl.sum(moments, 0)
        if ((maximum > shift + 60.0) | (reference == -float("inf"))) & (reference != maximum):
            reference = maximum
            again = 1
    correction = tl.exp(_finite(reference) - _finite(maximum))
    inside = (label >= 0) & (label < WIDTH)
    at_label = tl.where(inside, _logits(row, bias, label, inside, HAS_BIAS, SCALE, CAP), 0.0)
    return maximum, total * correction, plain, moment * correction, at_label


@triton.jit
def _gradient(
    z, hit, lse, scale,
    SCALE: tl.constexpr, CAP: tl.constexpr, KEEP: tl.constexpr, SPREAD: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    """In the products of logits `z`; `hit` is 1 at the label."""
    d = tl.exp(z - lse) * (1.0 + 2.0 * Z_LOSS * lse) - KEEP * hit - SPREAD
    if CAP > 0.0:
        d *= 1.0 - (z / CAP) * (z / CAP)
    return d * (scale * SCALE)


@triton.jit
def _store_gradient(
    row, out, bias, columns, lse, scale,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, KEEP: tl.constexpr,
    SPREAD: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    """Of columns as if none was the label: comparing each with it costs as much as its exponential."""
    mask = columns < WIDTH
    z = _logits(row, bias, columns, mask, HAS_BIAS, SCALE, CAP)
    d = _gradient(z, 0.0, lse, scale, SCALE, CAP, KEEP, SPREAD, Z_LOSS)
    tl.store(out + columns, d.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _stats_kernel(
    products, bias, labels, max_out, sum_out, plain_out, moment_out, label_out,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, SCALE: tl.constexpr,
    CAP: tl.constexpr, SUM: tl.constexpr, AUX: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    maximum, total, plain, moment, at_label = _row_stats(
        products + i * WIDTH, bias, tl.load(labels + i), WIDTH, BLOCK, STAGES, HAS_BIAS, SCALE, CAP, SUM, AUX
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
    start = tl.program_id(1) * BLOCK
    label, row_lse, weight = tl.load(labels + i), tl.load(lse + i), tl.load(scale + i)
    row = products + i * WIDTH
    inside = (label >= start) & (label < min(start + BLOCK, WIDTH))
    at_label = _logits(row, bias, label, inside, HAS_BIAS, SCALE, CAP)
    tl.debug_barrier()
    columns = start + tl.arange(0, BLOCK)
    _store_gradient(
        row, out + i * WIDTH, bias, columns, row_lse, weight,
        WIDTH, HAS_BIAS, SCALE, CAP, KEEP, SPREAD, Z_LOSS,
    )  # fmt: skip
    tl.debug_barrier()
    d = _gradient(at_label, 1.0, row_lse, weight, SCALE, CAP, KEEP, SPREAD, Z_LOSS)
    tl.store(out + i * WIDTH + label, d.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _stats_and_gradient_kernel(
    products, bias, labels, scale, out, max_out, sum_out, plain_out, moment_out, label_out,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, SCALE: tl.constexpr,
    CAP: tl.constexpr, SUM: tl.constexpr, AUX: tl.constexpr, KEEP: tl.constexpr, SPREAD: tl.constexpr,
    Z_LOSS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = products + i * WIDTH
    label = tl.load(labels + i)
    maximum, total, plain, moment, at_label = _row_stats(
        row, bias, label, WIDTH, BLOCK, STAGES, HAS_BIAS, SCALE, CAP, SUM, AUX
    )
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
    for back in tl.range(0, last + 1, num_stages=STAGES):
        columns = (last - back) * BLOCK + tl.arange(0, BLOCK)
        _store_gradient(
            row, out + i * WIDTH, bias, columns, lse, weight,
            WIDTH, HAS_BIAS, SCALE, CAP, KEEP, SPREAD, Z_LOSS,
        )  # fmt: skip
    tl.debug_barrier()
    inside = (label >= 0) & (label < WIDTH)
    d = _gradient(at_label, 1.0, lse, weight, SCALE, CAP, KEEP, SPREAD, Z_LOSS)
    tl.store(out + i * WIDTH + label, d.to(out.dtype.element_ty), mask=inside)


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
        STAGES=TILES.stats_stages,
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
        STAGES=TILES.row_stages,
        **_logit_constants(bias, options),
        **_stats_constants(options),
        **_gradient_constants(options),
    )
    return _to_stats(sums, options), d
