"""Attention of some queries to some keys, with what is needed to put blocks together: the log-sum-exp of each row.

Rows are taken in chunks, so that only a chunk's products are held. Shapes, here and for every implementation: q, o and
their gradients (B, T, H, D), k, v and theirs (B, S, K, D) with H a multiple of K, log-sum-exps (B, H, T) float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memjax._core.arrays import accumulator

Array = jax.Array


@dataclass(frozen=True)
class Options:
    """Everything about one call that is known when it is traced."""

    causal: bool
    scale: float
    implementation: str
    rows: int  # at most so many rows of products at a time
    window: int | None = None
    softcap: float | None = None
    axis_name: str | None = None  # of the ring; None: one device
    layout: str = "contiguous"
    head_chunks: int = 1


class Tokens(NamedTuple):
    """What a mask needs to know of the queries or keys of a block."""

    positions: Array  # (B, T) int32, in the whole sequence
    segments: Array | None  # (B, T) int32, or float: only compared; negative for tokens that see nothing

    def part(self, start: Any, size: int) -> Tokens:
        cut = lambda a: lax.dynamic_slice_in_dim(a, start, size, 1)
        return Tokens(cut(self.positions), None if self.segments is None else cut(self.segments))


def forward(
    options: Options, q: Array, k: Array, v: Array, rows: Tokens, columns: Tokens, diagonal: bool
) -> tuple[Array, Array]:
    """(o, lse), o in float32 (float64 for float64). A row that sees nothing gives zeros and -infinity."""

    def chunk(start: Any, size: int) -> tuple[Array, Array]:
        logits = _logits(options, lax.dynamic_slice_in_dim(q, start, size, 1), k)[0]
        logits = _masked(options, logits, rows.part(start, size), columns, diagonal)
        largest = jnp.maximum(logits.max(-1, keepdims=True), jnp.finfo(logits.dtype).min)
        weights = jnp.exp(logits - largest)
        total = weights.sum(-1, keepdims=True)
        o = jnp.einsum("bkgts,bskd->bkgtd", weights.astype(v.dtype), v, preferred_element_type=logits.dtype)
        o = o / jnp.where(total == 0, 1.0, total)
        lse = jnp.where(total == 0, -jnp.inf, largest + jnp.log(total))[..., 0]
        return o.transpose(0, 3, 1, 2, 4).reshape(q.shape[0], size, *q.shape[2:]), lse.reshape(lse.shape[0], -1, size)

    size = _row_chunk(options, q.shape[1])
    if size == q.shape[1]:
        return chunk(0, size)
    o, lse = lax.map(lambda i: chunk(i * size, size), jnp.arange(q.shape[1] // size, dtype=jnp.int32))
    return jnp.moveaxis(o, 0, 1).reshape(q.shape), jnp.moveaxis(lse, 0, 2).reshape(*lse.shape[1:3], -1)


def backward(
    options: Options,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    do: Array,
    rows: Tokens,
    columns: Tokens,
    diagonal: bool,
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) in float32 of a block of an attention whose rows have outputs `o` and log-sum-exps `lse` over all blocks."""
    size = _row_chunk(options, q.shape[1])
    wide = accumulator(q.dtype)
    kv_heads = k.shape[2]

    def chunk(start: Any) -> tuple[Array, Array, Array]:
        cut = lambda a, axis=1: lax.dynamic_slice_in_dim(a, start, size, axis)
        queries, cotangent = cut(q), cut(do)
        logits, slope = _logits(options, queries, k)
        logits = _masked(options, logits, rows.part(start, size), columns, diagonal)
        group = lambda a: a.reshape(a.shape[0], kv_heads, -1, size, 1)
        log_sum = group(cut(lse, 2))
        weights = jnp.exp(logits - jnp.where(jnp.isneginf(log_sum), 0.0, log_sum))
        along = (cotangent.astype(wide) * cut(o).astype(wide)).sum(-1).transpose(0, 2, 1)
        grouped = _grouped(cotangent, kv_heads)
        products = jnp.einsum("btkgd,bskd->bkgts", grouped, v, preferred_element_type=wide)
        dlogits = weights * (products - group(along)) * options.scale
        dlogits = (dlogits if slope is None else dlogits * slope).astype(q.dtype)
        dq = jnp.einsum("bkgts,bskd->btkgd", dlogits, k, preferred_element_type=wide).reshape(queries.shape)
        dk = jnp.einsum("bkgts,btkgd->bskd", dlogits, _grouped(queries, kv_heads), preferred_element_type=wide)
        dv = jnp.einsum("bkgts,btkgd->bskd", weights.astype(q.dtype), grouped, preferred_element_type=wide)
        return dq, dk, dv

    dq, dk, dv = chunk(0)
    if size == q.shape[1]:
        return dq, dk, dv

    def step(sums: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
        dq, dk, dv = chunk(i * size)
        return (sums[0] + dk, sums[1] + dv), dq

    (dk, dv), other_dq = lax.scan(step, (dk, dv), jnp.arange(1, q.shape[1] // size, dtype=jnp.int32))
    return jnp.concatenate([dq, jnp.moveaxis(other_dq, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])], 1), dk, dv


def merge(o: Array, lse: Array, o2: Array, lse2: Array) -> tuple[Array, Array]:
    """The attention to two sets of keys from the attentions to each. Rows may have seen nothing of one or both."""
    largest = jnp.maximum(lse, lse2)
    largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
    a, b = jnp.exp(lse - largest), jnp.exp(lse2 - largest)
    total = a + b
    some = jnp.where(total == 0, 1.0, total)
    share = lambda w: (w / some).transpose(0, 2, 1)[..., None]
    return o * share(a) + o2 * share(b), jnp.where(total == 0, -jnp.inf, largest + jnp.log(some))


def _grouped(a: Array, kv_heads: int) -> Array:
    """(B, T, H, D) -> (B, T, K, H / K, D)"""
    return a.reshape(*a.shape[:2], kv_heads, -1, a.shape[-1])


def _logits(options: Options, q: Array, k: Array) -> tuple[Array, Array | None]:
    """(B, K, H / K, T, S) in float32, and their derivative in the products if there is a cap."""
    products = jnp.einsum("btkgd,bskd->bkgts", _grouped(q, k.shape[2]), k, preferred_element_type=accumulator(q.dtype))
    products = products * options.scale
    if options.softcap is None:
        return products, None
    capped = jnp.tanh(products / options.softcap)
    return options.softcap * capped, 1.0 - capped**2


def _masked(options: Options, logits: Array, rows: Tokens, columns: Tokens, diagonal: bool) -> Array:
    visible = None
    ahead = columns.positions[:, None] - rows.positions[:, :, None]
    if options.causal and diagonal:
        visible = ahead <= 0
    if options.window is not None:
        near = jnp.abs(ahead) < options.window
        visible = near if visible is None else visible & near
    if rows.segments is not None and columns.segments is not None:
        same = rows.segments[:, :, None] == columns.segments[:, None, :]
        same = same & (rows.segments >= 0)[:, :, None]
        visible = same if visible is None else visible & same
    return logits if visible is None else jnp.where(visible[:, None, None], logits, -jnp.inf)


def _row_chunk(options: Options, length: int) -> int:
    return next(size for size in range(min(options.rows, length), 0, -1) if length % size == 0)
