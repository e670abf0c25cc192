"""A ring of devices, round which blocks travel while every device computes with the block it holds.

The schedule of memory-efficient tensor parallelism (Liang et al. 2025), and of ring attention (Liu et al. 2023). At step t
device i holds the block of device i - t, its source:

    step 0          step 1          ...   step p-1        homecoming
    use own block   use block i-1         use block i+1   own work held back, if any
    send it on      send it on                            sums reach their owners

Every hop is started before a step's work and awaited after it, so that the link and the matrix units are busy together
(double buffering: the block in use and the one that arrives). Sums that collect something from every device for each
block (its gradient) travel with the blocks, one step behind: what arrives is added to what was just computed.

Memory: two messages, of one block and its sums each. Traffic per device: p - 1 blocks and p sums.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Carry = TypeVar("Carry")


def scan(
    body: Callable[[Any, Any, Any], tuple[Any, Any]],
    moving: Any,
    init: Any,
    *,
    axis_name: str | None,
    last: Callable[[Any], tuple[Any, Any]] | None = None,
) -> tuple[Any, Any]:
    """Runs `body` with the block of every device of the ring in turn, hops hidden behind it.

    Args:
      body: `(carry, block, step) -> (carry, sums)`. `block` is the `moving` of device `(i - step) % p`; `step` is the
        Python integer 0 for the device's own block, and an int32 scalar, or an integer, afterwards. `sums` is a pytree
        of arrays to be added up, for each block, over all devices, or None. It is traced three times at most, whatever
        the size of the ring.
      moving: this device's block, a pytree of arrays of the same shapes on every device. All that moves in a hop is
        packed into one message, since small ones are slow.
      init: the carry before the first step, a pytree; it stays on the device.
      axis_name: the axis of `jax.shard_map` that is the ring; None for a ring of one device.
      last: `carry -> (carry, sums)`, more work for the own block, which runs while the sums make their last hop.

    Returns:
      The last carry, and the sums of all devices' `sums` for this device's own block.

    Raises:
      ValueError: outside a `jax.shard_map` over `axis_name`.
    """
    size = 1 if axis_name is None else axis_size(axis_name)
    if size > 1:
        _warn_without_overlap()

    def step(carry: Any, block: Any, sums: Any, index: Any, onward: bool) -> tuple[Any, Any, Any]:
        block_next, sums = _hop((block if onward else None, sums), axis_name, size)
        carry, more = body(carry, block, index)
        return carry, block_next, more if sums is None else _add(sums, more)

    # The barrier keeps the next hop from starting before a step is over: all blocks would be held at once.
    state = lax.optimization_barrier(step(init, moving, None, 0, size > 1))
    if size > 2:
        state, _ = lax.scan(
            lambda s, i: (step(s[0], s[1], s[2], i, True), None), state, jnp.arange(1, size - 1, dtype=jnp.int32)
        )
    carry, block, sums = state
    if size > 1:
        carry, _, sums = step(carry, block, sums, size - 1, False)
    # So that the last sum is made in its matmul, as the others are, and not beside it in what casts it.
    carry = lax.optimization_barrier(carry)
    if size > 1:
        sums = _hop(sums, axis_name, size)
    if last is not None:
        carry, more = last(carry)
        sums = _add(sums, more)
    return carry, sums


def axis_size(axis_name: Any) -> int:
    """Devices along the axis. Raises ValueError outside a `jax.shard_map` over it."""
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name: expected the name of one mesh axis, got {axis_name!r}")
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name: no mesh axis {axis_name!r} here; call this inside jax.shard_map over a mesh with that axis"
        ) from None


def _hop(tree: Any, axis_name: Any, size: int) -> Any:
    """`tree` of the previous device, sent in one message."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    onward = [(i, (i + 1) % size) for i in range(size)]
    if len(leaves) == 1:
        return jax.tree.unflatten(structure, [lax.ppermute(leaves[0], axis_name, onward)])
    arrived = lax.ppermute(_pack(leaves), axis_name, onward)
    return jax.tree.unflatten(structure, _unpack(arrived, leaves))


def _word(leaves: list[jax.Array]) -> Any:
    """The dtype of a message: that of the leaves, or unsigned integers of the narrowest one's width."""
    dtypes = {a.dtype for a in leaves}
    if len(dtypes) == 1:
        return dtypes.pop()
    return jnp.dtype(f"uint{8 * min(d.itemsize for d in dtypes)}")


def _pack(leaves: list[jax.Array]) -> jax.Array:
    word = _word(leaves)
    return jnp.concatenate([lax.bitcast_convert_type(a, word).reshape(-1) for a in leaves])


def _unpack(message: jax.Array, like: list[jax.Array]) -> list[jax.Array]:
    leaves, start = [], 0
    for a in like:
        words = a.dtype.itemsize // message.dtype.itemsize
        part = message[start : start + a.size * words]
        start += a.size * words
        leaves.append(
            lax.bitcast_convert_type(part.reshape(*a.shape, words) if words > 1 else part.reshape(a.shape), a.dtype)
        )
    return leaves


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


_warned = False


def _warn_without_overlap() -> None:
    """Once per process: by default GPUs run hops after the matmuls that should hide them."""
    global _warned
    if _warned or jax.default_backend() != "gpu" or os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return
    _warned = True
    warnings.warn(
        "Hops round the ring are not hidden behind compute: set the environment variable CUDA_DEVICE_MAX_CONNECTIONS=1"
        " before JAX starts.",
        stacklevel=3,
    )
