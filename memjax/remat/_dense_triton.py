"""A dense layer's 1x1 convolution and its gradient as two fused GPU kernels; `_dense_xla` says what they compute.

Neither writes the normalised tensor. With c input channels, N outputs and M pixels, `convolve` reads M c features and
writes M N outputs; `convolve_backward` reads M c features and M N gradients (once per `BC` channels, mostly from cache),
and updates M c float32 gradients. The number of channels is read from memory at run time, so that one compiled kernel
serves all layers of a block.

Gradients of kernels and the sums over pixels are added up with atomics: their last bits differ from run to run.
"""

import functools
import importlib.util
import math

import jax
import jax.numpy as jnp

from memjax.remat._dense_spec import DenseSpec


def why_not(spec: DenseSpec, dtype) -> str | None:
    """Why these kernels cannot run a block, or None if they can."""
    if jax.default_backend() != "gpu":
        return "it needs an NVIDIA GPU"
    if importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is not installed: pip install 'memjax[gpu]'"
    if spec.bottleneck is None:
        return "it needs layers with a bottleneck"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, not {jnp.dtype(dtype)}"
    if _alignment(spec) < 8:
        return "in_features and growth_rate must be multiples of 8"
    if spec.width > 256:
        return f"bottleneck * growth_rate must be at most 256, not {spec.width}"
    return None


def _alignment(spec: DenseSpec) -> int:
    """A power of two that divides the channels of every layer: what lets the kernels load 16 bytes at a time."""
    return math.gcd(spec.in_features, spec.growth_rate, 16)


@functools.cache
def _kernels():
    from memjax.remat import _dense_triton_kernels

    return _dense_triton_kernels


def _where(spec: DenseSpec, layer):
    """Channels of `layer` and its first row, in units of the alignment."""
    unit = _alignment(spec)
    return jnp.stack([spec.channels(layer) // unit, spec.offset(layer) // unit]).astype(jnp.int32)


def convolve(spec: DenseSpec, rows, features, norm, layer):
    import jax_triton as jt

    outputs = rows.shape[-1]
    pixels = features.size // features.shape[-1]
    block, splits = (128, 1) if pixels >= 128 * 96 else (64, 4)
    shape = (pixels, outputs) if splits == 1 else (splits, pixels, outputs)
    z = jt.triton_call(
        features,
        norm.mean,
        norm.gain,
        norm.bias,
        rows,
        _where(spec, layer),
        kernel=_kernels().convolve,
        out_shape=jax.ShapeDtypeStruct(shape, features.dtype if splits == 1 else jnp.float32),
        grid=(_ceil_div(pixels, block), splits),
        num_warps=8 if block == 128 else 4,
        num_stages=3,
        M=pixels,
        LD=features.shape[-1],
        N=outputs,
        ALIGN=_alignment(spec),
        BM=block,
        BK=64,
        NT=_ceil_div(outputs, 64),
        SPLITS=splits,
    )
    if splits > 1:
        z = jnp.sum(z, 0).astype(features.dtype)
    return z.reshape(*features.shape[:-1], outputs)


def convolve_backward(spec: DenseSpec, rows, features, norm, layer, d_out, gradient, d_rows):
    import jax_triton as jt

    outputs = rows.shape[-1]
    pixels = features.size // features.shape[-1]
    width = norm.mean.shape[0]
    block = 128
    gradient, d_rows, sums = jt.triton_call(
        features,
        norm.mean,
        norm.gain,
        norm.bias,
        rows,
        d_out,
        _where(spec, layer),
        gradient,
        d_rows,
        kernel=_kernels().convolve_backward,
        out_shape=(
            jax.ShapeDtypeStruct(gradient.shape, gradient.dtype),
            jax.ShapeDtypeStruct(d_rows.shape, d_rows.dtype),
            jax.ShapeDtypeStruct((2, width), jnp.float32),
        ),
        input_output_aliases={7: 0, 8: 1},
        zeroed_outputs=(2,),
        grid=(max(264, _ceil_div(width, block)),),
        num_warps=8,
        num_stages=2,
        M=pixels,
        LD=features.shape[-1],
        N=outputs,
        W=width,
        ALIGN=_alignment(spec),
        BM=64,
        BC=block,
        NT=_ceil_div(outputs, 64),
        PROGRAMS=max(264, _ceil_div(width, block)),
    )
    return gradient, sums[0], sums[1] * norm.inverse, d_rows


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
