"""The dense block as one would write it: concatenate, normalise, convolve, and let autodiff keep what it likes.

This is the reference that the memory-saving version is tested against, and what `keep="all"` runs.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from memjax._core.arrays import accumulator
from memjax.remat import policies
from memjax.remat._dense.conv import conv1x1, conv3x3
from memjax.remat._dense.spec import (
    DenseParams,
    DenseSpec,
    DenseStatistics,
    dropout,
    norm_relu,
)


def _normalise(spec: DenseSpec, x, scale, bias, running):
    if spec.use_running_average:
        mean, var = running
    else:
        wide, axes = x.astype(accumulator(x.dtype)), tuple(range(x.ndim - 1))
        mean = jnp.mean(wide, axes)
        var = jnp.maximum(jnp.mean(jnp.square(wide), axes) - jnp.square(mean), 0)
    gain = scale.astype(mean.dtype) * jax.lax.rsqrt(var + spec.epsilon)
    return norm_relu(x, mean, gain, bias.astype(mean.dtype)), (mean, var)


def plain(spec: DenseSpec, params: DenseParams, running: DenseStatistics, key, x):
    """Features (B, H, W, out_features) and the statistics used, by plain autodiff."""
    features, statistics2 = [x], []
    used = (running.mean1, running.var1)
    for i in range(spec.num_layers):
        c = spec.channels(i)
        rows = slice(spec.offset(i), spec.offset(i + 1))
        joined = jnp.concatenate(features, -1)
        hidden, used1 = _normalise(
            spec, joined, params.scale1[rows], params.bias1[rows], (running.mean1[:c], running.var1[:c])
        )
        if i == spec.num_layers - 1:  # the last layer reads every channel that has statistics
            used = used1
        if params.kernel1 is not None:
            assert params.scale2 is not None
            assert params.bias2 is not None
            assert running.mean2 is not None
            assert running.var2 is not None
            z = checkpoint_name(conv1x1(hidden, params.kernel1[rows]), policies.CONV_OUTPUT)
            hidden, used2 = _normalise(spec, z, params.scale2[i], params.bias2[i], (running.mean2[i], running.var2[i]))
            statistics2.append(used2)
            kernel2 = params.kernel2[i]
        else:
            kernel2 = jnp.moveaxis(params.kernel2[rows], 0, 2)
        new = checkpoint_name(conv3x3(hidden, kernel2), policies.DENSE_FEATURES)
        features.append(dropout(spec, key, i, new))
    mean2, var2 = (jnp.stack(s) for s in zip(*statistics2, strict=True)) if statistics2 else (None, None)
    statistics = DenseStatistics(*used, mean2, var2)
    return jnp.concatenate(features, -1), jax.lax.stop_gradient(statistics)
