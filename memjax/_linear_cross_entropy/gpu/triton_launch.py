"""What launches the Triton kernels. Soft targets and weighted classes are left to `rows`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton
import triton
from jax.custom_batching import sequential_vmap

from memjax._core.arrays import vary, varying_axes
from memjax._core.platforms import capability_for_triton
from memjax._linear_cross_entropy.gpu import triton_kernels
from memjax._linear_cross_entropy.options import Array, Chunk, Options
from memjax._linear_cross_entropy.rows import Stats, from_sums


@dataclass(frozen=True)
class Tiles:
    """Columns a program holds at a time, warps that share them, and blocks of columns on their way to it."""

    row_block: int = 16384
    row_warps: int = 8
    stats_block: int = 2048
    stats_warps: int = 4
    stats_stages: int = 3
    gradient_block: int = 4096
    gradient_warps: int = 8


TILES = Tiles()


def _logit_constants(bias: Array | None, options: Options) -> dict[str, Any]:
    return {"HAS_BIAS": bias is not None, "SCALE": options.logit_scale, "CAP": options.softcap or 0.0}


def _stats_constants(options: Options) -> dict[str, Any]:
    return {"SUM": options.label_smoothing > 0, "AUX": options.aux}


def _gradient_constants(options: Options) -> dict[str, Any]:
    keep, spread = 1.0 - options.label_smoothing, options.label_smoothing / options.vocabulary
    return {"KEEP": keep, "SPREAD": spread, "Z_LOSS": options.z_loss}


def _block(width: int, most: int) -> int:
    return min(most, triton.next_power_of_2(width))


def _call(kernel: Any, arrays: tuple[Array, ...], out: Any, **settings: Any) -> Any:
    """Launches a kernel; under `vmap` for one example after another, since a kernel knows only rows."""
    settings["compute_capability"] = capability_for_triton()

    @sequential_vmap
    def launch(*arrays: Array) -> Any:
        return jax_triton.triton_call(*arrays, kernel=kernel, out_shape=out, **settings)

    return vary(launch(*arrays), varying_axes(*arrays))


def _row(tokens: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((tokens,), jnp.float32)


def stats(chunk: Chunk, options: Options) -> Stats:
    products, bias, labels, *_ = chunk
    tokens, width = products.shape
    maximum, total, plain, moment, label = _call(
        triton_kernels.stats_kernel,
        (products, labels if bias is None else bias, labels),
        [_row(tokens)] * 5,
        grid=(tokens,),
        num_warps=TILES.stats_warps,
        WIDTH=width,
        BLOCK=_block(width, TILES.stats_block),
        STAGES=TILES.stats_stages,
        **_logit_constants(bias, options),
        **_stats_constants(options),
    )
    return from_sums(maximum, total, plain, moment, label, options)


def gradient(chunk: Chunk, lse: Array, mass: Array | None, scale: Array, options: Options) -> Array:
    """The gradient, written over the products. Without soft targets and weights of classes `mass` is None."""
    products, bias, labels, *_ = chunk
    tokens, width = products.shape
    block = _block(width, TILES.gradient_block)
    return _call(
        triton_kernels.gradient_kernel,
        (products, labels if bias is None else bias, labels, lse, scale),
        jax.ShapeDtypeStruct(products.shape, products.dtype),
        input_output_aliases={0: 0},
        grid=(tokens, triton.cdiv(width, block)),
        num_warps=TILES.gradient_warps,
        WIDTH=width,
        BLOCK=block,
        **_logit_constants(bias, options),
        **_gradient_constants(options),
    )


def stats_and_gradient(chunk: Chunk, scale: Array, options: Options) -> tuple[Stats, Array]:
    """Row statistics and the gradient, for products that have all columns of the head. The gradient overwrites the products."""
    products, bias, labels, *_ = chunk
    tokens, width = products.shape
    block = _block(width, TILES.row_block)
    parts = triton.cdiv(width, block)
    d, maximum, total, label, plain, moment, *_ = _call(
        triton_kernels.stats_and_gradient_kernel,
        (products, labels if bias is None else bias, labels, scale),
        [
            jax.ShapeDtypeStruct(products.shape, products.dtype),
            *[_row(tokens)] * 3,
            *[jax.ShapeDtypeStruct((parts, tokens), jnp.float32)] * 2,
            jax.ShapeDtypeStruct((tokens, parts, 2), jnp.int32),
            *[jax.ShapeDtypeStruct((n,), jnp.int32) for n in (tokens, 1)],
        ],
        input_output_aliases={0: 0},
        zeroed_outputs=(7, 8),
        grid=(tokens * parts,),
        num_warps=TILES.row_warps,
        TOKENS=tokens,
        WIDTH=width,
        BLOCK=block,
        PARTS=parts,
        PADDED=triton.next_power_of_2(parts),
        **_logit_constants(bias, options),
        **_stats_constants(options),
        **_gradient_constants(options),
    )
    return from_sums(maximum, total, plain.sum(0), moment.sum(0), label, options), d
