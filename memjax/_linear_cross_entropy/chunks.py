"""Statistics and gradients of a chunk of products: by Triton kernels where they apply, else by `rows`."""

from __future__ import annotations

from typing import Any

from memjax._linear_cross_entropy import rows
from memjax._linear_cross_entropy.options import Array, Chunk, Options
from memjax._linear_cross_entropy.rows import Stats


def _kernels(chunk: Chunk, options: Options) -> Any:
    """The module of the Triton kernels, or None where they do not apply."""
    if "triton" not in options.kernels or chunk.targets is not None or chunk.class_weights is not None:
        return None
    from memjax._linear_cross_entropy.triton import launch

    return launch


def stats(chunk: Chunk, options: Options) -> Stats:
    return (_kernels(chunk, options) or rows).stats(chunk, options)


def gradient(chunk: Chunk, lse: Array, mass: Array | None, scale: Array, options: Options) -> Array:
    """The gradient, written over the products where a kernel does it."""
    return (_kernels(chunk, options) or rows).gradient(chunk, lse, mass, scale, options)


def stats_and_gradient(chunk: Chunk, scale: Array, options: Options) -> tuple[Stats, Array]:
    """Statistics of all devices, and the gradient, for products that hold every column of this device."""
    kernels = _kernels(chunk, options)
    if kernels is not None and options.axis_name is None:
        return kernels.stats_and_gradient(chunk, scale, options)
    total = rows.all_reduce(stats(chunk, options), options)
    return total, gradient(chunk, rows.log_sum_exp(total), total.mass, scale, options)
