"""The sum of scaled losses in chunks of tokens, its gradients computed in the forward pass.

The cotangent of a sum is one number, so the gradients are known up to that factor as soon as a chunk's logits
are (mgmalek, "Memory-efficient cross entropy loss"): compute the logits, overwrite them with their gradient,
add to dW in float32, forget them. Three matmuls. Saved between forward and backward: dx and dW in the dtypes
of x and w. For chunks of c tokens and b-byte logits the temporaries are b c V and, unless w is itself
float32, 4 D V for dW.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memjax._core.arrays import accumulator, vary, varying_axes
from memjax._linear_cross_entropy import chunks
from memjax._linear_cross_entropy.options import (
    Array,
    Chunk,
    Operands,
    Options,
    Result,
    for_chunks,
    head_gradient,
    matmul,
    scaled,
    token_chunk,
)
from memjax._linear_cross_entropy.recompute import local_labels, result, statistics


def total_loss(operands: Operands, options: Options) -> Result:
    """The value alone. It takes chunks of the vocabulary, which are smaller than chunks of tokens, and as fast."""
    assert operands.scale is not None
    rows = result(statistics(operands, options, None), options)
    return rows._replace(loss=scaled(operands.scale, rows.loss).sum())


def loss_and_gradients(operands: Operands, options: Options, wanted: frozenset[str]) -> tuple[Result, dict[str, Array]]:
    """The result, with a loss per token, and the gradients of the scaled sum, of those wanted."""
    x, w, bias, _, targets, scale, class_weights = operands
    assert scale is not None
    sums = accumulator(x.dtype)
    axes = varying_axes(x)
    labels = local_labels(operands, options)
    # Gradients are kept relative to the largest scale until the end: 1 / N does not fit beside them in
    # float16.
    norm = jnp.abs(scale).max()
    relative = scale / jnp.where(norm == 0, 1.0, norm)

    def step(carry: dict[str, Any], start: Any, size: int) -> dict[str, Any]:
        part: Callable[[Any], Any] = lambda a: None if a is None else lax.dynamic_slice_in_dim(a, start, size)
        # A copy of its own: products that read x itself could run after dx is written there, so XLA would copy all of x.
        x_chunk = lax.optimization_barrier(part(carry.get("x", x)))
        weight = part(relative)
        products = matmul("nd,vd->nv", x_chunk, w, options, x.dtype)
        chunk = Chunk(products, bias, part(labels), part(targets), class_weights)
        total, d = chunks.stats_and_gradient(chunk, weight, options)

        def put(buffer: Array, value: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(buffer, vary(value.astype(buffer.dtype), axes), start, 0)

        new: dict[str, Any] = {"rows": jax.tree.map(put, carry["rows"], result(total, options))}
        if "x" in wanted:
            dx = matmul("nv,vd->nd", d, w, options, sums) * norm
            new["x"] = put(carry["x"], dx)
        if "w" in wanted:
            # Float32 whatever the dtype of w: rounding every partial sum would cost more with every chunk.
            # 0 times NaN is NaN: tokens without a gradient are left out of the product.
            counted = jnp.where(weight[:, None] == 0, 0, x_chunk)
            dw = head_gradient(d, counted, options, sums)
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
    carry = for_chunks(step, carry, x.shape[0], token_chunk(operands, options))
    rows = carry.pop("rows")
    if "w" in wanted:
        carry["w"] = (carry["w"] * norm).astype(_saved(w.dtype))
    if "bias" in wanted:
        carry["bias"] = carry["bias"] * norm
    return rows, carry


def _saved(dtype: Any) -> Any:
    """The dtype that a gradient is saved in. A loss scale comes with the cotangent, too late for float16's range."""
    return jnp.float32 if dtype == jnp.float16 else dtype
