"""Which kernel computes an attention: decided by what is asked for, and by the platform that is compiled for."""

from __future__ import annotations

from typing import Any

from jax import lax

from memjax._attention import block, cudnn


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
