"""The passes over a dense block's shared buffer by the kernels of `triton`, which write into arrays of all layers in place."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memjax._core.arrays import vary, varying_axes
from memjax._core.barriers import barrier
from memjax.remat._dense import triton
from memjax.remat._dense.late import put_off, through_norm
from memjax.remat._dense.spec import DenseParams, DenseSpec, DenseStatistics, dropout, moments, norm_relu
from memjax.remat._dense.xla import (
    Gradients,
    conv_outputs_first,
    conv_outputs_first_backward,
    outputs_first,
)


def _of_layer(a, i):
    return lax.dynamic_index_in_dim(a, i, 0, keepdims=False)


def _loop(layers: int, body, state):
    return lax.fori_loop(np.int32(0), np.int32(layers), body, state)


def _gain_and_shift(spec: DenseSpec, scale, bias, mean, var):
    """What a normalisation multiplies channels by, and adds."""
    gain = scale.astype(jnp.float32) * lax.rsqrt(var + spec.epsilon)
    return gain, bias.astype(jnp.float32) - mean * gain


def forward(spec: DenseSpec, save_z: bool, params, running, key, x):
    """Features, the statistics that were used, and outputs of bottlenecks with a leading axis of layers, or None."""
    # Everything in these is written before it is read.
    features = lax.empty((*x.shape[:-1], spec.out_features), x.dtype)
    features = lax.dynamic_update_slice_in_dim(features, x, 0, axis=3)
    room = (0, spec.num_layers * spec.growth_rate)
    if spec.use_running_average:
        mean, var, mean2, var2 = (a.astype(jnp.float32) for a in running)
    else:
        # Room for the last layer's features too: nobody reads their statistics, but every layer writes alike.
        mean, var = (jnp.pad(a, room) for a in moments(x))
        mean2 = var2 = jnp.zeros((spec.num_layers, spec.width), jnp.float32)
    second = _gain_and_shift(spec, params.scale2, params.bias2, mean2, var2)
    read = spec.in_features  # by the first layer
    first = _gain_and_shift(spec, params.scale1[:read], params.bias1[:read], mean[:read], var[:read])
    sums = jnp.zeros((2, spec.width), jnp.float32), jnp.zeros((2, spec.growth_rate), jnp.float32)
    counts = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
    z = lax.empty((spec.num_layers, *x.shape[:-1], spec.width), x.dtype) if save_z else None
    gain, shift = (jnp.pad(a, room) for a in first)
    gain2, shift2 = second
    kernel2 = outputs_first(params.kernel2[0], x.dtype)
    state = triton.Forward(features, mean, var, gain, shift, kernel2, z, mean2, var2, gain2, shift2, sums, counts)
    rows = params.kernel1.astype(x.dtype)

    def layer(i, state: triton.Forward) -> triton.Forward:
        state, z = triton.convolve(spec, params, rows, state, i)
        hidden = z.astype(jnp.float32) * _of_layer(state.gain2, i) + _of_layer(state.shift2, i)
        hidden = jax.nn.relu(hidden).astype(z.dtype)
        new = dropout(spec, key, i, conv_outputs_first(hidden, state.kernel2))
        return triton.append(spec, params, state, new, i)

    state = _loop(spec.num_layers, layer, vary(state, varying_axes(x, rows)))
    consumed = spec.out_features - spec.growth_rate
    statistics = DenseStatistics(state.mean[:consumed], state.var[:consumed], state.mean2, state.var2)
    return state.features, statistics, state.z


def backward(spec: DenseSpec, params, key, features, statistics, z, d_features):
    """Gradients of the parameters, in float32, and of the input."""
    # Nothing below may start before the gradient has arrived, or recomputed values would be held until it does.
    features, d_features = barrier((features, d_features))
    last = spec.num_layers - 1
    # The last layer's features have no consumer, and no statistics.
    extended = lambda a, value: jnp.pad(a.astype(jnp.float32), (0, spec.growth_rate), constant_values=value)
    mean, var = extended(statistics.mean1, 0), extended(statistics.var1, 1)
    rows = params.kernel1.astype(features.dtype)
    # A slice as long as the widest layer's is to end inside, also from the last layer's first row on.
    affine = [jnp.pad(a, (0, spec.out_features)) for a in (params.scale1, params.bias1)]
    # Once for all layers: in the loop it would be a kernel of its own, for a few numbers.
    gain2 = params.scale2.astype(jnp.float32) * lax.rsqrt(statistics.var2.astype(jnp.float32) + spec.epsilon)

    def layer(index, state):
        total, sums, kernel2, d_kernels = state
        i = last - index
        d_new = put_off(spec, features, mean, var, total, spec.channels(i), spec.growth_rate)
        d_new = dropout(spec, key, i, d_new.astype(features.dtype))
        if z is None:
            # Channels that the layer does not read get numbers of others, which nobody reads.
            scale, bias = (lax.dynamic_slice_in_dim(a, spec.offset(i), spec.out_features) for a in affine)
            gain1, shift1 = _gain_and_shift(spec, scale, bias, mean, var)
            every = here = triton.convolve_again(spec, params, rows, features, gain1, shift1, index)
        else:
            every, here = z, _of_layer(z, i)
        mean2, var2, gain, bias2 = (
            _of_layer(a, i).astype(jnp.float32) for a in (statistics.mean2, statistics.var2, gain2, params.bias2)
        )
        hidden = norm_relu(here, mean2, gain, bias2)
        d_hidden, d_kernel2 = conv_outputs_first_backward(hidden, kernel2, d_new)
        kernel2, sums = triton.normalise_backward_sums(spec, params, statistics, every, d_hidden, index, kernel2, sums)
        dz = through_norm(spec, here, hidden, d_hidden, mean2, var2, gain, [_of_layer(a, i) for a in sums])
        total = triton.convolve_backward(spec, params, rows, features, mean, var, index, dz, total)
        d_kernels = lax.dynamic_update_index_in_dim(d_kernels, d_kernel2.astype(d_kernels.dtype), i, 0)
        return total, sums, kernel2, d_kernels

    # A channel's gradient is the sum of up to one term per layer: too many for a narrow type.
    nothing = lambda *shape: jnp.zeros(shape, jnp.float32)
    total = Gradients(
        features=d_features.astype(jnp.float32),
        mean_dy=nothing(spec.out_features),
        mean_dy_xhat=nothing(spec.out_features),
        scale1=nothing(spec.rows),
        bias1=nothing(spec.rows),
        kernel=nothing(*rows.shape),
    )
    sums = nothing(spec.num_layers, spec.width), nothing(spec.num_layers, spec.width)
    kernel2 = outputs_first(params.kernel2[-1], features.dtype)
    d_kernels = lax.empty((spec.num_layers, *kernel2.shape), params.kernel2.dtype)
    start = vary((total, sums, kernel2, d_kernels), varying_axes(features, d_features, rows))
    total, (sum_dy, sum_dy_z), _, d_kernels = _loop(spec.num_layers, layer, start)
    dx = put_off(spec, features, mean, var, total, 0, spec.in_features).astype(features.dtype)
    scale2 = sum_dy_z * lax.rsqrt(statistics.var2.astype(jnp.float32) + spec.epsilon)
    return DenseParams(total.scale1, total.bias1, total.kernel, scale2, sum_dy, d_kernels.transpose(0, 2, 3, 4, 1)), dx
