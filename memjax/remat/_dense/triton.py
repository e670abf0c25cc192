"""What a dense layer does to the feature buffer and its gradient, as fused GPU kernels; `xla` says what they compute.

No kernel writes the normalised tensor. With c input channels, N outputs and M pixels, `convolve` reads M c features and
writes M N outputs; `convolve_backward` reads M c features and M N gradients (once per 32 channels, mostly from cache),
and updates M c float32 gradients. The number of channels is read from memory at run time, so that one compiled kernel
serves all layers of a block.

Sums over pixels are finished with atomics: their last bits differ from run to run.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from memjax._core.platforms import capability_for_triton, no_jax_triton, traced_device
from memjax.remat._dense.spec import DenseParams, DenseSpec
from memjax.remat._dense.xla import Gradients

_TILE = 64  # output columns of one matrix product

# Pixels and channels per program, warps, stages and programs of `convolve_backward`; the fastest of six tried on an H200.
_BACKWARD = (64, 32, 4, 3, 528)


def why_not(spec: DenseSpec, dtype) -> str | None:
    """Why these kernels cannot run a block, or None if they can."""
    if traced_device().platform != "gpu":
        return "it needs an NVIDIA GPU"
    if missing := no_jax_triton():
        return missing
    if spec.bottleneck is None:
        return "it needs layers with a bottleneck"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, not {jnp.dtype(dtype)}"
    if _alignment(spec) < 8:
        return "in_features and growth_rate must be multiples of 8"
    if spec.width > 4 * _TILE:
        return f"bottleneck * growth_rate must be at most {4 * _TILE}, not {spec.width}"
    return None


def _alignment(spec: DenseSpec) -> int:
    """A power of two that divides the channels of every layer: what lets the kernels load 16 bytes at a time."""
    return math.gcd(spec.in_features, spec.growth_rate, 16)


def _launch(name: str, *arrays, **settings):
    # Imported late: Triton exists only where there is a GPU.
    import jax_triton

    from memjax.remat._dense import triton_kernels

    settings["compute_capability"] = capability_for_triton()
    return jax_triton.triton_call(*arrays, kernel=getattr(triton_kernels, name), **settings)


def _sizes(spec: DenseSpec, rows, features) -> dict[str, Any]:
    """Constants of the kernels: pixels, channels of the buffer, outputs, alignment, epsilon."""
    channels = features.shape[-1]
    return {
        "M": features.size // channels,
        "LD": channels,
        "N": rows.shape[-1],
        "ALIGN": _alignment(spec),
        "EPSILON": spec.epsilon,
    }


def _where(spec: DenseSpec, layer):
    """Channels of `layer` and its first row, in units of the alignment."""
    unit = _alignment(spec)
    return jnp.stack([spec.channels(layer) // unit, spec.offset(layer) // unit]).astype(jnp.int32)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def convolve(spec: DenseSpec, params: DenseParams, rows, features, mean, var, layer, width):
    sizes = _sizes(spec, rows, features)
    pixels, outputs = sizes["M"], sizes["N"]
    # Few pixels: more programs by giving each fewer rows.
    block, warps = (128, 8) if pixels >= 128 * 256 else (64, 4)
    z, sums = _launch(
        "convolve",
        *(features, mean, var, params.scale1, params.bias1, rows, _where(spec, layer)),
        out_shape=(
            jax.ShapeDtypeStruct((*features.shape[:-1], outputs), features.dtype),
            jax.ShapeDtypeStruct((2, outputs), jnp.float32),
        ),
        zeroed_outputs=(1,),
        grid=(_ceil_div(pixels, block), 1),
        num_warps=warps,
        num_stages=3,
        BM=block,
        BK=64,
        NT=_ceil_div(outputs, _TILE),
        **sizes,
    )
    first, second = sums[0] / pixels, sums[1] / pixels
    return z, (first, jnp.maximum(second - jnp.square(first), 0))


def convolve_backward(
    spec: DenseSpec, params: DenseParams, rows, features, mean, var, layer, width, d_out, total: Gradients
) -> Gradients:
    block, channels, warps, stages, programs = _BACKWARD
    programs = max(programs, _ceil_div(width, channels))
    updated = _launch(
        "convolve_backward",
        *(features, mean, var, params.scale1, params.bias1, rows, d_out, _where(spec, layer), *total),
        out_shape=tuple(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in total),
        input_output_aliases={8 + i: i for i in range(len(total))},
        grid=(programs,),
        num_warps=warps,
        num_stages=stages,
        BM=block,
        BC=channels,
        NT=_ceil_div(rows.shape[-1], _TILE),
        PROGRAMS=programs,
        STAGES=stages,
        **_sizes(spec, rows, features),
    )
    return Gradients(*updated)


def normalise_backward_sums(z, d_hidden, mean, gain, bias):
    outputs = z.shape[-1]
    pixels = z.size // outputs
    tiles = _ceil_div(outputs, _TILE)
    rows = _ceil_div(pixels, max(1, 528 // tiles) * 64) * 64
    sums = _launch(
        "normalise_backward_sums",
        *(z, d_hidden, mean, gain, bias),
        out_shape=jax.ShapeDtypeStruct((2, outputs), jnp.float32),
        zeroed_outputs=(0,),
        grid=(_ceil_div(pixels, rows), tiles),
        num_warps=4,
        num_stages=3,
        M=pixels,
        N=outputs,
        ROWS=rows,
        BM=64,
        BN=_TILE,
        STAGES=3,
    )
    return sums[0], sums[1]
