"""Which kernel computes an attention: decided by what is asked for, and by the platform that is compiled for.

And causal attention of whole sequences by that kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from memjax._attention import block, cudnn
from memjax._attention.block import Options, Tokens
from memjax._core.arrays import vary, varying_axes
from memjax._core.barriers import barrier


def implementation(name: str | None, q: Any, segment_ids: Any, window: Any, softcap: Any) -> str:
    """The implementation that was asked for, or the best one.

    Returns:
      "jnp"; "cudnn"; or "platform": cuDNN where the program is compiled for an NVIDIA GPU, and "jnp" elsewhere.

    Raises:
      ValueError: "cudnn" was asked for, and cannot do it on any GPU.
    """
    if name == "jnp":
        return "jnp"
    reason = cudnn.unsuited(q, segment_ids, window, softcap)
    if reason is None:
        return "platform" if name is None else "cudnn"
    if name == "cudnn":
        raise ValueError(cudnn.refusal(reason))
    return "jnp"


def kernels(name: str) -> Any:
    """What has `forward` and `backward` of an implementation, as `block` has them."""
    return {"jnp": block, "cudnn": cudnn, "platform": _ByPlatform}[name]


class _ByPlatform:
    @staticmethod
    def forward(options: Any, q: Any, k: Any, v: Any, rows: Any, columns: Any, diagonal: bool) -> Any:
        run = lambda kernel: lambda *arrays: kernel.forward(options, *arrays, diagonal)
        return lax.platform_dependent(q, k, v, rows, columns, cuda=run(cudnn), default=run(block))

    @staticmethod
    def backward(options: Any, *arrays: Any) -> Any:
        *operands, diagonal = arrays
        run = lambda kernel: lambda *operands: kernel.backward(options, *operands, diagonal)
        return lax.platform_dependent(*operands, cuda=run(cudnn), default=run(block))


_ROWS = 512


def causal_attention(
    q: Float[Array, "b t h d"], k: Float[Array, "b t k d"], v: Float[Array, "b t k d"]
) -> Float[Array, "b t h d"]:
    """`softmax(q k^T / sqrt(d)) v` over the tokens up to each one; k is a divisor of h.

    By cuDNN where the program is compiled for an NVIDIA GPU and cuDNN can; elsewhere for 512 rows of products at a time.
    Saved for the backward pass: q, k, v, the output, and b h t float32.
    """
    kernel = implementation(None, q, None, None, None)
    options = Options(causal=True, scale=q.shape[-1] ** -0.5, implementation=kernel, rows=_ROWS)
    return _attention(options, *vary((q, k, v), varying_axes(q, k, v)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: Options, q: Array, k: Array, v: Array) -> Array:
    return _forward(options, q, k, v)[0]


def _forward(options: Options, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    tokens = _tokens(q)
    o, lse = kernels(options.implementation).forward(options, q, k, v, tokens, tokens, True)
    o = o.astype(q.dtype)
    return o, (q, k, v, o, lse)


def _backward(options: Options, saved: Any, do: Array) -> tuple[Array, Array, Array]:
    (q, k, v, o, lse), do = barrier((saved, do))
    tokens = _tokens(q)
    gradients = kernels(options.implementation).backward(options, q, k, v, o, lse, do, tokens, tokens, True)
    dq, dk, dv = (d.astype(a.dtype) for d, a in zip(gradients, (q, k, v), strict=True))
    return dq, dk, dv


_attention.defvjp(_forward, _backward)


def _tokens(q: Array) -> Tokens:
    return Tokens(jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), q.shape[:2]), None)
