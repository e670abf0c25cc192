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
    """Stores a tile of outputs, the transpose of `acc`, and adds the sums and sums of squares of its columns, as stored."""
    kept = acc.to(z.dtype.element_ty)
    tl.store(z, tl.trans(kept), mask=inside[:, None] & (columns < N)[None, :])
    if STATISTICS:
        wide = kept.to(tl.float32)  # rows outside hold zeros
        tl.atomic_add(sums_ptr + columns, tl.sum(wide, 1), mask=columns < N, sem="relaxed")
        tl.atomic_add(sums_ptr + N + columns, tl.sum(wide * wide, 1), mask=columns < N, sem="relaxed")


@triton.jit
def _store_norm(scale_ptr, bias_ptr, gain_ptr, shift_ptr, at, mean, var, mask, EPSILON: tl.constexpr):
    """Writes what a normalisation multiplies channels by and adds: x * gain + shift = (x - mean) / sqrt(var) * scale + bias."""
    gain = tl.load(scale_ptr + at, mask=mask, other=0.0) * tl.rsqrt(var + EPSILON)
    tl.store(gain_ptr + at, gain, mask=mask)
    tl.store(shift_ptr + at, tl.load(bias_ptr + at, mask=mask, other=0.0) - mean * gain, mask=mask)


