"""What a dense layer does to the feature buffer and its gradient, as fused GPU kernels; `xla` says what they compute.

No kernel writes the normalised tensor. With c input channels, N outputs and M pixels, `convolve` reads M c features and
writes M N outputs; `convolve_backward` reads M c features and M N gradients (once per 128 channels, mostly from cache),
and updates M c float32 gradients. The number of the layer is read from memory at run time, so that one compiled kernel
serves all layers of a block. Kernels write into arrays of all layers in place.

Sums over pixels are finished with atomics: their last bits differ from run to run.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from memjax._core.arrays import vary, varying_axes
from memjax._core.platforms import capability_for_triton, no_jax_triton, traced_device
from memjax.remat._dense.spec import DenseParams, DenseSpec, DenseStatistics
from memjax.remat._dense.xla import Gradients

_TILE = 64  # output columns of one matrix product
_PROGRAMS = 528  # that passes over pixels are divided among: four for each multiprocessor


class Forward(NamedTuple):
    """What the forward pass writes. C = out_features, L = layers, N = outputs of a bottleneck.

    Normalised, a channel is relu(x * gain + shift). There are gains and shifts of features for one layer at a time, and of
    bottlenecks for all. `kernel2` is the 3x3 kernel of one layer at a time, in the order and the type that cuDNN reads.
    """

    features: Float[Array, "b h w C"]
    mean: Float[Array, " C"]
    var: Float[Array, " C"]
    gain: Float[Array, " C"]
    shift: Float[Array, " C"]
    kernel2: Float[Array, "k 3 3 N"]
    z: Float[Array, "L b h w N"] | None  # outputs of bottlenecks, where they are kept
    mean2: Float[Array, "L N"]
    var2: Float[Array, "L N"]
    gain2: Float[Array, "L N"]
    shift2: Float[Array, "L N"]
    sums: tuple[Float[Array, "2 N"], Float[Array, "2 k"]]  # zero between kernels
    counts: tuple[Int[Array, " 1"], Int[Array, " 1"]]  # of programs that have added to these; zero between kernels


# Pixels and channels per program, warps, stages and programs of `convolve_backward`. On Hopper's and Blackwell's large GPUs a
# program fills a multiprocessor: the fastest of forty tried on an H200. Others have less shared memory.
_BACKWARD = {"9": (32, 128, 8, 3, 132), "10": (32, 128, 8, 3, 132)}
_BACKWARD_OF_OTHERS = (32, 64, 4, 2, 264)


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
    out = jax_triton.triton_call(*arrays, kernel=getattr(triton_kernels, name), **settings)
    return vary(out, varying_axes(*arrays))


def _type(a: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def _generation() -> str:
    """The first number of the GPU's compute capability."""
    return str(traced_device().compute_capability).split(".")[0]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _sizes(spec: DenseSpec, features: Any) -> dict[str, Any]:
    """Constants of the kernels: pixels, channels of the buffer, of the input and of a layer, and their alignment."""
    channels = features.shape[-1]
    return {
        "M": features.size // channels,
        "LD": channels,
        "IN": spec.in_features,
        "GROWTH": spec.growth_rate,
        "ALIGN": _alignment(spec),
    }


def convolve(spec: DenseSpec, params: DenseParams, rows, state: Forward, layer) -> tuple[Forward, Any]:
    """The 1x1 convolution of a layer; unless running averages are used, also what normalises its outputs."""
    names = () if spec.use_running_average else ("mean2", "var2", "gain2", "shift2")
    written = [getattr(state, name) for name in names]
    if names:
        written += [state.sums[0], state.counts[0]]
    z, *written = _convolve(
        spec, params, rows, state.features, state.gain, state.shift, layer, -1, state.z, tuple(written)
    )
    if names:
        *found, sums, count = written
        state = state._replace(sums=(sums, state.sums[1]), counts=(count, state.counts[1]))
        state = state._replace(**dict(zip(names, found, strict=True)))
    if state.z is None:
        return state, z
    return state._replace(z=z), jax.lax.dynamic_index_in_dim(z, layer, 0, keepdims=False)


