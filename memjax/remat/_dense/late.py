"""Gradients through batch normalisation from sums over pixels, of which those of features are applied late.

`shared` says why they may be.
"""

import math

import jax.numpy as jnp
from jax import lax

from memjax.remat._dense.spec import DenseSpec
from memjax.remat._dense.xla import Gradients


def _window(x, start, width):
    return lax.dynamic_slice_in_dim(x, start, width, axis=x.ndim - 1)


def put_off(spec: DenseSpec, features, mean, var, total: Gradients, start, width):
    """The gradient of channels [start, start + width), all of whose consumers have run."""
    gradient = _window(total.features, start, width)
    if spec.use_running_average:
        return gradient
    inverse = lax.rsqrt(_window(var, start, width) + spec.epsilon)
    x_hat = (_window(features, start, width).astype(mean.dtype) - _window(mean, start, width)) * inverse
    late = _window(total.mean_dy, start, width) + x_hat * _window(total.mean_dy_xhat, start, width)
    return gradient - inverse * late


def through_norm(spec: DenseSpec, z, hidden, d_hidden, mean, var, gain, sums):
    """The gradient of z, from that of hidden = relu((z - mean) * gain + bias), and from the sums of dy and dy * (z - mean)."""
    wide, count = mean.dtype, math.prod(z.shape[:-1])
    sum_dy, sum_dy_z = sums
    dz = gain * jnp.where(hidden > 0, d_hidden, jnp.zeros_like(d_hidden)).astype(wide)
    if not spec.use_running_average:
        inverse = lax.rsqrt(var + spec.epsilon)
        dz -= gain * (sum_dy / count + (z.astype(wide) - mean) * (sum_dy_z * jnp.square(inverse) / count))
    return dz.astype(z.dtype)
