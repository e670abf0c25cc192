"""The two algorithms, in chunks: gradients after the losses, from logits that are recomputed; or with the sum of the losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memjax._core.arrays import accumulator, vary, varying_axes
from memjax._core.barriers import barrier, joint_barrier
from memjax._linear_cross_entropy import choice, rows
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
    scaled,
    token_chunk,
    vocabulary_chunk,
)
from memjax._linear_cross_entropy.rows import Stats, all_reduce, diagnostics, log_sum_exp, loss_share, merge

# Per-token losses in chunks of the vocabulary, the logits computed a second time for the gradient.
#
# Forward: one pass over the vocabulary folds each chunk of logits into row statistics. Only the log-sum-exp (N float32)
# is saved. Backward: a second pass recomputes the chunk, turns it into its gradient, adds its part to dx (float32)
# and writes its rows of dW, once, in the dtype of w. Four matmuls in all. For chunks of c entries of b-byte logits the
# temporaries are b N c for the chunk, 4 N D for dx, and the chunk of w and of dW (2 b c D).

_BEYOND_ALL_LOGITS = 1e30


def _local_labels(operands: Operands, options: Options) -> Array:
    """Labels counted from this device's first column."""
    if options.axis_name is None:
        return operands.labels
    return operands.labels - lax.axis_index(options.axis_name) * columns(operands, options)


def by_mosaic(operands: Operands, options: Options) -> bool:
    """Whether to use the Hopper kernels, which need no slices of the head and no chunks of logits."""
    if "mosaic" not in options.kernels:
        return False
    from memjax._linear_cross_entropy.gpu import hopper

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


def _statistics(operands: Operands, options: Options, chunk: int | None) -> Stats:
    """Row statistics over the whole vocabulary, of all devices."""
    labels = _local_labels(operands, options)
    if by_mosaic(operands, options):
        from memjax._linear_cross_entropy.gpu import hopper

        return all_reduce(hopper.statistics(operands, labels, options), options)

    def step(total: Stats | None, start: Any, size: int) -> Stats:
        _, chunk = _chunk(operands, labels, start, size, options)
        new = vary(_chunk_stats(chunk, options), varying_axes(operands.x))
        return new if total is None else merge(total, new)

    size = vocabulary_chunk(operands, options, chunk)
    return all_reduce(for_chunks(step, None, columns(operands, options), size), options)


def _result(total: Stats, options: Options) -> Result:
    return Result(loss_share(total, options), log_sum_exp(total), *diagnostics(total))


def token_losses(operands: Operands, options: Options) -> tuple[Result, Array | None]:
    """The result, and the mass of the targets where it is not 1."""
    total = _statistics(operands, options, options.chunk)
    return _result(total, options), total.mass


def gradients(
    operands: Operands, lse: Array, mass: Array | None, cotangent: Array, options: Options, wanted: frozenset[str]
) -> dict[str, Array]:
    """Gradients, of those of "x", "w" and "bias" that are wanted, of sum(cotangent * losses)."""
    # Logits that both passes compute would be merged, and kept from one to the other.
    x, cotangent = joint_barrier((operands.x, cotangent))
    # 0 times NaN is NaN: tokens without a gradient are left out of the products.
    x = jnp.where(cotangent[:, None] == 0, 0, x)
    operands = operands._replace(x=x)
    labels = _local_labels(operands, options)
    # Such that their softmax is 0: kernels multiply it by the cotangent.
    lse = jnp.where(cotangent == 0, _BEYOND_ALL_LOGITS, lse)
    w = operands.w
    sums = accumulator(x.dtype)
    axes = varying_axes(x)
    size = vocabulary_chunk(operands, options, options.chunk)
    mosaic = by_mosaic(operands, options)
    if mosaic:
        from memjax._linear_cross_entropy.gpu import hopper

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
            d = _chunk_gradient(chunk, lse, mass, cotangent, options)
        new = dict(carry)
        if "x" in wanted:
            dx = matmul("nv,vd->nd", d, w_chunk, options, sums)
            new["x"] = carry["x"] + dx if "x" in carry else dx
            # The chunk's rows of w are let go of before those of dW are made.
            d, new["x"] = joint_barrier((d, new["x"]))
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


# The sum of scaled losses in chunks of tokens, its gradients computed in the forward pass.
#
# The cotangent of a sum is one number, so the gradients are known up to that factor as soon as a chunk's logits are
# (mgmalek, "Memory-efficient cross entropy loss"): compute the logits, overwrite them with their gradient, add to dW in
# float32, forget them. Three matmuls. Saved between forward and backward: dx and dW in the dtypes of x and w. For
# chunks of c tokens and b-byte logits the temporaries are b c V and, unless w is itself float32 or one chunk has all tokens,
# 4 D V for dW.


def total_loss(operands: Operands, options: Options) -> Result:
    """The value alone. It takes chunks of the vocabulary, which are smaller than chunks of tokens, and as fast."""
    assert operands.scale is not None
    found = _result(_statistics(operands, options, None), options)
    return found._replace(loss=scaled(operands.scale, found.loss).sum())


