"""What a dense layer does to the feature buffer and its gradient, in plain JAX, over a prefix of static width.

The first convolution is the 1x1 of a bottleneck layer, or the only 3x3 of a layer without one. Channels of the prefix
that the layer does not read have zero gain and bias, and so come out of the ReLU as zeros.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from memjax._core.barriers import barrier
from memjax._core.compat import explicit_sharding
from memjax.remat._dense.spec import DenseParams, DenseSpec, column_sums, moments, norm_relu


class Gradients(NamedTuple):
    """What the backward pass of a block adds up, layer after layer, in float32 or wider. C = out_features, R = rows."""

    features: Float[Array, "b h w C"]  # dy * gain over the layers so far
    mean_dy: Float[Array, " C"]  # scale * mean(dy) over the layers so far: the part that is put off
    mean_dy_xhat: Float[Array, " C"]  # scale * mean(dy * x_hat), likewise
    scale1: Float[Array, " R"]
    bias1: Float[Array, " R"]
    kernel: Float[Array, "R ..."]


class Norm(NamedTuple):
    """A layer's first normalisation over a prefix: `x_hat = (x - mean) * inverse`, `y = (x - mean) * gain + bias`."""

    mean: Float[Array, " width"]
    inverse: Float[Array, " width"]
    gain: Float[Array, " width"]
    bias: Float[Array, " width"]


def _layer_rows(spec: DenseSpec, array, layer, width):
    """The first `width` rows from where `layer` begins. The last of them may belong to later layers."""
    return lax.dynamic_slice_in_dim(array, spec.offset(layer), width, axis=0)


def _add_rows(spec: DenseSpec, array, update, layer):
    """`array` with `update` added to the rows from where `layer` begins."""
    current = _layer_rows(spec, array, layer, update.shape[0])
    return lax.dynamic_update_slice_in_dim(array, current + update, spec.offset(layer), axis=0)


def _prefix(features, width):
    return lax.slice_in_dim(features, 0, width, axis=features.ndim - 1)


def _norm(spec: DenseSpec, params: DenseParams, mean, var, layer, width) -> Norm:
    inverse = lax.rsqrt(var[:width] + spec.epsilon)
    is_read = jnp.arange(width) < spec.channels(layer)
    gain = _layer_rows(spec, params.scale1, layer, width).astype(inverse.dtype) * inverse
    bias = _layer_rows(spec, params.bias1, layer, width).astype(inverse.dtype)
    return Norm(mean[:width], inverse, jnp.where(is_read, gain, 0), jnp.where(is_read, bias, 0))


def _kernel(spec: DenseSpec, rows, layer, width):
    kernel = _layer_rows(spec, rows, layer, width)
    return jnp.moveaxis(kernel, 0, 2) if spec.bottleneck is None else kernel


def convolve(spec: DenseSpec, params: DenseParams, rows, features, mean, var, layer, width):
    """Output of the first convolution of `layer`, with its mean and variance."""
    norm = _norm(spec, params, mean, var, layer, width)
    hidden = norm_relu(_prefix(features, width), norm.mean, norm.gain, norm.bias)
    out = (conv3x3 if spec.bottleneck is None else conv1x1)(hidden, _kernel(spec, rows, layer, width))
    return out, moments(out)


def convolve_backward(
    spec: DenseSpec, params: DenseParams, rows, features, mean, var, layer, width, d_out, total: Gradients
) -> Gradients:
    """`total` plus what `layer` adds to it, from the gradient of its first convolution's output."""
    axes = tuple(range(features.ndim - 1))
    wide = mean.dtype
    norm = _norm(spec, params, mean, var, layer, width)
    hidden = norm_relu(_prefix(features, width), norm.mean, norm.gain, norm.bias)
    kernel = _kernel(spec, rows, layer, width)
    if spec.bottleneck is None:
        d_hidden, d_kernel = conv3x3_backward(hidden, kernel, d_out)
        d_kernel = jnp.moveaxis(d_kernel, 2, 0).astype(wide)
    else:
        # In this order a library that wants a transposed operand copies the narrower one.
        sharding = explicit_sharding(jax.typeof(kernel.T))
        d_kernel = lax.dot_general(d_out, hidden, ((axes, axes), ((), ())), out_sharding=sharding).T.astype(wide)
        d_hidden = lax.dot_general(d_out, kernel.astype(d_out.dtype), (((d_out.ndim - 1,), (1,)), ((), ())))
    dy = jnp.where(hidden > 0, d_hidden, jnp.zeros_like(d_hidden)).astype(wide)
    sum_dy = column_sums(dy)
    sum_dy_xhat = column_sums(dy * (_prefix(features, width).astype(wide) - norm.mean)) * norm.inverse
    updated = _prefix(total.features, width) + dy * norm.gain
    # Not the gain, which is zero for channels that are not the layer's: there the sums are zero too.
    scale = _layer_rows(spec, params.scale1, layer, width).astype(wide) * (features.shape[-1] / max(1, features.size))
    return Gradients(
        lax.dynamic_update_slice_in_dim(total.features, updated, 0, axis=features.ndim - 1),
        total.mean_dy.at[:width].add(scale * sum_dy),
        total.mean_dy_xhat.at[:width].add(scale * sum_dy_xhat),
        _add_rows(spec, total.scale1, sum_dy_xhat, layer),
        _add_rows(spec, total.bias1, sum_dy, layer),
        _add_rows(spec, total.kernel, d_kernel, layer),
    )


