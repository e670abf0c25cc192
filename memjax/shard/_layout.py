"""How a sequence lies on a ring, and where each device's tokens are in it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax._core import check
from memjax._core.compat import is_tracer

LAYOUTS = ("zigzag", "contiguous")


def zigzag(a: Any, size: int, *, axis: int = 1) -> Any:
    """Reorders a whole sequence so that, cut into `size` equal parts, part r holds the chunks r and 2 size - 1 - r of 2 size.

    Under a causal mask every device then has the same number of keys to attend to. Tokens, labels, positions and segment
    ids are reordered alike, before they are sharded.

    Args:
      a: an array, or NumPy array, whose length along `axis` is a multiple of 2 size.
      size: devices of the ring.
      axis: that of the sequence.

    Returns:
      An array of the same kind, shape and dtype.

    Raises:
      ValueError: a length that does not divide, or an axis that `a` does not have.
      TypeError: something else than an array, or integers.
    """
    axis, size = _checked(a, axis, size)
    return _take(a, zigzag_order(a.shape[axis], size), axis)


def unzigzag(a: Any, size: int, *, axis: int = 1) -> Any:
    """The inverse of `zigzag`, with its arguments: a whole sequence in its own order again."""
    axis, size = _checked(a, axis, size)
    return _take(a, np.argsort(zigzag_order(a.shape[axis], size)), axis)


def zigzag_order(length: int, size: int) -> np.ndarray:
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
    check.choice("layout", layout, LAYOUTS)
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