def convolve_again(spec: DenseSpec, params: DenseParams, rows, features, gain, shift, index):
    """The output of the 1x1 convolution of the layer that is `index` before the last."""
    return _convolve(spec, params, rows, features, gain, shift, index, spec.num_layers - 1, None, ())[0]


def _convolve(
    spec: DenseSpec, params: DenseParams, rows, features, gain, shift, number, last: int, z, written: tuple[Any, ...]
) -> list[Any]:
    """The output, or `z` with it in its place, and the arrays of `written` as they are then.

    These are means, variances, gains and shifts of the outputs, sums, and a count of programs; or nothing.
    """
    sizes = _sizes(spec, features)
    pixels, outputs = sizes["M"], rows.shape[-1]
    block, channels, stages = _forward_tiles(pixels)
    tiles = _ceil_div(pixels, block)
    one = jax.ShapeDtypeStruct((*features.shape[:-1], outputs), features.dtype)
    nothing = jax.ShapeDtypeStruct((1,), jnp.float32)
    # With two products of one operand Triton 3.6 does not compile for these GPUs.
    widest = 4 * _TILE if _generation() == "10" else 2 * _TILE
    first = min(_power_of_two(max(outputs, _TILE)), widest)
    out = _launch(
        "convolve",
        *(features, gain, shift, rows, params.scale2, params.bias2, number),
        *((features if z is None else z), *(written or (gain,) * 6)),
        out_shape=[one if z is None else _type(z), *(map(_type, written) if written else [nothing] * 6)],
        input_output_aliases={7 + i: i for i in range(7) if (z is not None if i == 0 else written)},
        grid=(tiles,),
        num_warps=4,
        num_stages=stages,
        N=outputs,
        PADDED=_power_of_two(outputs),
        EPSILON=spec.epsilon,
        LAST=last,
        STACKED=z is not None,
        STATISTICS=bool(written),
        PROGRAMS=tiles,
        BM=block,
        BK=channels,
        BN0=first,
        BN1=_TILE if outputs <= first + _TILE else 2 * _TILE,
        **sizes,
    )
    return list(out) if written else [out[0]]


def _forward_tiles(pixels: int) -> tuple[int, int, int]:
    """Pixels of a program of `convolve`, channels of a step and stages; the fastest of a dozen tried on an H200.

    With many programs for each multiprocessor, small steps, so that several programs run on it at a time; with about one, larger
    ones. With fewer programs than there are multiprocessors, large steps, and fewer pixels each.
    """
    if pixels >= 4 * 132 * 64:
        return 64, 32, 3
    if pixels >= 132 * 64:
        return 64, 64, 3
    return 32, 128, 3


def append(spec: DenseSpec, params: DenseParams, state: Forward, new, layer) -> Forward:
    """Writes a layer's features and what normalises the next layer's input."""
    sizes = _sizes(spec, state.features)
    rows = _ceil_div(sizes["M"], _PROGRAMS)
    # Large tiles where there are many rows: a program waits for each.
    block = 128 if rows > 64 and spec.growth_rate <= 64 else 32
    share = _ceil_div(rows, block) * block
    programs = max(_ceil_div(sizes["M"], share), _fewest_for_kernel(spec))  # those beyond the rows have none
    written = (
        *(state.features, state.mean, state.var, state.gain, state.shift, state.kernel2),
        *(state.sums[1], state.counts[1]),
    )
    features, mean, var, gain, shift, kernel2, sums, count = _launch(
        "append",
        *(new, params.scale1, params.bias1, params.kernel2, layer, *written),
        out_shape=[*map(_type, written)],
        input_output_aliases={5 + i: i for i in range(8)},
        grid=(programs,),
        num_warps=4,
        N=spec.width,
        PADDED=_power_of_two(spec.growth_rate),
        EPSILON=spec.epsilon,
        LAYERS=spec.num_layers,
        STATISTICS=not spec.use_running_average,
        PROGRAMS=programs,
        ROWS=share,
        BM=block,
        SHARE=_power_of_two(_ceil_div(sizes["LD"], programs)),
        KERNEL_SHARE=_kernel_share(spec, programs),
        **sizes,
    )
    sums, counts = (state.sums[0], sums), (state.counts[0], count)
    return state._replace(
        features=features, mean=mean, var=var, gain=gain, shift=shift, kernel2=kernel2, sums=sums, counts=counts
    )


