"""Per-token losses in chunks of the vocabulary, the logits computed a second time for the gradient.

Forward: one pass over the vocabulary folds each chunk of logits into row statistics. Only the log-sum-exp (N float32)
is saved. Backward: a second pass computes the chunk again, turns it into its gradient, adds its part to dx
(float32) and writes its rows of dW, once, in the dtype of w. Four matmuls in all. For chunks of c entries of
b-byte logits the temporaries are b N c for the chunk, 4 N D for dx, and the chunk of w and of dW (2 b c D).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from memjax._core.arrays import accumulator, vary, varying_axes
from memjax._linear_cross_entropy import choice, chunks
from memjax._linear_cross_entropy.options import (
    Array,
    Chunk,
    Operands,
    Options,
    Result,
    columns,
    for_chunks,
    head_columns,
    head_gradient,
    matmul,
    vocabulary_chunk,
)
from memjax._linear_cross_entropy.rows import Stats, all_reduce, diagnostics, log_sum_exp, loss_share, merge

_BEYOND_ALL_LOGITS = 1e30


def local_labels(operands: Operands, options: Options) -> Array:
    """Labels counted from this device's first column."""
    if options.axis_name is None:
        return operands.labels
    return operands.labels - lax.axis_index(options.axis_name) * columns(operands, options)


def by_mosaic(operands: Operands, options: Options) -> bool:
    """Whether to use the Hopper kernels, which need no slices of the head and no chunks of logits."""
    if "mosaic" not in options.kernels:
        return False
    from memjax._linear_cross_entropy.mosaic import hopper

    if hopper.unsuited(operands, options) is not None:
        return False
    return "triton" not in options.kernels or choice.mosaic_is_faster(operands, options)


def _chunk(operands: Operands, labels: Array, start: Any, size: int, options: Options) -> tuple[Array, Chunk]:
    """The columns of the head from `start` on, and the chunk that they make."""
    w = head_columns(operands.w, start, size, options)
    products = matmul("nd,vd->nv", operands.x, w, options, operands.x.dtype)
    part = lambda a, axis=0: None if a is None else lax.dynamic_slice_in_dim(a, start, size, axis)
    targets, class_weights = part(operands.targets, 1), part(operands.class_weights)
    return w, Chunk(products, part(operands.bias), labels - start, targets, class_weights)


def statistics(operands: Operands, options: Options, chunk: int | None) -> Stats:
    """Row statistics over the whole vocabulary, of all devices."""
    labels = local_labels(operands, options)
    if by_mosaic(operands, options):
        from memjax._linear_cross_entropy.mosaic import hopper

        return all_reduce(hopper.statistics(operands, labels, options), options)

    def step(total: Stats | None, start: Any, size: int) -> Stats:
        _, chunk = _chunk(operands, labels, start, size, options)
        new = vary(chunks.stats(chunk, options), varying_axes(operands.x))
        return new if total is None else merge(total, new)

    size = vocabulary_chunk(operands, options, chunk)
    return all_reduce(for_chunks(step, None, columns(operands, options), size), options)


def result(total: Stats, options: Options) -> Result:
    return Result(loss_share(total, options), log_sum_exp(total), *diagnostics(total))


def token_losses(operands: Operands, options: Options) -> tuple[Result, Array | None]:
    """The result, and the mass of the targets where it is not 1."""
    total = statistics(operands, options, options.chunk)
    return result(total, options), total.mass


def gradients(
    operands: Operands, lse: Array, mass: Array | None, cotangent: Array, options: Options, wanted: frozenset[str]
) -> dict[str, Array]:
    """Gradients, of those of "x", "w" and "bias" that are wanted, of sum(cotangent * losses)."""
    # Logits that both passes compute would be merged, and kept from one to the other.
    x, cotangent = lax.optimization_barrier((operands.x, cotangent))
    # 0 times NaN is NaN: tokens without a gradient are left out of the products.
    x = jnp.where(cotangent[:, None] == 0, 0, x)
    operands = operands._replace(x=x)
    labels = local_labels(operands, options)
    # Such that their softmax is 0: kernels multiply it by the cotangent.
    lse = jnp.where(cotangent == 0, _BEYOND_ALL_LOGITS, lse)
    w = operands.w
    sums = accumulator(x.dtype)
    axes = varying_axes(x)
    size = vocabulary_chunk(operands, options, options.chunk)
    mosaic = by_mosaic(operands, options)
    if mosaic:
        from memjax._linear_cross_entropy.mosaic import hopper

        if not axes:
            return hopper.gradients(operands, labels, lse, cotangent, options, wanted)
        size = hopper.vocabulary_chunk(operands, options)
    vocabulary_axis = options.layout.index("v")

    def step(carry: dict[str, Array], start: Any, size: int) -> dict[str, Array]:
        if mosaic:
            w_chunk = head_columns(w, start, size, options)
            d = hopper.logit_gradient(operands, labels, lse, cotangent, start, size, options)
        else:
            w_chunk, chunk = _chunk(operands, labels, start, size, options)
            d = chunks.gradient(chunk, lse, mass, cotangent, options)
        new = dict(carry)
        if "x" in wanted:
            dx = matmul("nv,vd->nd", d, w_chunk, options, sums)
            new["x"] = carry["x"] + dx if "x" in carry else dx
            # The chunk's rows of w are let go of before those of dW are made.
            d, new["x"] = lax.optimization_barrier((d, new["x"]))
        if "w" in wanted:
            dw = head_gradient(d, x, options, w.dtype)
            new["w"] = lax.dynamic_update_slice_in_dim(carry["w"], dw, start, vocabulary_axis)
        if "bias" in wanted:
            db = d.sum(0, dtype=sums).astype(carry["bias"].dtype)
            new["bias"] = lax.dynamic_update_slice_in_dim(carry["bias"], db, start, 0)
        return new

    carry = {}
    if "w" in wanted:
        carry["w"] = vary(lax.empty(w.shape, w.dtype), axes)
    if "bias" in wanted and operands.bias is not None:
        carry["bias"] = vary(jnp.zeros_like(operands.bias), axes)
    grads = for_chunks(step, carry, columns(operands, options), size)
    if "x" in wanted:
        grads["x"] = grads["x"].astype(x.dtype)
    return grads
