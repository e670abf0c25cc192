"""What `metp_attention` accepts, and what it says about the rest."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from memjax._core import check
from memjax.shard._layout import LAYOUTS

_NONE = "pass None for none"


def arrays(q: Any, k: Any, v: Any, segment_ids: Any, layout: str, head_chunks: int) -> None:
    for name, a in (("q", q), ("k", k), ("v", v)):
        check.array(name, a, ndim=4, floating=True, fix="pass (batch, tokens, heads, head_dim)")
        if a.dtype != q.dtype:
            raise check.fail(TypeError, name, f"of q's dtype {q.dtype}", a, f"pass {name}.astype(q.dtype)")
        if 0 in a.shape[1:]:
            raise check.fail(ValueError, name, "of at least one token, head and dimension", a)
    batch, tokens, heads, dim = q.shape
    if k.shape[:2] != (batch, tokens) or k.shape[3] != dim:
        raise check.fail(ValueError, "k", f"of shape ({batch}, {tokens}, kv_heads, {dim}) for q of shape {q.shape}", k)
    if v.shape != k.shape:
        raise check.fail(ValueError, "v", f"of k's shape {k.shape}", v)
    kv_heads = k.shape[2]
    if heads % kv_heads:
        raise check.fail(ValueError, "k", f"of a number of heads that divides q's {heads}", k)
    if kv_heads % head_chunks:
        raise check.fail(ValueError, "head_chunks", f"a divisor of the {kv_heads} key-value heads", head_chunks)
    if layout == "zigzag" and tokens % 2:
        fix = (
            "make the sequence a multiple of twice the devices, padded with segment id -1, or pass layout='contiguous'"
        )
        raise check.fail(ValueError, "q", 'of an even number of tokens per device with layout="zigzag"', q, fix)
    if segment_ids is not None:
        check.array("segment_ids", segment_ids)
        if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
            raise check.fail(TypeError, "segment_ids", "integers", segment_ids)
        if segment_ids.shape != (batch, tokens):
            raise check.fail(ValueError, "segment_ids", f"of shape {(batch, tokens)}", segment_ids)


def options(
    *,
    causal: Any = False,
    layout: Any = "zigzag",
    window: Any = None,
    scale: Any = None,
    softcap: Any = None,
    head_chunks: Any = 1,
    implementation: Any = None,
) -> dict[str, Any]:
    """The options that must be Python values, as such."""
    return {
        "causal": check.flag("causal", causal),
        "layout": check.choice("layout", layout, LAYOUTS),
        "window": None if window is None else check.integer("window", window, least=1, fix=_NONE),
        "scale": None if scale is None else check.number("scale", scale, fix="for a traced scale, multiply q by it"),
        "softcap": None if softcap is None else check.number("softcap", softcap, positive=True, fix=_NONE),
        "head_chunks": check.integer("head_chunks", head_chunks, least=1),
        "implementation": check.choice("implementation", implementation, (None, "cudnn", "jnp")),
    }
