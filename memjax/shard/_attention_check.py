"""What `metp_attention` accepts, and what it says about the rest."""

from __future__ import annotations

import numbers
from typing import Any

import jax.numpy as jnp

from memjax.shard import _attention_cudnn
from memjax.shard._layout import check_layout


def arrays(q: Any, k: Any, v: Any, segment_ids: Any, layout: Any, head_chunks: Any) -> None:
    for name, a in (("q", q), ("k", k), ("v", v)):
        if not jnp.issubdtype(a.dtype, jnp.floating) or a.dtype != q.dtype:
            raise TypeError(
                f"{name}: expected one floating-point dtype for q, k and v, got {a.dtype} beside q's {q.dtype}"
            )
        if a.ndim != 4:
            raise ValueError(f"{name}: expected shape (batch, tokens, heads, head_dim), got {a.shape}")
    batch, tokens, heads, dim = q.shape
    if k.shape[:2] != (batch, tokens) or k.shape[3] != dim:
        raise ValueError(
            f"k: expected shape {(batch, tokens, 'kv_heads', dim)} for q of shape {q.shape}, got {k.shape}"
        )
    if v.shape != k.shape:
        raise ValueError(f"v: expected k's shape {k.shape}, got {v.shape}")
    kv_heads = k.shape[2]
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"k: expected a number of heads that divides q's {heads}, got {kv_heads}")
    if not _is_integer(head_chunks):
        raise TypeError(f"head_chunks: expected a positive integer, got {head_chunks!r}")
    if head_chunks < 1 or kv_heads % head_chunks:
        raise ValueError(f"head_chunks: expected a divisor of the {kv_heads} key-value heads, got {head_chunks}")
    check_layout(layout)
    if layout == "zigzag" and tokens % 2:
        raise ValueError(
            f'q: layout="zigzag" needs an even number of tokens per device, a sequence of a multiple of twice the devices,'
            f" got {tokens}; pad it, with segment id -1 for what is added"
        )
    if segment_ids is not None:
        if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
            raise TypeError(f"segment_ids: expected integers, got {segment_ids.dtype}")
        if segment_ids.shape != (batch, tokens):
            raise ValueError(f"segment_ids: expected shape {(batch, tokens)}, got {segment_ids.shape}")


def window(value: Any) -> int | None:
    if value is None:
        return None
    if not _is_integer(value):
        raise TypeError(f"window: expected a positive integer, or None for no window, got {value!r}")
    if value < 1:
        raise ValueError(f"window: expected a positive integer, or None for no window, got {value}")
    return int(value)


def softcap(value: Any) -> float | None:
    if value is not None and not value > 0:
        raise ValueError(f"softcap: expected a positive number, or None for no cap, got {value!r}")
    return None if value is None else float(value)


def implementation(name: Any, q: Any, segment_ids: Any, window: Any, softcap: Any) -> str:
    """The one that was asked for, or the best that runs here."""
    if name not in (None, "cudnn", "jnp"):
        raise ValueError(f'implementation: expected None, "cudnn" or "jnp", got {name!r}')
    if name == "jnp":
        return "jnp"
    reason = _attention_cudnn.unsuited(q, segment_ids, window, softcap)
    if reason is None:
        return "cudnn"
    if name == "cudnn":
        raise ValueError(f'implementation: "cudnn" cannot do this: {reason}; use "jnp"')
    return "jnp"


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
