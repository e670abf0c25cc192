"""NNX modules whose parameters are spread over a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import lax

from memjax._core import check
from memjax.shard import baselines
from memjax.shard._attention import metp_attention
from memjax.shard._layout import attention_options, positions
from memjax.shard._metp import check_elementwise, metp_mlp

Array = jax.Array
_OPTIONS = ("causal", "layout", "window", "scale", "softcap", "head_chunks", "implementation")
_normal = nnx.initializers.lecun_normal()


def _check_common(axis_name: Any, dtype: Any, rngs: Any) -> None:
    if not isinstance(axis_name, str) or not axis_name:
        raise check.fail(TypeError, "axis_name", "the name of one mesh axis", axis_name)
    if dtype is not None:
        check.dtype("dtype", dtype, floating=True)
    if not isinstance(rngs, nnx.Rngs):
        raise check.fail(TypeError, "rngs", "flax.nnx.Rngs", rngs, "pass nnx.Rngs(0)")


class MetpMlp(nnx.Module):
    """A feed-forward layer, called inside `jax.shard_map` with this device's tokens and blocks of weights.

    Parameters, whole as the module makes them: `w_in` and, if gated, `w_gate` (dim, hidden), to be sharded by columns;
    `w_out` (hidden, dim), by rows. See `metp_mlp` for what is saved.

    Args:
      dim, hidden: features of tokens and of the layer between, F.
      activation: elementwise; with `gated=True` of the gate, so SwiGLU is `jax.nn.silu` with a gate.
      recompute: see `metp_mlp`.
      axis_name: the mesh axis that is the ring.
      dtype: of computation; None: that of the input.

    Raises:
      ValueError, TypeError: arguments of another kind or out of range.
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
        dim, hidden = check.integer("dim", dim, least=1), check.integer("hidden", hidden, least=1)
        check_elementwise("activation", activation)
        gated, recompute = check.flag("gated", gated), check.flag("recompute", recompute)
        _check_common(axis_name, dtype, rngs)
        self.w_in = nnx.Param(_normal(rngs.params(), (dim, hidden)))
        self.w_gate = nnx.Param(_normal(rngs.params(), (dim, hidden))) if gated else nnx.data(None)
        self.w_out = nnx.Param(_normal(rngs.params(), (hidden, dim)))
        self._activation, self._recompute = activation, recompute
        self._axis_name, self._dtype = axis_name, dtype

    def __call__(self, x: Array) -> Array:
        """(..., t, dim), this device's tokens, to their outputs of the same shape."""
        check.array("x", x, floating=True)
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
      dim, heads: features of tokens, and heads of queries.
      kv_heads: a divisor of `heads`; by default as many as heads.
      head_dim: by default dim / heads.
      rotate: applied to queries and keys, (B, t, heads, head_dim) and their positions: none by default.
      dropout_rate: must be 0. A block's weights are never held and are recomputed in the backward pass on other
        devices; cuDNN's dropout could not be repeated there.
      options: of `metp_attention`: causal, layout, window, softcap, head_chunks and the others.

    Raises:
      ValueError: dropout, heads that do not divide, or options out of range.
      TypeError: arguments of another kind, or an option that `metp_attention` does not have.
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
        if check.number("dropout_rate", dropout_rate):
            reason = (
                "attention over a ring computes its weights again in the backward pass, where the same dropout cannot"
            )
            raise check.fail(
                ValueError, "dropout_rate", "0", dropout_rate, f"{reason} be drawn; put dropout after the attention"
            )
        dim, heads, kv_heads, self._head_dim = check.heads(dim, heads, kv_heads, head_dim)
        if rotate is not None:
            check.function("rotate", rotate, "pass f(q, positions), or None for none", arguments=2)
        _check_common(axis_name, dtype, rngs)
        if unknown := options.keys() - _OPTIONS:
            wanted = f"options of metp_attention: {', '.join(_OPTIONS)}"
            raise check.fail(TypeError, "options", wanted, sorted(unknown)[0], "see its docstring")
        options = {k: v for k, v in attention_options(**options).items() if k in options}
        if kv_heads % options.get("head_chunks", 1):
            wanted = f"a divisor of the {kv_heads} key-value heads"
            raise check.fail(ValueError, "head_chunks", wanted, options["head_chunks"])
        width, kv_width = heads * self._head_dim, kv_heads * self._head_dim
        make = lambda *shape: nnx.Param(_normal(rngs.params(), shape))
        self.query, self.key, self.value = make(dim, width), make(dim, kv_width), make(dim, kv_width)
        self.out = make(width, dim)
        self._rotate, self._axis_name, self._dtype = rotate, axis_name, dtype
        self._layout, self._options = options.pop("layout", "zigzag"), tuple(options.items())

    def __call__(self, x: Array, segment_ids: Array | None = None) -> Array:
        """(B, t, dim) and (B, t), this device's tokens in the layout, to their outputs (B, t, dim)."""
        check.array("x", x, ndim=3, floating=True, fix="pass (batch, tokens, dim)")
        if x.shape[2] != self.query.shape[0]:
            raise check.fail(ValueError, "x", f"of {self.query.shape[0]} features", x)
        size = check.axis_size("axis_name", self._axis_name)
        x = x.astype(x.dtype if self._dtype is None else self._dtype)
        heads = lambda a: a.reshape(*a.shape[:2], -1, self._head_dim)
        q, k, v = (heads(self._product(x, name, 1)) for name in ("query", "key", "value"))
        if self._rotate is not None:
            where = positions(x.shape[1], lax.axis_index(self._axis_name), size, self._layout)
            q, k = self._rotate(q, where), self._rotate(k, where)
        place: dict[str, Any] = {"axis_name": self._axis_name, "layout": self._layout, "segment_ids": segment_ids}
        mixed = metp_attention(q, k, v, **place, **dict(self._options))
        return self._product(mixed.reshape(*x.shape[:2], -1), "out", 0)

    def _product(self, x: Array, name: str, axis: int) -> Array:
        w = getattr(self, name)
        check.sharded(name, w[...], self._axis_name)
        f = lambda x, w: x @ baselines.gathered_weight(w, self._axis_name, axis)
        return jax.checkpoint(f)(x, w[...].astype(x.dtype))
