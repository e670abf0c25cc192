"""Attention of some queries to some keys through cuDNN, with a float32 log-sum-exp.

`jax.nn.dot_product_attention(..., return_residual=True)` rounds the log-sum-exp to the inputs' dtype, which costs more than a
percent of error over a ring of eight, and its backward pass takes no log-sum-exp of more keys than it sees. JAX's private
primitives do both; this is the only place that knows them.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from memjax._core.arrays import vary, varying_axes
from memjax._core.platforms import only_on_cuda

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
    """Why cuDNN cannot do it on any GPU, or None."""
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


def refusal(reason: str) -> str:
    """The text of the error for `implementation="cudnn"`."""
    return (
        f'implementation must be one that can do this, got "cudnn": {reason}; use "jnp", or None for the best there is'
    )


def forward(options: Any, q: Array, k: Array, v: Array, rows: Any, columns: Any, diagonal: bool) -> tuple[Array, Array]:
    """(o, lse), as `block` gives it, but o is rounded to q's dtype before it is returned in float32."""
    run = partial(_call, _FORWARD, options, diagonal, ("query", "key", "value"), is_training=True)
    o, lse = _with_batches(run)(_guarded(q), k, v)
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
    """As in `block`; gradients are rounded to q's dtype before they are returned in float32."""
    names = ("query", "key", "value", "activation", "fwd_output", "grad_output")
    gradients = _with_batches(partial(_call, _BACKWARD, options, diagonal, names))(_guarded(q), k, v, lse, o, do)
    dq, dk, dv = (a.astype(jnp.float32) for a in gradients)
    return vary((dq, dk, dv), varying_axes(q, k, v, do))


def _guarded(q: Array) -> Array:
    return only_on_cuda(q, refusal("cuDNN needs a GPU, and this is compiled for another platform"))


def _call(primitive: Any, options: Any, diagonal: bool, names: tuple[str, ...], *arrays: Array, **more: Any) -> Any:
    values: dict[str, Any] = dict(zip(names, arrays, strict=True))
    nothing = jnp.zeros(0, values["query"].dtype)
    unused = ("bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v")
    values |= dict.fromkeys(unused, nothing)
    if "score_mod" in inspect.signature(primitive).parameters:  # from JAX 0.12 on
        values |= {"score_mod_args": (), "score_mod": None}
    mask = _cudnn.MaskType.CAUSAL if options.causal and diagonal else _cudnn.MaskType.NO_MASK
    return primitive(
        **values,
        scale=options.scale,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=mask,
        layout=_cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=None,
        **more,
    )


def _with_batches(f: Any) -> Any:
    """`f`, of arrays whose first axis is the batch, with what `jax.vmap` maps over put into that axis.

    The primitives have no batching rule.
    """
    mapped = jax.custom_batching.custom_vmap(f)

    @mapped.def_vmap
    def rule(size: int, batched: Any, *arrays: Array) -> Any:
        whole = (a if b else jnp.broadcast_to(a, (size, *a.shape)) for a, b in zip(arrays, batched, strict=True))
        outs = _with_batches(f)(*(a.reshape(-1, *a.shape[2:]) for a in whole))
        return [a.reshape(size, -1, *a.shape[1:]) for a in outs], [True] * len(outs)

    return mapped