@triton.jit
def _finish(
    sums_ptr, count_ptr, mean_ptr, var_ptr, scale_ptr, bias_ptr, gain_ptr, shift_ptr, used,
    PROGRAMS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PADDED: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """The last of the programs writes means and variances of N columns, from sums over M rows, and leaves zeros.

    If a layer is going to read the columns, which `used` says, it also writes the gains and shifts of their normalisation.
    """
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
        _store_norm(scale_ptr, bias_ptr, gain_ptr, shift_ptr, columns, mean, var, live & used, EPSILON)
        tl.debug_barrier()
        nothing = tl.zeros((PADDED,), tl.float32)
        tl.store(sums_ptr + columns, nothing, mask=live)
        tl.store(sums_ptr + N + columns, nothing, mask=live)
        tl.store(count_ptr, 0)


@triton.jit
def convolve(
    x_ptr, gain_ptr, shift_ptr, w_ptr, scale2_ptr, bias2_ptr, layer_ptr,
    z_in_ptr, mean2_in_ptr, var2_in_ptr, gain2_in_ptr, shift2_in_ptr, sums_in_ptr, count_in_ptr,
    z_ptr, mean2_ptr, var2_ptr, gain2_ptr, shift2_ptr, sums_ptr, count_ptr,
    M: tl.constexpr, LD: tl.constexpr, N: tl.constexpr, PADDED: tl.constexpr, IN: tl.constexpr, GROWTH: tl.constexpr,
    ALIGN: tl.constexpr, EPSILON: tl.constexpr, LAST: tl.constexpr, STACKED: tl.constexpr, STATISTICS: tl.constexpr,
    PROGRAMS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BN0: tl.constexpr, BN1: tl.constexpr,
):  # fmt: skip
    """z = relu(x[:, :c] * gain + shift) @ w[first : first + c], its columns' means and variances, and their normalisation.

    If STACKED, z has a place for every layer. Every `_in` pointer is the same memory as its output. The products are
    those of the transposes: then each value is normalised by one thread, and goes to the tensor cores from shared memory.
    """
    layer = _layer(layer_ptr, LAST)
    channels = _channels(layer, IN, GROWTH, ALIGN)
    first = _first_row(layer, IN, GROWTH, ALIGN)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = row < M
    row = row.to(tl.int64) if M * (LD + N) >= 2**31 else row
    columns0 = tl.arange(0, BN0)
    columns1 = BN0 + tl.arange(0, BN1)
    acc0 = tl.zeros((BN0, BM), tl.float32)
    acc1 = tl.zeros((BN1, BM), tl.float32)
    for k in range(0, channels, BK):
        ch = k + tl.arange(0, BK)
        live = ch < channels
        here = live[None, :] if M % BM == 0 else inside[:, None] & live[None, :]
        x = tl.load(x_ptr + row[:, None] * LD + ch[None, :], mask=here, other=0.0)
        gain = tl.load(gain_ptr + ch, mask=live, other=0.0)
        shift = tl.load(shift_ptr + ch, mask=live, other=0.0)
        a = tl.maximum(x.to(tl.float32) * gain[None, :] + shift[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL)
        if M % BM != 0:
            a = tl.where(inside[:, None], a, 0.0)  # the sums of rows outside are taken
        a = tl.trans(a.to(x_ptr.dtype.element_ty))
        w = w_ptr + (first + ch)[:, None] * N
        w0 = tl.load(w + columns0[None, :], mask=live[:, None] & (columns0 < N)[None, :], other=0.0)
        acc0 = tl.dot(tl.trans(w0), a, acc0)
        if N > BN0:
            w1 = tl.load(w + columns1[None, :], mask=live[:, None] & (columns1 < N)[None, :], other=0.0)
            acc1 = tl.dot(tl.trans(w1), a, acc1)
    if STACKED:
        z_ptr += layer.to(tl.int64) * (M * N)
    z = z_ptr + row[:, None] * N
    _store_tile(z + columns0[None, :], acc0, sums_ptr, inside, columns0, N, STATISTICS)
    if N > BN0:
        _store_tile(z + columns1[None, :], acc1, sums_ptr, inside, columns1, N, STATISTICS)
    if STATISTICS:
        at = layer * N
        _finish(
            sums_ptr, count_ptr, mean2_ptr + at, var2_ptr + at, scale2_ptr + at, bias2_ptr + at, gain2_ptr + at,
            shift2_ptr + at, True, PROGRAMS, M, N, PADDED, EPSILON,
        )  # fmt: skip


@triton.jit
def _store_kernel(
    kernels_ptr, kernel_ptr, program, layer, used, N: tl.constexpr, GROWTH: tl.constexpr, SHARE: tl.constexpr
):
    """Writes a program's share of the 3x3 kernel of a layer: from (3, 3, N, GROWTH) to (GROWTH, 3, 3, N), which cuDNN reads."""
    at = program * SHARE + tl.arange(0, SHARE)
    live = used & (at < 9 * N * GROWTH)
    source = kernels_ptr + layer * (9 * N * GROWTH) + at % (9 * N) * GROWTH + at // (9 * N)
    tl.store(kernel_ptr + at, tl.load(source, mask=live, other=0.0).to(kernel_ptr.dtype.element_ty), mask=live)


@triton.jit
def append(
    new_ptr, scale_ptr, bias_ptr, kernels_ptr, layer_ptr,
    x_in_ptr, mean_in_ptr, var_in_ptr, gain_in_ptr, shift_in_ptr, kernel_in_ptr, sums_in_ptr, count_in_ptr,
    x_ptr, mean_ptr, var_ptr, gain_ptr, shift_ptr, kernel_ptr, sums_ptr, count_ptr,
    M: tl.constexpr, LD: tl.constexpr, N: tl.constexpr, IN: tl.constexpr, GROWTH: tl.constexpr, PADDED: tl.constexpr,
    ALIGN: tl.constexpr, EPSILON: tl.constexpr, LAYERS: tl.constexpr, STATISTICS: tl.constexpr, PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, SHARE: tl.constexpr, KERNEL_SHARE: tl.constexpr,
):  # fmt: skip
    """Writes a layer's new features behind those that it read, and their means and variances.

    For the next layer it writes the gains and shifts of the first normalisation, and the 3x3 kernel. A program has a share of
    the rows, of the channels that there were, and of that kernel.
    """
    layer = _layer(layer_ptr, -1)
    start = _channels(layer, IN, GROWTH, ALIGN)
    following = _first_row(layer + 1, IN, GROWTH, ALIGN)
    used = layer + 1 < LAYERS
    ch = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    known = used & (ch < (start if STATISTICS else start + GROWTH))
    mean = tl.load(mean_ptr + ch, mask=known, other=0.0)
    var = tl.load(var_ptr + ch, mask=known, other=1.0)
    _store_norm(scale_ptr + following, bias_ptr + following, gain_ptr, shift_ptr, ch, mean, var, known, EPSILON)
    _store_kernel(kernels_ptr, kernel_ptr, tl.program_id(0), layer + 1, used, N, GROWTH, KERNEL_SHARE)
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
        at = following + start
        _finish(
            sums_ptr, count_ptr, mean_ptr + start, var_ptr + start, scale_ptr + at, bias_ptr + at, gain_ptr + start,
            shift_ptr + start, used, PROGRAMS, M, GROWTH, PADDED, EPSILON,
        )  # fmt: skip


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
    as many shares as programs for every block of channels. The products are those of the transposes: a channel is a row
    of a tile, so its sums over pixels stay in few threads. g is not read: the cache adds to it.
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
    gain = scale * inverse
    shift = tl.load(bias_ptr + first + ch, mask=live, other=0.0) - mean * gain
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
    local = tl.arange(0, BM)
    dz_at = local[:, None] * N + columns[None, :]
    at = local[:, None] * LD + ch[None, :]
    # Stages by hand: without them, loads that do not feed a product are not fetched ahead.
    for r in tl.range(low, tl.minimum(M, low + per_share), BM, num_stages=STAGES):
        inside = r + local < M
        here = live[None, :] if M % BM == 0 else inside[:, None] & live[None, :]
        r = r.to(tl.int64) if M * (LD + N) >= 2**31 else r
        dz = dz_ptr + r * N
        dz0 = _outputs(dz, dz_at, columns, inside, M, N, BM)
        d_hidden = tl.dot(w0, tl.trans(dz0))
        if NT > 1:
            dz1 = _outputs(dz + 64, dz_at, columns + 64, inside, M, N, BM)
            d_hidden = tl.dot(w1, tl.trans(dz1), d_hidden)
        if NT > 2:
            dz2 = _outputs(dz + 128, dz_at, columns + 128, inside, M, N, BM)
            d_hidden = tl.dot(w2, tl.trans(dz2), d_hidden)
        if NT > 3:
            dz3 = _outputs(dz + 192, dz_at, columns + 192, inside, M, N, BM)
            d_hidden = tl.dot(w3, tl.trans(dz3), d_hidden)
        x = tl.trans(tl.load(x_ptr + r * LD + at, mask=here, other=0.0)).to(tl.float32)
        y = x * gain[:, None] + shift[:, None]
        # Not `y > 0`, which would turn a NaN into a zero. Outside, dz is zero and so is d_hidden.
        off = y <= 0
        if M % BM != 0:
            off = off | (inside[None, :] == 0)  # a shift may be infinite in 16 bits, and not be cancelled by a zero
        dy = tl.where(off, 0.0, d_hidden)
        tl.atomic_add(g_ptr + r * LD + at, tl.trans(dy * gain[:, None]), mask=here, sem="relaxed")
        sum_dy += tl.sum(dy, 1)
        sum_dy_x += tl.sum(dy * (x - mean[:, None]), 1)
        hidden = tl.where(off, 0.0, y).to(x_ptr.dtype.element_ty)
        dw0 = tl.dot(hidden, dz0, dw0)
        if NT > 1:
            dw1 = tl.dot(hidden, dz1, dw1)
        if NT > 2:
            dw2 = tl.dot(hidden, dz2, dw2)
        if NT > 3:
            dw3 = tl.dot(hidden, dz3, dw3)
    sum_dy_xhat = sum_dy_x * inverse
    tl.atomic_add(d_bias_ptr + first + ch, sum_dy, mask=live, sem="relaxed")
    tl.atomic_add(d_scale_ptr + first + ch, sum_dy_xhat, mask=live, sem="relaxed")
    tl.atomic_add(mean_dy_ptr + ch, scale * sum_dy / M, mask=live, sem="relaxed")
    tl.atomic_add(mean_dy_xhat_ptr + ch, scale * sum_dy_xhat / M, mask=live, sem="relaxed")
    tl.atomic_add(dw_ptr + w, dw0, mask=in0, sem="relaxed")
    if NT > 1:
        tl.atomic_add(dw_ptr + w + 64, dw1, mask=in1, sem="relaxed")
    if NT > 2:
        tl.atomic_add(dw_ptr + w + 128, dw2, mask=in2, sem="relaxed")
    if NT > 3:
        tl.atomic_add(dw_ptr + w + 192, dw3, mask=in3, sem="relaxed")


@triton.jit
def _outputs(dz, at, columns, inside, M: tl.constexpr, N: tl.constexpr, BM: tl.constexpr):
    """A tile of the gradient of the outputs, with zeros outside; masked only where a tile may end outside."""
    if N % 64 != 0:
        return tl.load(dz + at, mask=inside[:, None] & (columns < N)[None, :], other=0.0)
    if M % BM != 0:
        return tl.load(dz + at, mask=inside[:, None], other=0.0)
    return tl.load(dz + at)


@triton.jit
def normalise_backward_sums(
    z_ptr, d_hidden_ptr, mean_ptr, var_ptr, scale_ptr, bias_ptr, kernels_ptr, layer_ptr,
    sum_in_ptr, sum_z_in_ptr, kernel_in_ptr, sum_ptr, sum_z_ptr, kernel_ptr,
    M: tl.constexpr, N: tl.constexpr, GROWTH: tl.constexpr, EPSILON: tl.constexpr, LAST: tl.constexpr, STACKED: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, KERNEL_SHARE: tl.constexpr,
):  # fmt: skip
    """Adds the column sums of dy and dy * (z - mean) to a layer's, where dy is d_hidden masked by the ReLU.

    It also writes the 3x3 kernel of the layer before, which is backpropagated next. If STACKED, z has a place for every layer.
    Every `_in` pointer is the same memory as its output.
    """
    layer = _layer(layer_ptr, LAST)
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    _store_kernel(kernels_ptr, kernel_ptr, program, layer - 1, layer > 0, N, GROWTH, KERNEL_SHARE)
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
