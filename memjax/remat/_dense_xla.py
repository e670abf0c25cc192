"""A dense layer's first convolution, over a prefix of the feature buffer, and its gradient, in plain JAX.

The first convolution is the 1x1 of a bottleneck layer, or the only 3x3 of a layer without one. The prefix has a static
width; channels of it that the layer does not own have zero gain and bias, and so come out of the ReLU as zeros.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from memjax.remat._dense_spec import DenseParams, DenseSpec, conv1x1, conv3x3, norm_relu


class Norm(NamedTuple):
    """First normalisation of a layer over a prefix of the feature buffer: `x_hat = (x - mean) * inverse`,
    `y = (x - mean) * gain + bias`."""

    mean: Float[Array, " width"]
    inverse: Float[Array, " width"]
    gain: Float[Array, " width"]
    bias: Float[Array, " width"]


def layer_rows(spec: DenseSpec, array, layer, width):
    """The first `width` rows from where `layer` begins; those past the layer's own belong to later layers."""
    return lax.dynamic_slice_in_dim(array, spec.offset(layer), width, axis=0)


def make_norm(spec: DenseSpec, params: DenseParams, mean, var, layer, width) -> Norm:
    inverse = lax.rsqrt(var[:width] + spec.epsilon)
    own = jnp.arange(width) < spec.channels(layer)
    gain = layer_rows(spec, params.scale1, layer, width).astype(inverse.dtype) * inverse
    bias = layer_rows(spec, params.bias1, layer, width).astype(inverse.dtype)
    return Norm(mean[:width], inverse, jnp.where(own, gain, 0), jnp.where(own, bias, 0))


def _hidden(features, norm: Norm):
    return norm_relu(_prefix(features, norm), norm.mean, norm.gain, norm.bias)


def _prefix(features, norm: Norm):
    return lax.slice_in_dim(features, 0, norm.mean.shape[0], axis=features.ndim - 1)


def _kernel(spec: DenseSpec, rows, layer, width):
    kernel = layer_rows(spec, rows, layer, width)
    return jnp.moveaxis(kernel, 0, 2) if spec.bottleneck is None else kernel


def convolve(spec: DenseSpec, rows, features, norm: Norm, layer):
    """Output of the first convolution of `layer`, whose kernel is in `rows`."""
    kernel = _kernel(spec, rows, layer, norm.mean.shape[0])
    return (conv3x3 if spec.bottleneck is None else conv1x1)(_hidden(features, norm), kernel)


def convolve_backward(spec: DenseSpec, rows, features, norm: Norm, layer, d_out, gradient, d_rows):
    """Backward pass of `convolve`, up to the terms of the normalisation's gradient that are put off.

    Returns `gradient` with `dy * gain` added to the prefix, the per-channel sums of `dy` and of `dy * x_hat`, and
    `d_rows` with the kernel's gradient added to the layer's rows.
    """
    axes = tuple(range(features.ndim - 1))
    width = norm.mean.shape[0]
    wide = norm.mean.dtype
    hidden = _hidden(features, norm)
    kernel = _kernel(spec, rows, layer, width)
    if spec.bottleneck is None:
        _, pull = jax.vjp(conv3x3, hidden, kernel)
        d_hidden, d_kernel = pull(d_out)
        d_kernel = jnp.moveaxis(d_kernel, 2, 0)
    else:
        # In this order a library that wants a transposed operand copies the narrower one.
        d_kernel = lax.dot_general(d_out, hidden, ((axes, axes), ((), ())), preferred_element_type=wide).T
        d_hidden = lax.dot_general(d_out, kernel.astype(d_out.dtype), (((d_out.ndim - 1,), (1,)), ((), ())))
    dy = jnp.where(hidden > 0, d_hidden, jnp.zeros_like(d_hidden)).astype(wide)
    centred = _prefix(features, norm).astype(wide) - norm.mean
    sum_dy, sum_dy_xhat = jnp.sum(dy, axes), jnp.sum(dy * centred, axes) * norm.inverse
    updated = _prefix(gradient, norm).astype(wide) + dy * norm.gain
    gradient = lax.dynamic_update_slice_in_dim(gradient, updated.astype(gradient.dtype), 0, axis=gradient.ndim - 1)
    # Channels that are not the layer's have zero gradients, so adding leaves the later layers' rows as they are.
    return gradient, sum_dy, sum_dy_xhat, add_rows(spec, d_rows, d_kernel, layer)


def add_rows(spec: DenseSpec, array, update, layer):
    """`array` with `update` added to the rows from where `layer` begins."""
    start = spec.offset(layer)
    current = lax.dynamic_slice_in_dim(array, start, update.shape[0], axis=0)
    return lax.dynamic_update_slice_in_dim(array, current + update.astype(array.dtype), start, axis=0)