def normalise_backward_sums(z, d_hidden, mean, gain, bias):
    """Per-channel sums of `dy` and `dy * (z - mean)`, where `dy` is `d_hidden` masked by the ReLU after the normalisation."""
    dy = jnp.where(norm_relu(z, mean, gain, bias) > 0, d_hidden, jnp.zeros_like(d_hidden)).astype(mean.dtype)
    return column_sums(dy), column_sums(dy * (z.astype(mean.dtype) - mean))


# The convolutions of a dense layer, and the gradient of the 3x3 one in a form that every backend runs fast inside
# loops.

_LAYOUT = ("NHWC", "HWIO", "NHWC")


def conv1x1(x: Float[Array, "*batch c"], kernel: Float[Array, "c k"]) -> Float[Array, "*batch k"]:
    return lax.dot_general(x, kernel.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())))


def conv3x3(x: Float[Array, "b h w c"], kernel: Float[Array, "3 3 c k"]) -> Float[Array, "b h w k"]:
    return lax.conv_general_dilated(x, kernel.astype(x.dtype), (1, 1), "SAME", dimension_numbers=_LAYOUT)


def conv3x3_backward(
    x: Float[Array, "b h w c"], kernel: Float[Array, "3 3 c k"], dy: Float[Array, "b h w k"]
) -> tuple[Float[Array, "b h w c"], Float[Array, "3 3 c k"]]:
    """Gradients of `conv3x3(x, kernel)` with respect to both, in their dtypes.

    XLA:CPU has a library for convolutions in the forward layout only. Outside loops it transposes the others to it; in the
    body of a loop it runs them as plain loops, 4 to 60 times slower and with one long sum. So the layout is made here.
    """
    return lax.platform_dependent(x, kernel, dy, cpu=_in_forward_layout, default=_by_autodiff)


def _by_autodiff(x, kernel, dy):
    _, pull = jax.vjp(conv3x3, x, kernel)
    return pull(dy)


def _in_forward_layout(x, kernel, dy):
    # Left to itself, the compiler folds the transpositions back into the convolutions.
    swapped = barrier(jnp.flip(kernel, (0, 1)).swapaxes(2, 3))
    x_by_channel, dy_by_batch = barrier((x.transpose(3, 1, 2, 0), dy.transpose(1, 2, 0, 3)))
    pads = ((1, 1), (1, 1))
    sharding = explicit_sharding(jax.typeof(kernel))  # the batch is summed over, and may be sharded
    on_mesh = explicit_sharding(jax.typeof(x))
    if sharding is None and on_mesh is not None:  # a constant lies on no mesh
        sharding = on_mesh.update(spec=PartitionSpec())
    if sharding is not None:
        entries = list(sharding.spec) + [None] * (4 - len(sharding.spec))
        sharding = sharding.update(spec=PartitionSpec(*(entries[i] for i in (2, 0, 1, 3))))
    d_kernel = lax.conv_general_dilated(
        x_by_channel, dy_by_batch, (1, 1), pads, dimension_numbers=_LAYOUT, out_sharding=sharding
    )
    return conv3x3(dy, swapped), d_kernel.transpose(1, 2, 0, 3).astype(kernel.dtype)


def outputs_first(kernel: Float[Array, "3 3 c k"], dtype) -> Float[Array, "k 3 3 c"]:
    """A kernel in the order and the type that cuDNN reads without a copy."""
    return kernel.transpose(3, 0, 1, 2).astype(dtype)


def conv_outputs_first(x: Float[Array, "b h w c"], kernel: Float[Array, "k 3 3 c"]) -> Float[Array, "b h w k"]:
    """`conv3x3` with such a kernel."""
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "OHWI", "NHWC"))


def conv_outputs_first_backward(
    x: Float[Array, "b h w c"], kernel: Float[Array, "k 3 3 c"], dy: Float[Array, "b h w k"]
) -> tuple[Float[Array, "b h w c"], Float[Array, "k 3 3 c"]]:
    """Its gradients."""
    _, pull = jax.vjp(conv_outputs_first, x, kernel)
    return pull(dy)
