"""Triton kernels. Each works on rows of a chunk of x w^T ("products").

`stats_and_gradient_kernel` reads each product once and overwrites it with its gradient; one or more programs share a row, hold it
in registers, and exchange their statistics. `stats_kernel` and `gradient_kernel` do this in two steps, for rows split over chunks
or devices. The arithmetic is that of `rows`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return tl.load(pointers).to(tl.float32)


@triton.jit
def _logits(
    products, bias, columns, mask,
    MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Logits from products. Only the last block of a row has a mask: a few instructions an element would show in the time."""
    z = _load(products + columns, mask, MASKED)
    if HAS_BIAS:
        z += _load(bias + columns, mask, MASKED)
    if SCALE != 1.0:
        z *= SCALE
    if CAP > 0.0:
        z = CAP * libdevice.tanh(z / CAP)
    if MASKED:
        z = tl.where(mask, z, -float("inf"))
    return z


@triton.jit
def _exp(z, shift):
    """exp(z - shift) in two instructions: one multiplies and subtracts, one is exp2. `shift * LOG2E` is computed once a row."""
    return tl.exp2(z * LOG2E - shift * LOG2E)


@triton.jit
def _finite(maximum):
    """Replaces a maximum of -inf, that of a row without any possible entry: it must not be subtracted from itself."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def _add_block(
    sums, row, bias, start, shift,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, SCALE: tl.constexpr,
    CAP: tl.constexpr, SUM: tl.constexpr, AUX: tl.constexpr,
):  # fmt: skip
    maxima, totals, plains, moments = sums
    columns = start + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    z = _logits(row, bias, columns, mask, MASKED, HAS_BIAS, SCALE, CAP)
    maxima = tl.maximum(maxima, z)
    e = _exp(z, shift)
    totals += e
    if SUM:
        plains += tl.where(mask, z, 0.0)
    if AUX:
        moments += tl.where(e == 0.0, 0.0, e * z)
    return maxima, totals, plains, moments


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
    FULL: tl.constexpr = WIDTH // BLOCK * BLOCK
    first = tl.arange(0, BLOCK)
    reference = tl.max(_logits(row, bias, first, first < WIDTH, FULL == 0, HAS_BIAS, SCALE, CAP), 0)
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
        sums = maxima, totals, plains, moments
        for start in tl.range(0, FULL, BLOCK, num_stages=STAGES):
            sums = _add_block(sums, row, bias, start, shift, WIDTH, BLOCK, False, HAS_BIAS, SCALE, CAP, SUM, AUX)
        if FULL < WIDTH:
            sums = _add_block(sums, row, bias, FULL, shift, WIDTH, BLOCK, True, HAS_BIAS, SCALE, CAP, SUM, AUX)
        maxima, totals, plains, moments = sums
        maximum = tl.max(maxima, 0)
        total, plain, moment = tl.sum(totals, 0), tl.sum(plains, 0), tl.sum(moments, 0)
        if ((maximum > shift + 60.0) | (reference == -float("inf"))) & (reference != maximum):
            reference = maximum
            again = 1
    correction = tl.exp(_finite(reference) - _finite(maximum))
    inside = (label >= 0) & (label < WIDTH)
    at_label = tl.where(inside, _logits(row, bias, label, inside, True, HAS_BIAS, SCALE, CAP), 0.0)
    return maximum, total * correction, plain, moment * correction, at_label


@triton.jit
def _gradient(
    z, hit, lse, scale,
    SCALE: tl.constexpr, CAP: tl.constexpr, KEEP: tl.constexpr, SPREAD: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    """The gradient with respect to the products, for logits `z`; `hit` is 1 at the label. Factors of whole rows come first."""
    scale *= SCALE
    d = _exp(z, lse) * ((1.0 + 2.0 * Z_LOSS * lse) * scale) - (KEEP * hit + SPREAD) * scale
    if CAP > 0.0:
        d *= 1.0 - (z / CAP) * (z / CAP)
    return d


@triton.jit
def _counted(d, scale):
    """The gradient, or 0 for a token that does not count: its logits may be NaN, which a scale of 0 does not undo.

    `scale` is the row's, so that the rows that count branch around it.
    """
    if scale == 0.0:
        d = tl.zeros_like(d)
    return d


@triton.jit
def _store_gradient(
    row, out, bias, columns, lse, scale,
    WIDTH: tl.constexpr, MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    KEEP: tl.constexpr, SPREAD: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    """Stores the gradient as if no column was the label: comparing each with it costs as much as its exponential."""
    mask = columns < WIDTH
    z = _logits(row, bias, columns, mask, MASKED, HAS_BIAS, SCALE, CAP)
    d = _gradient(z, 0.0, lse, scale, SCALE, CAP, KEEP, SPREAD, Z_LOSS)
    d = _counted(d, scale).to(out.dtype.element_ty)
    if MASKED:
        tl.store(out + columns, d, mask=mask)
    else:
        tl.store(out + columns, d)


@triton.jit
def stats_kernel(
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
def gradient_kernel(
    products, bias, labels, lse, scale, out,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    KEEP: tl.constexpr, SPREAD: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    label, row_lse, weight = tl.load(labels + i), tl.load(lse + i), tl.load(scale + i)
    row = products + i * WIDTH
    inside = (label >= start) & (label < min(start + BLOCK, WIDTH))
    at_label = _logits(row, bias, label, inside, True, HAS_BIAS, SCALE, CAP)
    tl.debug_barrier()
    columns = start + tl.arange(0, BLOCK)
    _store_gradient(
        row, out + i * WIDTH, bias, columns, row_lse, weight,
        WIDTH, WIDTH % BLOCK > 0, HAS_BIAS, SCALE, CAP, KEEP, SPREAD, Z_LOSS,
    )  # fmt: skip
    tl.debug_barrier()
    d = _gradient(at_label, 1.0, row_lse, weight, SCALE, CAP, KEEP, SPREAD, Z_LOSS)
    tl.store(out + i * WIDTH + label, d.to(out.dtype.element_ty), mask=inside & (weight != 0.0))


@triton.jit
def _exchange(shares, arrived, maximum, total, part, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """Combines (max, sum) of this program's part of a row with those of the other parts, and returns the row's.

    Only one thread polls whether all have arrived: if all threads did, polling would take longer than the row.
    """
    high = maximum.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = total.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(shares + part, high | low)
    here = tl.atomic_add(arrived, 1, sem="acq_rel") + 1
    while here < PARTS:
        here = tl.atomic_add(arrived, 0, sem="acquire")
    p = tl.arange(0, PADDED)
    # `.cg` bypasses L1, which may hold stale values of `shares`.
    loaded = tl.load(shares + p, mask=p < PARTS, other=0, cache_modifier=".cg")
    maxima = tl.where(p < PARTS, (loaded >> 32).to(tl.int32).to(tl.float32, bitcast=True), -float("inf"))
    totals = loaded.to(tl.int32).to(tl.float32, bitcast=True)
    maximum = tl.max(maxima, 0)
    return maximum, tl.sum(totals * tl.exp(maxima - _finite(maximum)), 0)


@triton.jit
def stats_and_gradient_kernel(
    products, bias, labels, scale, out, max_out, sum_out, label_out, plain_out, moment_out, shares, arrived, ticket,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, SUM: tl.constexpr, AUX: tl.constexpr,
    KEEP: tl.constexpr, SPREAD: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    """Computes statistics and gradient of a row, shared by PARTS programs: each reads its part once, and holds it in registers.

    Each waits for the others' statistics. Which program is which part follows from the order in which they start, so that
    those it waits for have started or are the next to start.
    """
    number = tl.atomic_add(ticket, 1, sem="relaxed") if PARTS > 1 else tl.program_id(0)
    i, part = (number // PARTS).to(tl.int64), number % PARTS
    row = products + i * WIDTH
    columns = part * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    z = _logits(row, bias, columns, mask, WIDTH % BLOCK > 0, HAS_BIAS, SCALE, CAP)
    label, weight = tl.load(labels + i), tl.load(scale + i)
    inside = (label >= part * BLOCK) & (label < min((part + 1) * BLOCK, WIDTH))
    at_label = _logits(row, bias, label, inside, True, HAS_BIAS, SCALE, CAP)
    part_maximum = tl.max(z, 0)
    e = _exp(z, _finite(part_maximum))
    maximum, total = part_maximum, tl.sum(e, 0)
    if PARTS > 1:
        shares = shares.to(tl.pointer_type(tl.int64)) + i * PARTS
        maximum, total = _exchange(shares, arrived + i, part_maximum, total, part, PARTS, PADDED)
    lse = maximum + tl.log(total)
    common = (1.0 + 2.0 * Z_LOSS * lse) * (weight * SCALE)
    d = e * (tl.exp(_finite(part_maximum) - lse) * common) - SPREAD * (weight * SCALE)
    if CAP > 0.0:
        d *= 1.0 - (z / CAP) * (z / CAP)
    d = _counted(d, weight)
    tl.store(out + i * WIDTH + columns, d.to(out.dtype.element_ty), mask=mask)
    tl.debug_barrier()
    d = _gradient(at_label, 1.0, lse, weight, SCALE, CAP, KEEP, SPREAD, Z_LOSS)
    tl.store(out + i * WIDTH + label, d.to(out.dtype.element_ty), mask=inside & (weight != 0.0))
    outside = (part == 0) & ((label < 0) | (label >= WIDTH))
    tl.store(label_out + i, tl.where(inside, at_label, 0.0), mask=inside | outside)
    tl.store(max_out + i, maximum, mask=part == 0)
    tl.store(sum_out + i, total, mask=part == 0)
    if SUM:
        tl.store(plain_out + part * TOKENS + i, tl.sum(tl.where(mask, z, 0.0), 0))
    if AUX:
        moment = tl.sum(tl.where(e == 0.0, 0.0, e * z), 0)
        tl.store(moment_out + part * TOKENS + i, moment * tl.exp(part_maximum - _finite(maximum)))
