"""`metp_attention`: softmax(scale q k^T) v over a ring of devices, round which keys and values travel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from memjax._attention import block as blocks
from memjax._attention import choice
from memjax._attention.block import Options, Tokens
from memjax._core import check as _check
from memjax._core.arrays import accumulator, vary, varying_axes
from memjax._core.backward.derivatives import forward_mode_message, refusing_forward_mode
from memjax._core.barriers import joint_barrier
from memjax.shard import ring
from memjax.shard._layout import attention_options, check_attention, positions

Array = jax.Array
_FORWARD_MODE = forward_mode_message("memjax.shard.metp_attention")
_FEW_ROWS = 128


def metp_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t k d"],
    v: Float[Array, "b t k d"],
    *,
    axis_name: str,
    causal: bool = False,
    layout: str = "zigzag",
    segment_ids: Int[Array, "b t"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    head_chunks: int = 1,
    implementation: str | None = None,
) -> Float[Array, "b t h d"]:
    """`softmax(scale q k^T) v` of a sequence spread over the p devices of a ring: METP with f = softmax.

    Queries and outputs stay. Keys and values travel, in one message a hop behind the attention to a block; what is seen
    so far is a float32 output with the log-sum-exp of its rows, merged block by block. The backward pass circulates keys
    and values again, their gradients travelling along. Grouped key-value heads travel as they are.

    Args:
      q: (B, T, H, D), this device's T = S / p tokens.
      k, v: (B, T, K, D), with K a divisor of H.
      axis_name: the axis of `jax.shard_map` that is the ring.
      causal: tokens see only themselves and what is before them in the whole sequence.
      layout: how the sequence lies on the ring. "zigzag": reordered by `memjax.shard.zigzag`, T even; under a causal mask
        all devices then have the same work. "contiguous": device r holds tokens r T to (r + 1) T; under a causal mask the
        first device waits for the last most of the time.
      segment_ids: (B, T) integers; tokens see only those of their own id. Those with a negative one (padding) see nothing,
        are not seen, and may hold anything.
      window: tokens see only keys less than so many positions away.
      scale: of the products; by default 1 / sqrt(D).
      softcap: products become `softcap * tanh(products / softcap)`.
      head_chunks: the heads go round the ring in so many groups, one after another: buffers and sums shrink by this
        factor, messages too.
      implementation: of the attention to one block.
        - "cudnn": flash attention with a float32 log-sum-exp, on GPUs, for bfloat16 and float16 without segment ids,
          window and softcap.
        - "jnp": plain products for some rows at a time: at most T / p or 128 of them. So of the S x S products of a head
          a device holds T/p x T at a time: 1/p^3.
        - None: the first that can.

    Returns:
      (B, T, H, D) of q's dtype. Rows that see nothing are zero, and have no gradient.

    Saved for the backward pass: q, k, v, the output, and B H T float32. Temporaries for k bytes an item, with
    N = B T D: forward 4 N H + 6 k N K, backward 4 N H + 6 (k + 4) N K, with a causal mask in zigzag order at most
    k N (H + 2 K) and k N (3 H + 2 K) more for halves side by side, the whole divided by `head_chunks`, and the block's own
    ("jnp": some times 4 B H T max(T/p, 128) / head_chunks). Traffic per device: 2 k (p-1) N K bytes forward, 8 (p-1) N K more
    backward.

    Raises:
      TypeError: dtypes that differ or are not floating-point, options of the wrong kind.
      ValueError: shapes that do not match or divide, options out of range, an implementation that cannot run here, q, k, v
        or segment ids that are the same on all devices (where `shard_map` tracks it: not with `check_vma=False`), or a call
        outside a `jax.shard_map` over `axis_name`.

    Not checked: that it is the tokens which lie over the axis. Inside `shard_map` JAX does not tell along which dimension an
    array was split. Where q, k and v are all split by heads, `P(None, None, axis_name)`, results are wrong: T p must be the
    length of the sequence. Heads of one's own need no ring; `jax.nn.dot_product_attention` does them.

    Source: Liang et al. (2025), abstract; Liu et al., "Ring attention with blockwise Transformers" (2023); the zigzag
    order is that of Zhu's ring-flash-attention.
    """
    size = _check.axis_size("axis_name", axis_name)
    choices = attention_options(
        causal=causal,
        layout=layout,
        window=window,
        scale=scale,
        softcap=softcap,
        head_chunks=head_chunks,
        implementation=implementation,
    )
    check_attention(q, k, v, segment_ids, choices["layout"], choices["head_chunks"])
    for name, a in (("q", q), ("k", k), ("v", v), ("segment_ids", segment_ids)):
        if a is not None:
            _check.sharded(name, a, axis_name, "its tokens, axis 1")
    rows = max(q.shape[1] // size, _FEW_ROWS) if size > 1 else 4 * _FEW_ROWS
    return _of_tokens(axis_name, rows, choices, q, k, v, segment_ids)


def attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    *,
    causal: bool = False,
    segment_ids: Int[Array, "b s"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "b s h d"]:
    """Attention of a whole sequence on one device, through the kernels of `metp_attention` and with its options."""
    choices = attention_options(
        causal=causal, layout="contiguous", window=window, scale=scale, softcap=softcap, implementation=implementation
    )
    check_attention(q, k, v, segment_ids, choices["layout"], choices["head_chunks"])
    return _of_tokens(None, 4 * _FEW_ROWS, choices, q, k, v, segment_ids)


def _of_tokens(
    axis_name: str | None, rows: int, choices: dict[str, Any], q: Array, k: Array, v: Array, segment_ids: Array | None
) -> Array:
    if choices["scale"] is None:
        choices["scale"] = q.shape[-1] ** -0.5
    choices["implementation"] = choice.implementation(
        choices["implementation"], q, segment_ids, choices["window"], choices["softcap"]
    )
    if segment_ids is not None:
        # Padding may hold anything, and 0 times NaN is NaN.
        seen = (segment_ids >= 0)[:, :, None, None]
        q, k, v = (jnp.where(seen, a, 0) for a in (q, k, v))
    operands = (q, k, v, segment_ids)
    attend = partial(_attention, Options(axis_name=axis_name, rows=rows, **choices))
    operands = vary(operands, varying_axes(*jax.tree.leaves(operands)))
    return refusing_forward_mode(attend, _FORWARD_MODE)(*operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: Options, q: Array, k: Array, v: Array, segments: Array | None) -> Array:
    return _forward(options, q, k, v, segments)[0]


def _forward(options: Options, q: Array, k: Array, v: Array, segments: Array | None) -> tuple[Array, Any]:
    def group(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        o, lse = _ring_forward(options, q, k, v, segments)
        return o.astype(q.dtype), lse

    lse = vary(jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), accumulator(q.dtype)), varying_axes(q))
    o, lse = _by_head_groups(options, group, (q, k, v), (q, lse))
    return o, (q, k, v, segments, o, lse)


def _backward(options: Options, saved: Any, do: Array) -> tuple[Array, Array, Array, None]:
    # Nothing is recomputed before the cotangent is there.
    (q, k, v, segments, o, lse), do = joint_barrier((saved, do))

    def group(q: Array, k: Array, v: Array, o: Array, do: Array, lse: Array) -> tuple[Array, ...]:
        return _ring_backward(options, q, k, v, segments, o, lse, do)

    dq, dk, dv = _by_head_groups(options, group, (q, k, v, o, do, lse), (q, k, v))
    return dq, dk, dv, None


_attention.defvjp(_forward, _backward)


def _by_head_groups(
    options: Options, f: Callable[..., tuple[Array, ...]], arrays: tuple[Array, ...], outs: tuple[Array, ...]
) -> tuple[Array, ...]:
    """`f` on one group of heads after another: axis 2 of arrays with 4 dimensions, 1 of those with 3.

    The results are written over arrays of their shapes, `outs`. Stacked they would be kept beside what is made of them, and
    zeros to write to would be made early and held.
    """
    count = options.head_chunks
    if count == 1:
        return f(*arrays)

    def step(outs: tuple[Array, ...], i: Array) -> tuple[tuple[Array, ...], None]:
        parts = f(*(_part(a, i, count, a.ndim - 2) for a in arrays))
        return tuple(_replaced(a, part, i, a.ndim - 2) for a, part in zip(outs, parts, strict=True)), None

    return lax.scan(step, outs, jnp.arange(count, dtype=jnp.int32))[0]


def _part(a: Array, index: Any, count: int, axis: int) -> Array:
    size = a.shape[axis] // count
    return lax.dynamic_slice_in_dim(a, index * size, size, axis)


def _ring_forward(options: Options, q: Array, k: Array, v: Array, segments: Array | None) -> tuple[Array, Array]:
    where = _Where(options, q, segments)

    def body(carry: Any, block: Any, step: Any) -> Any:
        (k, v), seen = block
        columns = where.source(step, seen)
        attend = partial(choice.kernels(options.implementation).forward, options)
        if carry is None:  # this device's own block
            return attend(q, k, v, where.rows, columns, True)
        o, lse = carry
        if not options.causal:
            return blocks.merge(o, lse, *attend(q, k, v, where.rows, columns, False))
        behind = step <= where.rank
        if options.layout == "contiguous":
            visible = lambda: blocks.merge(o, lse, *attend(q, k, v, where.rows, columns, False))
            return lax.cond(behind, visible, lambda: carry)
        halves = _Halves(behind)
        new, lse_new = attend(
            halves.rows(q), *halves.keys((k, v)), halves.rows(where.rows), halves.keys(columns), False
        )
        for half, o_half, lse_half in zip(halves.of_rows, jnp.split(new, 2), jnp.split(lse_new, 2), strict=True):
            merged = blocks.merge(_part(o, half, 2, 1), _part(lse, half, 2, 2), o_half, lse_half)
            o, lse = _replaced(o, merged[0], half, 1), _replaced(lse, merged[1], half, 2)
        return o, lse

    return ring.scan(body, ((k, v), segments), None, axis_name=options.axis_name)


def _ring_backward(
    options: Options, q: Array, k: Array, v: Array, segments: Array | None, o: Array, lse: Array, do: Array
) -> tuple[Array, Array, Array]:
    where = _Where(options, q, segments)

    def body(dq: Any, block: Any, step: Any) -> tuple[Any, Any]:
        (k, v), seen = block
        columns = where.source(step, seen)
        gradients = partial(choice.kernels(options.implementation).backward, options)

        def whole() -> tuple[Any, Any]:
            diagonal = isinstance(step, int) and step == 0
            dq_block, dk, dv = gradients(q, k, v, o, lse, do, where.rows, columns, diagonal)
            return dq + dq_block, (dk, dv)

        if not options.causal or (isinstance(step, int) and step == 0):
            return whole()
        behind = step <= where.rank
        if options.layout == "contiguous":
            return lax.cond(behind, whole, lambda: (dq, (jnp.zeros_like(k, dq.dtype), jnp.zeros_like(v, dq.dtype))))
        halves = _Halves(behind)
        arrays = halves.rows(q), *halves.keys((k, v)), halves.rows(o), halves.rows(lse, 2), halves.rows(do)
        dq_halves, dk, dv = gradients(*arrays, halves.rows(where.rows), halves.keys(columns), False)
        for half, dq_half in zip(halves.of_rows, jnp.split(dq_halves, 2), strict=True):
            dq = _replaced(dq, _part(dq, half, 2, 1) + dq_half, half, 1)
        return dq, (halves.sum_of_keys(dk), halves.sum_of_keys(dv))

    dq = vary(jnp.zeros(q.shape, accumulator(q.dtype)), varying_axes(q, k, v))
    dq, (dk, dv) = ring.collect(body, ((k, v), segments), dq, axis_name=options.axis_name, dtype=q.dtype)
    return dq.astype(q.dtype), dk[0], dv[0]


class _Where:
    """Positions in the sequence of this device's tokens, and of those in the blocks that arrive."""

    def __init__(self, options: Options, q: Array, segments: Array | None):
        self._options, self._shape = options, q.shape[:2]
        name = options.axis_name
        self._size: int = 1 if name is None else lax.axis_size(name)
        self.rank: Any = 0 if name is None else lax.axis_index(name)
        self.rows = self.source(0, segments)

    def source(self, step: Any, segments: Array | None) -> Tokens:
        """The tokens of the device whose block is here at `step`."""
        rank = (self.rank - step) % self._size
        where = positions(self._shape[1], rank, self._size, self._options.layout)
        return Tokens(jnp.broadcast_to(where, self._shape), segments)


