"""NNX modules whose parameters are spread over a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import lax

from memjax.shard import baselines, ring
from memjax.shard._attention import metp_attention
from memjax.shard._layout import positions
from memjax.shard._metp import metp_mlp

Array = jax.Array
_normal = nnx.initializers.lecun_normal()


class MetpMlp(nnx.Module):
    """A feed-forward layer, called inside `jax.shard_map` with this device's tokens and blocks of weights.

    Parameters, whole as the module makes them: `w_in` and, if gated, `w_gate` (dim, hidden), to be sharded by columns;
    `w_out` (hidden, dim), by rows. See `metp_mlp` for what is saved.

    Args:
      activation: elementwise; with `gated=True` of the gate, so SwiGLU is `jax.nn.silu` with a gate.
      recompute: see `metp_mlp`.
      axis_name: the mesh axis that is the ring.
      dtype: of computation; None: that of the input.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: Callable[[Array], Array] = jax.nn.gelu,
        gated: bool = False,
        recompute: bool = True,
        axis_name: str = "ring",
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        self.w_in = nnx.Param(_normal(rngs.params(), (dim, hidden)))
        self.w_gate = nnx.Param(_normal(rngs.params(), (dim, hidden))) if gated else nnx.data(None)
        self.w_out = nnx.Param(_normal(rngs.params(), (hidden, dim)))
        self._activation, self._recompute = activation, recompute
        self._axis_name, self._dtype = axis_name, dtype

    def __call__(self, x: Array) -> Array:
        """(..., t, dim), this device's tokens."""
        dtype = x.dtype if self._dtype is None else self._dtype
        w_gate = None if self.w_gate is None else self.w_gate[...].astype(dtype)
        return metp_mlp(
            x.astype(dtype),
            self.w_in[...].astype(dtype),
            self.w_out[...].astype(dtype),
            activation=self._activation,
            w_gate=w_gate,
            recompute=self._recompute,
            axis_name=self._axis_name,
        )


class MetpAttention(nnx.Module):
    """Self-attention, called inside `jax.shard_map` with this device's tokens and blocks of weights.

    Parameters, whole as the module makes them: `query` (dim, heads * head_dim), `key` and `value` (dim, kv_heads * head_dim),
    to be sharded by columns; `out` (heads * head_dim, dim), by rows. They are gathered for their matmuls, in both passes.

    Args:
      kv_heads: by default as many as heads.
      head_dim: by default dim / heads.
      rotate: applied to queries and keys, (B, t, heads, head_dim) and their positions: none by default.
      dropout_rate: must be 0. A block's weights are never held and are computed again in the backward pass on other
        devices; cuDNN's dropout could not be repeated there.
      options: of `metp_attention`: causal, layout, window, softcap, head_chunks and the others.

    Raises:
      ValueError: dropout, or heads that do not divide.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        rotate: Callable[[Array, Array], Array] | None = None,
        dropout_rate: float = 0.0,
        axis_name: str = "ring",
        dtype: Any = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        if dropout_rate:
            raise ValueError(
                f"dropout_rate: expected 0, got {dropout_rate}: attention over a ring computes its weights again in the"
                " backward pass, where the same dropout cannot be drawn; put dropout after the attention"
            )
        if head_dim is None and dim % heads:
            raise ValueError(f"heads: expected a divisor of dim = {dim}, got {heads}; or give head_dim")
        self._head_dim = dim // heads if head_dim is None else head_dim
        width, kv_width = heads * self._head_dim, (kv_heads or heads) * self._head_dim
        make = lambda *shape: nnx.Param(_normal(rngs.params(), shape))
        self.query, self.key, self.value = make(dim, width), make(dim, kv_width), make(dim, kv_width)
        self.out = make(width, dim)
        self._rotate, self._axis_name, self._dtype = rotate, axis_name, dtype
        self._layout, self._options = options.pop("layout", "zigzag"), tuple(options.items())

    def __call__(self, x: Array, segment_ids: Array | None = None) -> Array:
        """(B, t, dim) and (B, t), this device's tokens in the layout."""
        size = ring.axis_size(self._axis_name)
        x = x.astype(x.dtype if self._dtype is None else self._dtype)
        heads = lambda a: a.reshape(*a.shape[:2], -1, self._head_dim)
        q, k, v = (heads(self._product(x, w, 1)) for w in (self.query, self.key, self.value))
        if self._rotate is not None:
            where = positions(x.shape[1], lax.axis_index(self._axis_name), size, self._layout)
            q, k = self._rotate(q, where), self._rotate(k, where)
        place: dict[str, Any] = {"axis_name": self._axis_name, "layout": self._layout, "segment_ids": segment_ids}
        mixed = metp_attention(q, k, v, **place, **dict(self._options))
        return self._product(mixed.reshape(*x.shape[:2], -1), self.out, 0)

    def _product(self, x: Array, w: nnx.Param, axis: int) -> Array:
        f = lambda x, w: x @ baselines.gathered_weight(w, self._axis_name, axis)
        return jax.checkpoint(f)(x, w[...].astype(x.dtype))
