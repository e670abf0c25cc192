"""How a sequence lies on a ring, and where each device's tokens are in it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LAYOUTS = ("zigzag", "contiguous")


def zigzag(a: Any, size: int, *, axis: int = 1) -> Any:
    """Reorders a whole sequence so that, cut into `size` equal parts, part r holds the r-th of 2 size chunks and the r-th
    from the end.

    Under a causal mask every device then has the same number of keys to attend to. Tokens, labels, positions and segment
    ids are reordered alike, before they are sharded.

    Args:
      a: an array, or NumPy array, whose length along `axis` is a multiple of 2 size.
      size: devices of the ring.
      axis: that of the sequence.

    Raises:
      ValueError: a length that does not divide.
    """
    return _take(a, zigzag_order(_length(a, axis, size), size), axis)


def unzigzag(a: Any, size: int, *, axis: int = 1) -> Any:
    """The inverse of `zigzag`: a whole sequence in its own order again."""
    return _take(a, np.argsort(zigzag_order(_length(a, axis, size), size)), axis)


def zigzag_order(length: int, size: int) -> np.ndarray:
    """Positions of the tokens in the order in which `zigzag` puts them."""
    chunks = np.arange(length).reshape(2 * size, -1)
    return np.concatenate([chunks[[r, 2 * size - 1 - r]].reshape(-1) for r in range(size)])


def positions(length: int, rank: Any, size: int, layout: str) -> jax.Array:
    """Positions, in the whole sequence, of the `length` tokens of device `rank`: (length,) int32."""
    check_layout(layout)
    local = jnp.arange(length, dtype=jnp.int32)
    rank = jnp.asarray(rank, jnp.int32)
    if layout == "contiguous":
        return rank * length + local
    half = length // 2
    return jnp.where(local < half, rank * half + local, (2 * size - 2 - rank) * half + local)


def check_layout(layout: Any) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f'layout: expected "zigzag" or "contiguous", got {layout!r}')


def _length(a: Any, axis: int, size: int) -> int:
    length = a.shape[axis]
    if length % (2 * size):
        raise ValueError(
            f"a: expected a length along axis {axis} that is a multiple of 2 size = {2 * size}, got {length}; pad the"
            " sequence, with segment id -1 for what is added"
        )
    return length


def _take(a: Any, order: np.ndarray, axis: int) -> Any:
    return np.take(a, order, axis) if isinstance(a, np.ndarray) else jnp.take(a, order, axis=axis)