class _Halves:
    """The halves of this device's rows and of another device's keys that see one another under a causal mask, in zigzag order.

    The later half of the rows sees the earlier half of the keys. If the other device is behind on the ring, the earlier rows
    see that half too; if not, the later rows see the later keys as well. Either way these are two pairs of halves, wholly
    visible. They lie side by side in the batch. So every device does the same at every step, without a branch, for which a GPU
    would wait for the host; and the product is twice as large as one of half the rows, which would keep few multiprocessors busy.
    """

    def __init__(self, behind: Array):
        self._behind = behind
        self.of_rows: tuple[Any, Any] = jnp.where(behind, 0, 1).astype(jnp.int32), 1

    def rows(self, tree: Any, axis: int = 1) -> Any:
        """(B, T, ...) -> (2 B, T / 2, ...)"""
        earlier = self._behind & (jnp.arange(2) == 0)
        return jax.tree.map(lambda a: self._pairs(earlier, a, axis), tree)

    def keys(self, tree: Any) -> Any:
        """(B, T, ...) -> (2 B, T / 2, ...)"""
        earlier = self._behind | (jnp.arange(2) == 1)
        return jax.tree.map(lambda a: self._pairs(earlier, a, 1), tree)

    def sum_of_keys(self, d: Array) -> Array:
        """(2 B, T / 2, ...) -> (B, T, ...)"""
        varying, fixed = jnp.split(d, 2)
        none = jnp.zeros_like(varying)
        earlier, later = jnp.where(self._behind, varying, none), jnp.where(self._behind, none, varying)
        return jnp.concatenate([earlier + fixed, later], 1)

    def _pairs(self, earlier: Array, a: Array, axis: int) -> Array:
        pairs = _selected(earlier, *jnp.split(a, 2, axis))
        return pairs.reshape(-1, *pairs.shape[2:])


def _selected(first: Array, a: Array, b: Array) -> Array:
    """Stacks, for each entry of `first`, a or b, in one kernel.

    Concatenations, and slices at computed places, are copied by XLA at a third of the memory's speed.
    """
    return jnp.where(first.reshape(-1, *[1] * a.ndim), a, b)


def _replaced(a: Array, new: Array, index: Any, axis: int) -> Array:
    """`a` with `new` in place of a part. This is not `a.at[part].set(new)`, which is a scatter."""
    return lax.dynamic_update_slice_in_dim(a, new, index * new.shape[axis], axis)
