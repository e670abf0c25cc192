"""The Triton code of `triton`; imported only where Triton is installed.

Kernels find out from the number of the layer, which they read from memory, where its channels and parameters begin: one compiled
kernel serves all layers. `_layer` has the number; it counts down if LAST is not negative. Sums over all pixels are finished by
the program that is the last to add to them: it leaves the sums at zero for the next layer.
"""

import triton
import triton.language as tl


@triton.jit
def _layer(layer_ptr, LAST: tl.constexpr):
    layer = tl.load(layer_ptr)
    if LAST >= 0:
        layer = LAST - layer
    return layer


@triton.jit
def _channels(layer, IN: tl.constexpr, GROWTH: tl.constexpr, ALIGN: tl.constexpr):
    """The channels that a layer reads, a multiple of ALIGN: what lets the kernels load 16 bytes at a time."""
    return (IN // ALIGN + layer * (GROWTH // ALIGN)) * ALIGN


@triton.jit
def _first_row(layer, IN: tl.constexpr, GROWTH: tl.constexpr, ALIGN: tl.constexpr):
    """The layer's first row in the arrays with a row for every layer and channel."""
    return (layer * (IN // ALIGN) + (GROWTH // ALIGN) * (layer * (layer - 1) // 2)) * ALIGN


@triton.jit
def _hidden(x, mean, gain, bias):
    y = (x.to(tl.float32) - mean[None, :]) * gain[None, :] + bias[None, :]
    return tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store_tile(z, acc, sums_ptr, inside, columns, N: tl.constexpr, STATISTICS: tl.constexpr):
    """Store a tile of outputs, and add the columns' sums, and sums of squares, of what was stored."""
    kept = acc.to(z.dtype.element_ty)
    tl.store(z, kept, mask=inside[:, None] & (columns < N)[None, :])
    if STATISTICS:
        wide = kept.to(tl.float32)  # rows outside hold zeros
        tl.atomic_add(sums_ptr + columns, tl.sum(wide, 0), mask=columns < N, sem="relaxed")
        tl.atomic_add(sums_ptr + N + columns, tl.sum(wide * wide, 0), mask=columns < N, sem="relaxed")


@triton.jit
def _finish(
    sums_ptr, count_ptr, mean_ptr, var_ptr,
    PROGRAMS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The last of the programs writes means and variances of N columns, from sums over M rows, and leaves zeros."""
    tl.debug_barrier()  # all threads have added
    if tl.atomic_add(count_ptr, 1, sem="acq_rel") == PROGRAMS - 1:
        columns = tl.arange(0, PADDED)
        live = columns < N
        # `.cg`: from where the other programs added, not from a cache of this multiprocessor.
        mean = tl.load(sums_ptr + columns, mask=live, other=0.0, cache_modifier=".cg") / M
        square = tl.load(sums_ptr + N + columns, mask=live, other=0.0, cache_modifier=".cg") / M
        var = tl.maximum(square - mean * mean, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(mean_ptr + columns, mean, mask=live)
        tl.store(var_ptr + columns, var, mask=live)
        tl.debug_barrier()
        nothing = tl.zeros((PADDED,), tl.float32)
        tl.store(sums_ptr + columns, nothing, mask=live)
        tl.store(sums_ptr + N + columns, nothing, mask=live)
        tl.store(count_ptr, 0)


@triton.jit
def convolve(
    x_ptr, mean_ptr, var_ptr, scale_ptr, bias_ptr, w_ptr, layer_ptr,
    z_in_ptr, mean2_in_ptr, var2_in_ptr, sums_in_ptr, count_in_ptr,
    z_ptr, mean2_ptr, var2_ptr, sums_ptr, count_ptr,
    M: tl.constexpr, LD: tl.constexpr, N: tl.constexpr, PADDED: tl.constexpr, IN: tl.constexpr, GROWTH: tl.constexpr,
    ALIGN: tl.constexpr, EPSILON: tl.constexpr, LAST: tl.constexpr, STACKED: tl.constexpr, STATISTICS: tl.constexpr,
    PROGRAMS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, NT: tl.constexpr,
):  # fmt: skip
    """z = relu((x[:, :c] - mean) * gain + bias) @ w[first : first + c], and the mean and variance of its columns.

    If STACKED, z has a place for every layer. Every `_in` pointer is the same memory as its output.
    """
    layer = _layer(layer_ptr, LAST)
    channels = _channels(layer, IN, GROWTH, ALIGN)
    first = _first_row(layer, IN, GROWTH, ALIGN)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = row < M
    row = row.to(tl.int64) if M * (LD + N) >= 2**31 else row
    columns = tl.arange(0, 64)
    acc0 = tl.zeros((BM, 64), tl.float32)
    acc1 = tl.zeros((BM, 64), tl.float32)
    acc2 = tl.zeros((BM, 64), tl.float32)
    acc3 = tl.zeros((BM, 64), tl.float32)
    for k in range(0, channels, BK):
        ch = k + tl.arange(0, BK)
        live = ch < channels
        here = live[None, :] if M % BM == 0 else inside[:, None] & live[None, :]
        x = tl.load(x_ptr + row[:, None] * LD + ch[None, :], mask=here, other=0.0)
        mean = tl.load(mean_ptr + ch, mask=live, other=0.0)
        gain = tl.load(scale_ptr + first + ch, mask=live, other=0.0)
        gain *= tl.rsqrt(tl.load(var_ptr + ch, mask=live, other=1.0) + EPSILON)
        bias = tl.load(bias_ptr + first + ch, mask=live, other=0.0)
        a = _hidden(x, mean, gain, bias)
        if M % BM != 0:
            a = tl.where(inside[:, None], a, 0.0)  # the sums of rows outside are taken
        a = a.to(x_ptr.dtype.element_ty)
        w = w_ptr + (first + ch)[:, None] * N + columns[None, :]
        acc0 = tl.dot(a, tl.load(w, mask=live[:, None] & (columns < N)[None, :], other=0.0), acc0)
        if NT > 1:
            acc1 = tl.dot(a, tl.load(w + 64, mask=live[:, None] & (columns + 64 < N)[None, :], other=0.0), acc1)
        if NT > 2:
            acc2 = tl.dot(a, tl.load(w + 128, mask=live[:, None] & (columns + 128 < N)[None, :], other=0.0), acc2)
        if NT > 3:
            acc3 = tl.dot(a, tl.load(w + 192, mask=live[:, None] & (columns + 192 < N)[None, :], other=0.0), acc3)
    if STACKED:
        z_ptr += layer.to(tl.int64) * (M * N)
    z = z_ptr + row[:, None] * N + columns[None, :]
    _store_tile(z, acc0, sums_ptr, inside, columns, N, STATISTICS)
    if NT > 1:
        _store_tile(z + 64, acc1, sums_ptr, inside, columns + 64, N, STATISTICS)
    if NT > 2:
        _store_tile(z + 128, acc2, sums_ptr, inside, columns + 128, N, STATISTICS)
    if NT > 3:
        _store_tile(z + 192, acc3, sums_ptr, inside, columns + 192, N, STATISTICS)
    if STATISTICS:
        _finish(sums_ptr, count_ptr, mean2_ptr + layer * N, var2_ptr + layer * N, PROGRAMS, M, N, PADDED)


@triton.jit
def append(
    new_ptr, layer_ptr, x_in_ptr, mean_in_ptr, var_in_ptr, sums_in_ptr, count_in_ptr,
    x_ptr, mean_ptr, var_ptr, sums_ptr, count_ptr,
    M: tl.constexpr, LD: tl.constexpr, IN: tl.constexpr, GROWTH: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr,
    STATISTICS: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Writes a layer's new features behind those that it read, and their mean and variance."""
    start = _channels(_layer(layer_ptr, -1), IN, GROWTH, ALIGN)
    columns = tl.arange(0, PADDED)
    live = columns < GROWTH
    total = tl.zeros((BM, PADDED), tl.float32)
    squares = tl.zeros((BM, PADDED), tl.float32)
    for step in range(0, ROWS, BM):
        row = tl.program_id(0) * ROWS + step + tl.arange(0, BM)
        here = (row < M)[:, None] & live[None, :]
        row = row.to(tl.int64) if M * LD >= 2**31 else row
        new = tl.load(new_ptr + row[:, None] * GROWTH + columns[None, :], mask=here, other=0.0)
        tl.store(x_ptr + row[:, None] * LD + (start + columns)[None, :], new, mask=here)
        wide = new.to(tl.float32)
        total += wide
        squares += wide * wide
    if STATISTICS:
        tl.atomic_add(sums_ptr + columns, tl.sum(total, 0), mask=live, sem="relaxed")
        tl.atomic_add(sums_ptr + GROWTH + columns, tl.sum(squares, 0), mask=live, sem="relaxed")
        _finish(sums_ptr, count_ptr, mean_ptr + start, var_ptr + start, PROGRAMS, M, GROWTH, PADDED)


@triton.jit
def convolve_backward(
    x_ptr, mean_ptr, var_ptr, scale_ptr, bias_ptr, w_ptr, dz_ptr, layer_ptr,
    g_in_ptr, mean_dy_in_ptr, mean_dy_xhat_in_ptr, d_scale_in_ptr, d_bias_in_ptr, dw_in_ptr,
    g_ptr, mean_dy_ptr, mean_dy_xhat_ptr, d_scale_ptr, d_bias_ptr, dw_ptr,
    M: tl.constexpr, LD: tl.constexpr, N: tl.constexpr, IN: tl.constexpr, GROWTH: tl.constexpr, ALIGN: tl.constexpr,
    EPSILON: tl.constexpr, LAST: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, NT: tl.constexpr, PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Adds g += dy * gain, dw += hidden^T dz, and the four vectors of sums, with dy = (dz @ w^T) where hidden > 0.

    Every `_in` pointer is the same memory as its output. A program owns BC channels and a share of the rows: there are
    as many shares as programs for every block of channels.
    """
    layer = _layer(layer_ptr, LAST)
    channels = _channels(layer, IN, GROWTH, ALIGN)
    first = _first_row(layer, IN, GROWTH, ALIGN)
    blocks = tl.cdiv(channels, BC)
    shares = PROGRAMS // blocks
    share = tl.program_id(0) // blocks
    if share >= shares:
        return
    ch = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    live = ch < channels
    columns = tl.arange(0, 64)
    mean = tl.load(mean_ptr + ch, mask=live, other=0.0)
    inverse = tl.rsqrt(tl.load(var_ptr + ch, mask=live, other=1.0) + EPSILON)
    scale = tl.load(scale_ptr + first + ch, mask=live, other=0.0)
    bias = tl.load(bias_ptr + first + ch, mask=live, other=0.0)
    gain = scale * inverse
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
    # Summed over rows after the loop: a reduction across warps in every step costs more than all the rest.
    sum_dy = tl.zeros((BM, BC), tl.float32)
    sum_dy_x = tl.zeros((BM, BC), tl.float32)
    per_share = tl.cdiv(tl.cdiv(M, BM), shares) * BM
    low = share * per_share
    # Stages by hand: without them, loads that do not feed a product are not fetched ahead.
    for r in tl.range(low, tl.minimum(M, low + per_share), BM, num_stages=STAGES):
        row = r + tl.arange(0, BM)
        inside = row < M
        row = row.to(tl.int64) if M * (LD + N) >= 2**31 else row
        dz = dz_ptr + row[:, None] * N + columns[None, :]
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
        at = row[:, None] * LD + ch[None, :]
        here = inside[:, None] & live[None, :]
        x = tl.load(x_ptr + at, mask=here, other=0.0)
        g = tl.load(g_in_ptr + at, mask=here, other=0.0)
        hidden = _hidden(x, mean, gain, bias)
        # Not `hidden > 0`, which would turn a NaN into a zero. Outside, dz is zero and so is d_hidden.
        dy = tl.where(hidden <= 0, 0.0, d_hidden)
        tl.store(g_ptr + at, g + dy * gain[None, :], mask=here)
        sum_dy += dy
        sum_dy_x += dy * (x.to(tl.float32) - mean[None, :])
        a = tl.trans(tl.where(here, hidden, 0.0).to(dtype))
        dw0 = tl.dot(a, dz0, dw0)
        if NT > 1:
            dw1 = tl.dot(a, dz1, dw1)
        if NT > 2:
            dw2 = tl.dot(a, dz2, dw2)
        if NT > 3:
            dw3 = tl.dot(a, dz3, dw3)
    total_dy = tl.sum(sum_dy, 0)
    total_dy_xhat = tl.sum(sum_dy_x, 0) * inverse
    tl.atomic_add(d_bias_ptr + first + ch, total_dy, mask=live, sem="relaxed")
    tl.atomic_add(d_scale_ptr + first + ch, total_dy_xhat, mask=live, sem="relaxed")
    tl.atomic_add(mean_dy_ptr + ch, scale * total_dy / M, mask=live, sem="relaxed")
    tl.atomic_add(mean_dy_xhat_ptr + ch, scale * total_dy_xhat / M, mask=live, sem="relaxed")
    tl.atomic_add(dw_ptr + w, dw0, mask=in0, sem="relaxed")
    if NT > 1:
        tl.atomic_add(dw_ptr + w + 64, dw1, mask=in1, sem="relaxed")
    if NT > 2:
        tl.atomic_add(dw_ptr + w + 128, dw2, mask=in2, sem="relaxed")
    if NT > 3:
        tl.atomic_add(dw_ptr + w + 192, dw3, mask=in3, sem="relaxed")


@triton.jit
def normalise_backward_sums(
    z_ptr, d_hidden_ptr, mean_ptr, var_ptr, scale_ptr, bias_ptr, layer_ptr, sum_in_ptr, sum_z_in_ptr, sum_ptr, sum_z_ptr,
    M: tl.constexpr, N: tl.constexpr, EPSILON: tl.constexpr, LAST: tl.constexpr, STACKED: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds the column sums of dy and dy * (z - mean) to a layer's, where dy is d_hidden masked by the ReLU.

    If STACKED, z has a place for every layer. Every `_in` pointer is the same memory as its output.
    """
    layer = _layer(layer_ptr, LAST)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    live = columns < N
    of_layer = layer * N + columns
    mean = tl.load(mean_ptr + of_layer, mask=live, other=0.0)
    gain = tl.load(scale_ptr + of_layer, mask=live, other=0.0)
    gain *= tl.rsqrt(tl.load(var_ptr + of_layer, mask=live, other=1.0) + EPSILON)
    bias = tl.load(bias_ptr + of_layer, mask=live, other=0.0)
    if STACKED:
        z_ptr += layer.to(tl.int64) * (M * N)
    sum_dy = tl.zeros((BM, BN), tl.float32)
    sum_dy_z = tl.zeros((BM, BN), tl.float32)
    for step in tl.range(0, ROWS, BM, num_stages=STAGES):
        row = tl.program_id(0) * ROWS + step + tl.arange(0, BM)
        here = (row < M)[:, None] & live[None, :]
        row = row.to(tl.int64) if M * N >= 2**31 else row
        at = row[:, None] * N + columns[None, :]
        z = tl.load(z_ptr + at, mask=here, other=0.0)
        d_hidden = tl.load(d_hidden_ptr + at, mask=here, other=0.0).to(tl.float32)
        dy = tl.where(_hidden(z, mean, gain, bias) <= 0, 0.0, d_hidden)
        sum_dy += dy
        sum_dy_z += dy * (z.to(tl.float32) - mean[None, :])
    tl.atomic_add(sum_ptr + of_layer, tl.sum(sum_dy, 0), mask=live, sem="relaxed")
    tl.atomic_add(sum_z_ptr + of_layer, tl.sum(sum_dy_z, 0), mask=live, sem="relaxed")
