"""The dense block over one shared feature buffer.

After "Memory-Efficient Implementation of DenseNets" (Pleiss et al. 2017, arXiv 1707.06990), sections 3 and 4.

Features are only ever appended, so the block's output already holds the input of every layer as a prefix. Between
forward and backward nothing else is kept (`keep="features"`), or besides it the output of every 1x1 convolution
(`keep="convolutions"`, the paper's choice). Concatenation costs nothing, normalisation and ReLU are recomputed.

Three things make this cheap.

* One loop body serves a run of layers: channel counts differ, so the body works on the run's widest prefix and
  switches the excess channels off by a zero gain and bias. The program's size grows with the logarithm of the depth. Kernels
  that take the number of channels at run time serve all layers with one body, and waste nothing (`fused`).
* A channel's batch mean and variance are the same for every layer that reads it: they are computed once.
* So their gradient can be put off, exactly. With `x_hat = (x - mean) * inv` and `y = g * x_hat + b`, layer l contributes
  `g_l * inv * (dy_l - mean(dy_l) - x_hat * mean(dy_l * x_hat))` to dx. The first term is added to one gradient
  buffer as it comes; of the others only the sums over layers of `g_l * mean(dy_l)` and `g_l * mean(dy_l * x_hat)`
  are kept, two numbers per channel, and applied once, just before the layer that produced the channel runs backward.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memjax._core.arrays import accumulator, vary, varying_axes, zeros
from memjax._core.barriers import barrier
from memjax.remat._dense import fused, xla
from memjax.remat._dense.late import put_off, through_norm
from memjax.remat._dense.spec import DenseParams, DenseSpec, DenseStatistics, dropout, moments, norm_relu
from memjax.remat._dense.xla import conv3x3, conv3x3_backward

# The widest prefix of a run of layers that share a loop body, against the narrowest. Larger: fewer bodies to compile,
# more work on channels that are switched off.
_RUN_RATIO = 1.5


def runs(spec: DenseSpec) -> list[tuple[int, int]]:
    """Layers as runs [start, stop) that share a loop body."""
    result, start = [], 0
    for i in range(1, spec.num_layers + 1):
        if i == spec.num_layers or spec.channels(i) > _RUN_RATIO * spec.channels(start):
            result.append((start, i))
            start = i
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def shared(
    spec: DenseSpec,
    keep: str,
    implementation: str,
    params: DenseParams,
    running: DenseStatistics,
    key,
    x,
):
    """Features (B, H, W, out_features) and the statistics used; the latter carry no gradient."""
    forward = fused.forward if implementation == "triton" else _forward
    features, statistics, _ = forward(spec, False, params, running, key, x)
    return features, statistics


def _vjp_forward(spec, keep, implementation, params, running, key, x):
    forward = fused.forward if implementation == "triton" else _forward
    features, statistics, z = forward(spec, keep == "convolutions", params, running, key, x)
    return (features, statistics), (params, key, features, statistics, z)


def _vjp_backward(spec, keep, implementation, saved, cotangents):
    backward: Any = fused.backward if implementation == "triton" else _backward
    gradients, dx = backward(spec, *saved, cotangents[0])
    return jax.tree.map(lambda p, g: g.astype(p.dtype), saved[0], gradients), None, None, dx


shared.defvjp(_vjp_forward, _vjp_backward)


def _write(x, update, start):
    return lax.dynamic_update_slice_in_dim(x, update, start, axis=x.ndim - 1)


def _row_kernel(spec: DenseSpec, params: DenseParams):
    """The kernel with a row for every (layer, input channel)."""
    return params.kernel2 if spec.bottleneck is None else params.kernel1


def _layer_arrays(spec, params, statistics, start, stop, wide):
    """The numbers of layers [start, stop), and the arrays of which a loop over them reads a row for each layer."""
    arrays = {}
    if spec.bottleneck is not None:
        arrays = {
            "scale2": params.scale2[start:stop],
            "bias2": params.bias2[start:stop],
            "kernel2": params.kernel2[start:stop],
            "statistics": (
                statistics.mean2[start:stop].astype(wide),
                statistics.var2[start:stop].astype(wide),
            ),
        }
    return jnp.arange(start, stop), arrays


def _forward(spec: DenseSpec, save_z: bool, params, running, key, x):
    wide = accumulator(x.dtype)
    buffer = _write(zeros(jax.typeof(x).update(shape=(*x.shape[:-1], spec.out_features), weak_type=False)), x, 0)
    if spec.use_running_average:
        mean, var = running.mean1.astype(wide), running.var1.astype(wide)
    else:
        # Room for the last layer's features too: nobody reads their statistics, but every layer writes alike.
        start_mean, start_var = moments(x)
        mean = jnp.zeros(spec.out_features, wide).at[: spec.in_features].set(start_mean)
        var = jnp.ones(spec.out_features, wide).at[: spec.in_features].set(start_var)
    # Converted once: every layer's rows are read many times over.
    rows = _row_kernel(spec, params).astype(x.dtype)

    def layer(width, carry, inputs):
        buffer, mean, var = carry
        i, arrays = inputs
        new, batch2 = xla.convolve(spec, params, rows, buffer, mean, var, i, width)
        z = used2 = None
        if spec.bottleneck is not None:
            z, used2 = new, arrays["statistics"] if spec.use_running_average else batch2
            gain = arrays["scale2"].astype(wide) * lax.rsqrt(used2[1] + spec.epsilon)
            new = conv3x3(norm_relu(z, used2[0], gain, arrays["bias2"].astype(wide)), arrays["kernel2"])
        new = dropout(spec, key, i, new)
        if not spec.use_running_average:
            new_mean, new_var = moments(new)
            mean = _write(mean, new_mean, spec.channels(i))
            var = _write(var, new_var, spec.channels(i))
        buffer = _write(buffer, new, spec.channels(i))
        return (buffer, mean, var), (z if save_z else None, used2)

    carry, kept = (buffer, mean, var), []
    for start, stop in runs(spec):
        body = functools.partial(layer, spec.channels(stop - 1))
        carry, ys = lax.scan(body, carry, _layer_arrays(spec, params, running, start, stop, wide))
        kept.append(ys)
    buffer, mean, var = carry
    consumed = spec.out_features - spec.growth_rate
    mean2 = var2 = None
    if spec.bottleneck is not None:
        mean2, var2 = (jnp.concatenate(part) for part in zip(*(ys[1] for ys in kept), strict=True))
    # One array of bottlenecks per run: joining them would hold them twice.
    z = [ys[0] for ys in kept]
    return buffer, DenseStatistics(mean[:consumed], var[:consumed], mean2, var2), z


def _backward(spec: DenseSpec, params, key, saved_features, statistics, z, d_features):
    # Nothing below may start before the gradient has arrived, or recomputed values would be held until it does.
    saved_features, d_features = barrier((saved_features, d_features))
    dtype, wide = saved_features.dtype, accumulator(saved_features.dtype)
    tail = jnp.zeros(spec.growth_rate, wide)
    used_mean = jnp.concatenate([statistics.mean1.astype(wide), tail])
    used_var = jnp.concatenate([statistics.var1.astype(wide), tail + 1])
    rows = _row_kernel(spec, params).astype(dtype)

    def layer(width, total, inputs):
        i, arrays, z = inputs
        # A prefix and its normalisation are the same in every iteration of a loop: left alone, the compiler would
        # compute them once, ahead of it, and hold them. They have to depend on something that changes.
        features, mean, var, mean_dy = barrier((saved_features, used_mean, used_var, total.mean_dy))
        total = total._replace(mean_dy=mean_dy)
        d_new = put_off(spec, features, mean, var, total, spec.channels(i), spec.growth_rate)
        d_new = dropout(spec, key, i, d_new.astype(dtype))
        d_layer = {}
        if spec.bottleneck is not None:
            if z is None:
                z, _ = xla.convolve(spec, params, rows, features, mean, var, i, width)
            d_new, d_layer = _bottleneck_backward(spec, arrays, z, d_new)
        total = xla.convolve_backward(spec, params, rows, features, mean, var, i, width, d_new, total)
        return total, d_layer

    # A channel's gradient is the sum of up to one term per layer: too many for a narrow type.
    sums = [jnp.zeros(shape, wide) for shape in (*[spec.out_features] * 2, *[spec.rows] * 2, rows.shape)]
    total = xla.Gradients(d_features.astype(wide), *vary(sums, varying_axes(saved_features, d_features)))
    d_layers: list = []
    for (start, stop), kept in reversed(list(zip(runs(spec), z, strict=True))):
        index, arrays = _layer_arrays(spec, params, statistics, start, stop, wide)
        body = functools.partial(layer, spec.channels(stop - 1))
        total, d_layer = lax.scan(body, total, (index, arrays, kept), reverse=True)
        d_layers.insert(0, d_layer)
    dx = put_off(spec, saved_features, used_mean, used_var, total, 0, spec.in_features).astype(dtype)
    if spec.bottleneck is None:
        gradients = DenseParams(total.scale1, total.bias1, None, None, None, total.kernel)
    else:
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *d_layers)
        second = (joined["scale2"], joined["bias2"], joined["kernel2"])
        gradients = DenseParams(total.scale1, total.bias1, total.kernel, *second)
    return gradients, dx


def _bottleneck_backward(spec: DenseSpec, arrays, z, d_new):
    """Gradient of the 1x1 convolution's output `z`, and of the layer's second normalisation and 3x3 kernel."""
    wide = accumulator(z.dtype)
    mean, var = arrays["statistics"]
    inverse = lax.rsqrt(var + spec.epsilon)
    gain, bias = arrays["scale2"].astype(wide) * inverse, arrays["bias2"].astype(wide)
    hidden = norm_relu(z, mean, gain, bias)
    d_hidden, d_kernel2 = conv3x3_backward(hidden, arrays["kernel2"], d_new)
    sum_dy, sum_dy_z = xla.normalise_backward_sums(z, d_hidden, mean, gain, bias)
    dz = through_norm(spec, z, hidden, d_hidden, mean, var, gain, (sum_dy, sum_dy_z))
    return dz, {"scale2": sum_dy_z * inverse, "bias2": sum_dy, "kernel2": d_kernel2}
