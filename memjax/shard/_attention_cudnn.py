"""Attention of some queries to some keys through cuDNN, with a float32 log-sum-exp.

`jax.nn.dot_product_attention(..., return_residual=True)` rounds the log-sum-exp to the inputs' dtype, which costs more than a
percent of error over a ring of eight, and its backward pass takes no log-sum-exp of more keys than it sees. JAX's private
primitives do both; this is the only place that knows them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from memjax._core.arrays import vary, varying_axes

Array = jax.Array

_FORWARD: Any = None
_BACKWARD: Any = None
try:
    from jax._src.cudnn import fused_attention_stablehlo as _cudnn

    # Below the wrappers through which XLA would partition them: inside `shard_map` there is nothing to partition.
    _FORWARD, _BACKWARD = _cudnn._dot_product_attention_fwd_impl, _cudnn._dot_product_attention_bwd_impl
except (ImportError, AttributeError):
    pass  # a JAX that moved them


def unsuited(q: Array, segment_ids: Any, window: Any, softcap: Any) -> str | None:
    """Why cuDNN cannot do it, or None."""
    if jax.default_backend() != "gpu":
        return f"cuDNN needs a GPU, and the default backend is {jax.default_backend()!r}"
    if _FORWARD is None:
        return f"JAX {jax.__version__} does not have the primitives where they were expected"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN's flash attention takes bfloat16 and float16, and q is {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > 128:
        return f"cuDNN's flash attention takes head dimensions that are multiples of 8 up to 128, not {q.shape[-1]}"
    for name, value in (("segment_ids", segment_ids), ("window", window), ("softcap", softcap)):
        if value is not None:
            return f"{name} is not supported by it"
    return None


def forward(options: Any, q: Array, k: Array, v: Array, rows: Any, columns: Any, diagonal: bool) -> tuple[Array, Array]:
    """(o, lse), as `_attention_block` gives it, but o is rounded to q's dtype before it is returned in float32."""
    o, lse = _FORWARD(q, k, v, *_nothing(q, 7), **_settings(options, diagonal), is_training=True)
    return vary((o.astype(jnp.float32), lse), varying_axes(q, k, v))


def backward(
    options: Any,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    do: Array,
    rows: Any,
    columns: Any,
    diagonal: bool,
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv), as `_attention_block` gives them, but rounded to q's dtype before they are returned in float32."""
    gradients = _BACKWARD(q, k, v, *_nothing(q, 7), lse, o, do, **_settings(options, diagonal))
    dq, dk, dv = (a.astype(jnp.float32) for a in gradients)
    return vary((dq, dk, dv), varying_axes(q, k, v, do))


def _nothing(q: Array, count: int) -> list[Array]:
    """Empty arrays that stand for bias, lengths, offsets and page tables."""
    return [jnp.zeros(0, q.dtype)] * count


def _settings(options: Any, diagonal: bool) -> dict[str, Any]:
    mask = _cudnn.MaskType.CAUSAL if options.causal and diagonal else _cudnn.MaskType.NO_MASK
    return {
        "scale": options.scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": mask,
        "layout": _cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
