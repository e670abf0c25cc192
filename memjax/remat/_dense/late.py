"""Gradients through batch normalisation from sums over pixels, of which those of features are applied late.

`shared` says why they may be.
"""

import math

import jax.numpy as jnp
from jax import lax

from memjax.remat._dense.spec import DenseSpec


def window(x, start, width):
    return lax.dynamic_slice_in_dim(x, start, width, axis=x.ndim - 1)


def put_off(spec: DenseSpec, features, mean, var, late, start, width):
    """The gradient of channels [start, start + width), all of whose consumers have run.

    `late` has, of all channels, the sums over layers of dy * gain, scale * mean(dy) and scale * mean(dy * x_hat).
    """
    of_features, mean_dy, mean_dy_xhat = late
    gradient = window(of_features, start, width)
    if spec.use_running_average:
        return gradient
    inverse = lax.rsqrt(window(var, start, width) + spec.epsilon)
    x_hat = (window(features, start, width).astype(mean.dtype) - window(mean, start, width)) * inverse
    return gradient - inverse * (window(mean_dy, start, width) + x_hat * window(mean_dy_xhat, start, width))


def through_norm(spec: DenseSpec, z, hidden, d_hidden, mean, var, gain, sums):
    """The gradient of z, from that of hidden = relu((z - mean) * gain + bias), and from the sums of dy and dy * (z - mean)."""
    wide, count = mean.dtype, math.prod(z.shape[:-1])
    sum_dy, sum_dy_z = sums
    dz = gain * jnp.where(hidden > 0, d_hidden, jnp.zeros_like(d_hidden)).astype(wide)
    if not spec.use_running_average:
        inverse = lax.rsqrt(var + spec.epsilon)
        dz -= gain * (sum_dy / count + (z.astype(wide) - mean) * (sum_dy_z * jnp.square(inverse) / count))
    return dz.astype(z.dtype)