def loss_and_gradients(operands: Operands, options: Options, wanted: frozenset[str]) -> tuple[Result, dict[str, Array]]:
    """The result, with a loss per token, and the gradients of the scaled sum, of those wanted."""
    x, w, bias, _, targets, scale, class_weights = operands
    assert scale is not None
    sums = accumulator(x.dtype)
    axes = varying_axes(x)
    labels = _local_labels(operands, options)
    size = token_chunk(operands, options)
    norm, relative = _relative(scale) if x.dtype == jnp.float16 else (None, scale)
    # A product is rounded as it is made where nothing multiplies it and, of dW, no other chunk adds to it.
    of_x, of_w = (x.dtype, w.dtype if size >= x.shape[0] else sums) if norm is None else (sums, sums)

    def step(carry: dict[str, Any], start: Any, size: int) -> dict[str, Any]:
        part: Callable[[Any], Any] = lambda a: None if a is None else lax.dynamic_slice_in_dim(a, start, size)
        # A copy of its own: products that read x itself could run after dx is written there, so XLA would copy all of x.
        x_chunk = barrier(part(carry.get("x", x)))
        weight = part(relative)
        products = matmul("nd,vd->nv", x_chunk, w, options, x.dtype)
        chunk = Chunk(products, bias, part(labels), part(targets), class_weights)
        total, d = _chunk_stats_and_gradient(chunk, weight, options)

        def put(buffer: Array, value: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(buffer, vary(value.astype(buffer.dtype), axes), start, 0)

        new: dict[str, Any] = {"rows": jax.tree.map(put, carry["rows"], _result(total, options))}
        if "x" in wanted:
            dx = matmul("nv,vd->nd", d, w, options, of_x)
            new["x"] = put(carry["x"], dx if norm is None else dx * norm)
        if "w" in wanted:
            # Float32 whatever the dtype of w: rounding every partial sum would cost more with every chunk.
            # 0 times NaN is NaN: tokens without a gradient are left out of the product.
            counted = jnp.where(weight[:, None] == 0, 0, x_chunk)
            dw = head_gradient(d, counted, options, of_w)
            new["w"] = carry["w"] + dw if "w" in carry else dw
        if "bias" in wanted:
            db = d.sum(0, dtype=sums)
            new["bias"] = carry["bias"] + db if "bias" in carry else db
        return new

    def rows_buffer() -> Array:
        return vary(jnp.zeros(x.shape[:1], sums), axes)

    carry: dict[str, Any] = {
        "rows": Result(rows_buffer(), rows_buffer(), *((rows_buffer() if options.aux else None) for _ in "ce"))
    }
    if "x" in wanted:
        # dx is written over x, chunk by chunk: where x is not needed any more it takes no memory of its own.
        carry["x"] = x
    # The first chunk starts dW instead of adding to zeros: 4 D V bytes less to write.
    carry = for_chunks(step, carry, x.shape[0], size)
    rows = carry.pop("rows")
    for name in {"w", "bias"} & carry.keys():
        carry[name] = carry[name] if norm is None else carry[name] * norm
    if "w" in wanted:
        carry["w"] = carry["w"].astype(_saved(w.dtype))
    return rows, carry


def _relative(scale: Array) -> tuple[Array, Array]:
    """The largest scale, and the scales relative to it. 1 / N does not fit beside float16's gradients: it comes at the end."""
    norm = jnp.abs(scale).max()
    return norm, scale / jnp.where(norm == 0, 1.0, norm)


def _saved(dtype: Any) -> Any:
    """The dtype that a gradient is saved in. A loss scale comes with the cotangent, too late for float16's range."""
    return jnp.float32 if dtype == jnp.float16 else dtype


# Statistics and gradients of a chunk of products: by Triton kernels where they apply, else by `rows`.


def _kernels(chunk: Chunk, options: Options) -> Any:
    """The module of the Triton kernels, or None where they do not apply."""
    if "triton" not in options.kernels or chunk.targets is not None or chunk.class_weights is not None:
        return None
    from memjax._linear_cross_entropy.gpu import triton_launch

    return triton_launch


def _chunk_stats(chunk: Chunk, options: Options) -> Stats:
    return (_kernels(chunk, options) or rows).stats(chunk, options)


def _chunk_gradient(chunk: Chunk, lse: Array, mass: Array | None, scale: Array, options: Options) -> Array:
    """The gradient, written over the products where a kernel does it."""
    return (_kernels(chunk, options) or rows).gradient(chunk, lse, mass, scale, options)


def _chunk_stats_and_gradient(chunk: Chunk, scale: Array, options: Options) -> tuple[Stats, Array]:
    """Statistics of all devices, and the gradient, for products that hold every column of this device."""
    kernels = _kernels(chunk, options)
    if kernels is not None and options.axis_name is None:
        return kernels.stats_and_gradient(chunk, scale, options)
    total = all_reduce(_chunk_stats(chunk, options), options)
    return total, _chunk_gradient(chunk, log_sum_exp(total), total.mass, scale, options)
