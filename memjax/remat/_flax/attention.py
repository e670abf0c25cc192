"""`attention_in_groups` as an NNX module with the kernels of the projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from memjax._core import check
from memjax.remat._tiled.heads import attention_in_groups

_normal = nnx.initializers.lecun_normal


class AttentionInGroups(nnx.Module):
    """`x` plus multi-head self-attention to `norm(x)`, one group of heads after the other: `memjax.remat.attention_in_groups`.

    Parameters: `query` (dim, heads, head_dim), `key` and `value` (dim, kv_heads, head_dim), `out` (heads, head_dim, dim), and
    those of `norm`.

    Args:
      dim, heads: features of positions, and heads of queries.
      kv_heads: a divisor of `heads`. None: as many as heads.
      head_dim: features of a head. None: dim / heads.
      norm: an NNX module or a function, applied to x first; `nnx.RMSNorm(dim, rngs=rngs)`, for example.
      dtype: of computation. None: that of the input.
      groups, tile, rotary, attend, keep_attention: see `attention_in_groups`, which says what is saved and what memory it takes.

    Raises:
      ValueError, TypeError: arguments of another kind or out of range.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        norm: Callable[[Array], Array] | None = None,
        dtype: Any = None,
        groups: int | None = None,
        tile: int | None = None,
        rotary: Callable[[Array, Array], Array] | None = None,
        attend: Callable[[Array, Array, Array], Array] | None = None,
        keep_attention: bool = False,
        rngs: nnx.Rngs,
    ):
        dim, heads, kv_heads, head_dim = check.heads(dim, heads, kv_heads, head_dim)
        if not isinstance(rngs, nnx.Rngs):
            raise check.fail(TypeError, "rngs", "flax.nnx.Rngs", rngs, "pass nnx.Rngs(0)")
        if dtype is not None:
            check.dtype("dtype", dtype, floating=True)

        for name, count in (("groups", groups), ("tile", tile)):
            if count is not None:
                check.integer(name, count, least=1)
        for name, f, arguments in (("norm", norm, 1), ("rotary", rotary, 2), ("attend", attend, 3)):
            if f is not None:
                check.function(name, f, arguments=arguments)
        check.flag("keep_attention", keep_attention)

        inward, outward = _normal(in_axis=0, out_axis=(1, 2)), _normal(in_axis=(0, 1), out_axis=2)
        self.query = nnx.Param(inward(rngs.params(), (dim, heads, head_dim)))
        self.key = nnx.Param(inward(rngs.params(), (dim, kv_heads, head_dim)))
        self.value = nnx.Param(inward(rngs.params(), (dim, kv_heads, head_dim)))
        self.out = nnx.Param(outward(rngs.params(), (heads, head_dim, dim)))
        self.norm = norm
        self._dtype = dtype
        self._options: dict[str, Any] = {
            "groups": groups,
            "tile": tile,
            "rotary": rotary,
            "attend": attend,
            "keep_attention": keep_attention,
        }

    def __call__(self, x: Float[Array, "B T D"], positions: Array | None = None) -> Float[Array, "B T D"]:
        """`positions`: what `rotary` is given, of shape (T,) or (B, T). None: 0 to T - 1."""
        check.array("x", x, ndim=3, floating=True)
        x = x if self._dtype is None else x.astype(self._dtype)
        kernels = (param[...].astype(x.dtype) for param in (self.query, self.key, self.value, self.out))
        return attention_in_groups(x, *kernels, norm=self.norm, positions=positions, **self._options)