def _kernel_share(spec: DenseSpec, programs: int) -> int:
    """How much of a 3x3 kernel each of so many programs writes."""
    return _power_of_two(_ceil_div(9 * spec.width * spec.growth_rate, programs))


def _fewest_for_kernel(spec: DenseSpec) -> int:
    """The programs among which a 3x3 kernel is divided at the least: a program with much of it takes long to compile."""
    return _ceil_div(9 * spec.width * spec.growth_rate, 8192)


def convolve_backward(
    spec: DenseSpec, params: DenseParams, rows, features, mean, var, index, d_out, total: Gradients
) -> Gradients:
    """`total` plus what the layer that is `index` before the last adds, from the gradient of its 1x1 convolution's output."""
    sizes = _sizes(spec, features)
    block, channels, warps, stages, programs = _BACKWARD.get(_generation(), _BACKWARD_OF_OTHERS)
    programs = max(programs, _ceil_div(features.shape[-1], channels))
    updated = _launch(
        "convolve_backward",
        *(features, mean, var, params.scale1, params.bias1, rows, d_out, index, *total),
        out_shape=[*map(_type, total)],
        input_output_aliases={8 + i: i for i in range(len(total))},
        grid=(programs,),
        num_warps=warps,
        num_stages=stages,
        N=rows.shape[-1],
        EPSILON=spec.epsilon,
        LAST=spec.num_layers - 1,
        BM=block,
        BC=channels,
        NT=_ceil_div(rows.shape[-1], _TILE),
        PROGRAMS=programs,
        STAGES=stages,
        **sizes,
    )
    return Gradients(*updated)


def normalise_backward_sums(
    spec: DenseSpec,
    params: DenseParams,
    statistics: DenseStatistics,
    z,
    d_hidden,
    index,
    kernel2,
    sums: tuple[Any, Any],
) -> tuple[Any, tuple[Any, Any]]:
    """Adds the sums of dy and dy * (z - mean) of the second normalisation, for the layer that is `index` before the last.

    `z` is that layer's, or has a leading axis of layers; `sums` have a row for each layer. Also returned, before them: the
    3x3 kernel of the layer before, in place of this layer's. A kernel of its own would take longer to start than to run.
    """
    outputs = d_hidden.shape[-1]
    pixels = d_hidden.size // outputs
    tiles = _ceil_div(outputs, _TILE)
    share = _ceil_div(pixels, max(1, _PROGRAMS // tiles) * 64) * 64
    shares = max(_ceil_div(pixels, share), _ceil_div(_fewest_for_kernel(spec), tiles))
    sum_dy, sum_dy_z, kernel2 = _launch(
        "normalise_backward_sums",
        *(z, d_hidden, statistics.mean2, statistics.var2, params.scale2, params.bias2, params.kernel2, index),
        *(*sums, kernel2),
        out_shape=[*map(_type, sums), _type(kernel2)],
        input_output_aliases={8 + i: i for i in range(3)},
        grid=(shares, tiles),
        num_warps=4,
        num_stages=3,
        M=pixels,
        N=outputs,
        GROWTH=spec.growth_rate,
        EPSILON=spec.epsilon,
        LAST=spec.num_layers - 1,
        STACKED=z.ndim > d_hidden.ndim,
        ROWS=share,
        BM=64,
        BN=_TILE,
        STAGES=3,
        KERNEL_SHARE=_kernel_share(spec, shares * tiles),
    )
    return kernel2, (sum_dy, sum_dy_z)
