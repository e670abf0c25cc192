"""How a sequence lies on a ring, where each device's tokens are in it, and what attention over it accepts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax._core import check
from memjax._core.compat import is_tracer

_LAYOUTS = ("zigzag", "contiguous")


def zigzag(a: Any, size: int, *, axis: int = 1) -> Any:
    """Reorders a whole sequence so that, cut into `size` equal parts, part r holds the chunks r and 2 size - 1 - r of 2 size.

    Under a causal mask every device then has the same number of keys to attend to. Tokens, labels, positions and segment
    ids are reordered alike, before they are sharded.

    Args:
      a: an array, or NumPy array, whose length along `axis` is a multiple of 2 size.
      size: the number of devices in the ring.
      axis: the axis of the sequence.

    Returns:
      An array of the same kind, shape and dtype.

    Raises:
      ValueError: the length is not a multiple of 2 size, `a` does not have the axis, or `size` is less than 1.
      TypeError: `a` is not an array, or `size` or `axis` is not an integer.
    """
    axis, size = _checked(a, axis, size)
    return _take(a, _zigzag_order(a.shape[axis], size), axis)


def unzigzag(a: Any, size: int, *, axis: int = 1) -> Any:
    """The inverse of `zigzag`, with its arguments: a whole sequence in its own order again."""
    axis, size = _checked(a, axis, size)
    return _take(a, np.argsort(_zigzag_order(a.shape[axis], size)), axis)


def _zigzag_order(length: int, size: int) -> np.ndarray:
    """Positions of the tokens in the order in which `zigzag` puts them."""
    chunks = np.arange(length).reshape(2 * size, -1)
    return np.concatenate([chunks[[r, 2 * size - 1 - r]].reshape(-1) for r in range(size)])


def positions(length: int, rank: Any, size: int, layout: str) -> jax.Array:
    """Positions, in the whole sequence, of the `length` tokens of device `rank`: (length,) int32.

    Args:
      length: tokens per device, an even number with layout "zigzag".
      rank: which device of the ring, from 0: an integer, or a traced one such as `jax.lax.axis_index(axis_name)`.
      size: devices of the ring.
      layout: "zigzag" or "contiguous", as in `metp_attention`.

    Raises:
      ValueError: a number out of range, an odd length, or another layout.
      TypeError: something else than integers.
    """
    check.choice("layout", layout, _LAYOUTS)
    length, size = check.integer("length", length, least=1), check.integer("size", size, least=1)
    if layout == "zigzag" and length % 2:
        fix = "make the sequence a multiple of twice the devices, or use the contiguous layout"
        raise check.fail(ValueError, "length", 'an even number with layout="zigzag"', length, fix)
    rank = _checked_rank(rank, size)
    local = jnp.arange(length, dtype=jnp.int32)
    if layout == "contiguous":
        return rank * length + local
    half = length // 2
    return jnp.where(local < half, rank * half + local, (2 * size - 2 - rank) * half + local)


def _checked_rank(rank: Any, size: int) -> jax.Array:
    wanted = f"an integer in [0, {size})"
    if isinstance(rank, jax.Array):
        if rank.shape != () or not jnp.issubdtype(rank.dtype, jnp.integer):
            raise check.fail(TypeError, "rank", wanted, rank)
        if is_tracer(rank):
            return rank.astype(jnp.int32)
    whole = check.integer("rank", rank)
    if not 0 <= whole < size:
        raise check.fail(ValueError, "rank", wanted, whole)
    return jnp.asarray(whole, jnp.int32)


def _checked(a: Any, axis: Any, size: Any) -> tuple[int, int]:
    check.array("a", a)
    size, whole = check.integer("size", size, least=1), check.integer("axis", axis)
    if not -a.ndim <= whole < a.ndim:
        raise check.fail(ValueError, "axis", f"one of the {a.ndim} axes of a of shape {a.shape}", whole)
    if a.shape[whole] % (2 * size):
        raise check.fail(
            ValueError,
            "a",
            f"of a length along axis {whole} that is a multiple of 2 size = {2 * size}",
            a,
            "pad the sequence, with segment id -1 for what is added",
        )
    return whole, size


def _take(a: Any, order: np.ndarray, axis: int) -> Any:
    return np.take(a, order, axis) if isinstance(a, np.ndarray) else jnp.take(a, order, axis=axis)


_NONE = "pass None for none"


def check_attention(q: Any, k: Any, v: Any, segment_ids: Any, layout: str, head_chunks: int) -> None:
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


def attention_options(
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
        "layout": check.choice("layout", layout, _LAYOUTS),
        "window": None if window is None else check.integer("window", window, least=1, fix=_NONE),
        "scale": None if scale is None else check.number("scale", scale, fix="for a traced scale, multiply q by it"),
        "softcap": None if softcap is None else check.number("softcap", softcap, positive=True, fix=_NONE),
        "head_chunks": check.integer("head_chunks", head_chunks, least=1),
        "implementation": check.choice("implementation", implementation, (None, "cudnn", "jnp")),
    }
