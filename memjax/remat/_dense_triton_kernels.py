"""The Triton code of `_dense_triton`; imported only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def _hidden(x, mean, gain, bias):
    y = (x.to(tl.float32) - mean[None, :]) * gain[None, :] + bias[None, :]
    return tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def convolve(
    x_ptr, mean_ptr, gain_ptr, bias_ptr, w_ptr, where_ptr, z_ptr,
    M: tl.constexpr, LD: tl.constexpr, N: tl.constexpr, ALIGN: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, NT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """z[:, :] = relu((x[:, :c] - mean) * gain + bias) @ w[first : first + c], in SPLITS partial sums over channels."""
    channels = tl.load(where_ptr) * ALIGN
    first = tl.load(where_ptr + 1) * ALIGN
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    split = tl.program_id(1)
    inside = rows < M
    rows64 = rows.to(tl.int64)
    per_split = tl.cdiv(tl.cdiv(channels, BK), SPLITS) * BK
    low = split * per_split
    high = tl.minimum(channels, low + per_split)
    columns = tl.arange(0, 64)
    acc0 = tl.zeros((BM, 64), tl.float32)
    acc1 = tl.zeros((BM, 64), tl.float32)
    acc2 = tl.zeros((BM, 64), tl.float32)
    acc3 = tl.zeros((BM, 64), tl.float32)
    for k in range(low, high, BK):
        ch = k + tl.arange(0, BK)
        live = ch < channels
        x = tl.load(x_ptr + rows64[:, None] * LD + ch[None, :], mask=inside[:, None] & live[None, :], other=0.0)
        mean = tl.load(mean_ptr + ch, mask=live, other=0.0)
        gain = tl.load(gain_ptr + ch, mask=live, other=0.0)
        bias = tl.load(bias_ptr + ch, mask=live, other=0.0)
        a = _hidden(x, mean, gain, bias).to(x_ptr.dtype.element_ty)
        w = w_ptr + (first + ch)[:, None] * N + columns[None, :]
        acc0 = tl.dot(a, tl.load(w, mask=live[:, None] & (columns < N)[None, :], other=0.0), acc0)
        if NT > 1:
            acc1 = tl.dot(a, tl.load(w + 64, mask=live[:, None] & (columns + 64 < N)[None, :], other=0.0), acc1)
        if NT > 2:
            acc2 = tl.dot(a, tl.load(w + 128, mask=live[:, None] & (columns + 128 < N)[None, :], other=0.0), acc2)
        if NT > 3:
            acc3 = tl.dot(a, tl.load(w + 192, mask=live[:, None] & (columns + 192 < N)[None, :], other=0.0), acc3)
    z = z_ptr + (split.to(tl.int64) * M + rows64)[:, None] * N + columns[None, :]
    dtype = z_ptr.dtype.element_ty
    tl.store(z, acc0.to(dtype), mask=inside[:, None] & (columns < N)[None, :])
    if NT > 1:
        tl.store(z + 64, acc1.to(dtype), mask=inside[:, None] & (columns + 64 < N)[None, :])
    if NT > 2:
        tl.store(z + 128, acc2.to(dtype), mask=inside[:, None] & (columns + 128 < N)[None, :])
    if NT > 3:
        tl.store(z + 192, acc3.to(dtype), mask=inside[:, None] & (columns + 192 < N)[None, :])


@triton.jit
def convolve_backward(
    x_ptr, mean_ptr, gain_ptr, bias_ptr, w_ptr, dz_ptr, where_ptr, g_in_ptr, dw_in_ptr,
    g_ptr, dw_ptr, sums_ptr,
    M: tl.constexpr, LD: tl.constexpr, N: tl.constexpr, W: tl.constexpr, ALIGN: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, NT: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """dy = (dz @ w^T) where the hidden value is positive; g += dy * gain, dw += hidden^T dz, sums of dy, dy (x - mean).

    A program owns BC channels and a share of the rows: as many shares as there are programs for every channel block.
    """
    channels = tl.load(where_ptr) * ALIGN
    first = tl.load(where_ptr + 1) * ALIGN
    blocks = tl.cdiv(channels, BC)
    shares = PROGRAMS // blocks
    share = tl.program_id(0) // blocks
    if share >= shares:
        return
    ch = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    live = ch < channels
    columns = tl.arange(0, 64)
    mean = tl.load(mean_ptr + ch, mask=live, other=0.0)
    gain = tl.load(gain_ptr + ch, mask=live, other=0.0)
    bias = tl.load(bias_ptr + ch, mask=live, other=0.0)
    dtype = x_ptr.dtype.element_ty
    w = (first + ch)[:, None] * N + columns[None, :]
    in0 = live[:, None] & (columns < N)[None, :]
    in1 = live[:, None] & (columns + 64 < N)[None, :]
    in2 = live[:, None] & (columns + 128 < N)[None, :]
    in3 = live[:, None] & (columns + 192 < N)[None, :]
    w0 = tl.load(w_ptr + w, mask=in0, other=0.0)
    w1 = w0
    w2 = w0
    w3 = w0
    if NT > 1:
        w1 = tl.load(w_ptr + w + 64, mask=in1, other=0.0)
    if NT > 2:
        w2 = tl.load(w_ptr + w + 128, mask=in2, other=0.0)
    if NT > 3:
        w3 = tl.load(w_ptr + w + 192, mask=in3, other=0.0)
    dw0 = tl.zeros((BC, 64), tl.float32)
    dw1 = tl.zeros((BC, 64), tl.float32)
    dw2 = tl.zeros((BC, 64), tl.float32)
    dw3 = tl.zeros((BC, 64), tl.float32)
    sum_dy = tl.zeros((BC,), tl.float32)
    sum_dy_x = tl.zeros((BC,), tl.float32)
    per_share = tl.cdiv(tl.cdiv(M, BM), shares) * BM
    low = share * per_share
    for r in range(low, tl.minimum(M, low + per_share), BM):
        rows = r + tl.arange(0, BM)
        inside = rows < M
        rows64 = rows.to(tl.int64)
        dz = dz_ptr + rows64[:, None] * N + columns[None, :]
        dz0 = tl.load(dz, mask=inside[:, None] & (columns < N)[None, :], other=0.0)
        d_hidden = tl.dot(dz0, tl.trans(w0))
        if NT > 1:
            dz1 = tl.load(dz + 64, mask=inside[:, None] & (columns + 64 < N)[None, :], other=0.0)
            d_hidden = tl.dot(dz1, tl.trans(w1), d_hidden)
        if NT > 2:
            dz2 = tl.load(dz + 128, mask=inside[:, None] & (columns + 128 < N)[None, :], other=0.0)
            d_hidden = tl.dot(dz2, tl.trans(w2), d_hidden)
        if NT > 3:
            dz3 = tl.load(dz + 192, mask=inside[:, None] & (columns + 192 < N)[None, :], other=0.0)
            d_hidden = tl.dot(dz3, tl.trans(w3), d_hidden)
        at = rows64[:, None] * LD + ch[None, :]
        here = inside[:, None] & live[None, :]
        x = tl.load(x_ptr + at, mask=here, other=0.0)
        g = tl.load(g_ptr + at, mask=here, other=0.0)
        hidden = _hidden(x, mean, gain, bias)
        # Not `hidden > 0`, which would turn a NaN into a zero.
        dy = tl.where(hidden <= 0, 0.0, d_hidden)
        tl.store(g_ptr + at, g + dy * gain[None, :], mask=here)
        dy = tl.where(here, dy, 0.0)
        sum_dy += tl.sum(dy, 0)
        sum_dy_x += tl.sum(dy * (x.to(tl.float32) - mean[None, :]), 0)
        a = tl.trans(tl.where(here, hidden, 0.0).to(dtype))
        dw0 = tl.dot(a, dz0, dw0)
        if NT > 1:
            dw1 = tl.dot(a, dz1, dw1)
        if NT > 2:
            dw2 = tl.dot(a, dz2, dw2)
        if NT > 3:
            dw3 = tl.dot(a, dz3, dw3)
    tl.atomic_add(sums_ptr + ch, sum_dy, mask=live, sem="relaxed")
    tl.atomic_add(sums_ptr + W + ch, sum_dy_x, mask=live, sem="relaxed")
    tl.atomic_add(dw_ptr + w, dw0, mask=in0, sem="relaxed")
    if NT > 1:
        tl.atomic_add(dw_ptr + w + 64, dw1, mask=in1, sem="relaxed")
    if NT > 2:
        tl.atomic_add(dw_ptr + w + 128, dw2, mask=in2, sem="relaxed")
    if NT > 3:
        tl.atomic_add(dw_ptr + w + 192, dw3, mask=in3, sem="relaxed")
