"""A ring of devices, round which blocks travel while every device computes with the block it holds.

This is the schedule of memory-efficient tensor parallelism (Liang et al. 2025), and of ring attention (Liu et al. 2023). At
step t device i holds the block of device i - t. `scan` uses the device's own block first:

    step 0          step 1          ...   step p-1
    use own block   use block i-1         use block i+1
    send it on      send it on

Every hop is started before a step's work and awaited after it, so that the link and the matrix units are busy together
(double buffering: the block in use and the one that arrives). `collect` also adds up something from every device for each
block (its gradient). Those sums travel with the blocks, one step behind: what arrives is added to what was just computed. The
device's own block comes last, while the sums of the other devices for it come home:

                    step 1          ...   step p-1          homecoming
                    use block i-1         use block i+1     use own block
    send own block  send it on            send its sums     add its sums

Memory: a block and its sums, twice each. Traffic per device: p - 1 blocks and p - 1 sums. The first hop of `collect` is not
hidden: that of one block, or of one piece if blocks go round in pieces.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memjax._core import check
from memjax._core.barriers import joint_barrier
from memjax._core.clear_errors import call_errors


def scan(body: Callable[[Any, Any, Any], Any], moving: Any, init: Any, *, axis_name: str | None) -> Any:
    """Runs `body` with the block of every device of the ring in turn, its own block first, hops hidden behind it.

    Args:
      body: `(carry, block, step) -> carry`. `block` is the `moving` of device `(i - step) % p`; `step` is the Python integer 0
        for the device's own block, and an int32 scalar, or an integer, for the others. It is traced five times at most,
        whatever the size of the ring.
      moving: this device's block, a pytree of arrays of the same shapes on every device.
      init: the carry before the first call, a pytree; it stays on the device. It may have another structure than later ones.
      axis_name: the axis of `jax.shard_map` that is the ring; None for a ring of one device.

    Returns:
      The last carry.

    Raises:
      ValueError: outside a `jax.shard_map` over `axis_name`.
    """
    size = _size(axis_name)
    check.function("body", body, "body(carry, block, step) returns the carry", arguments=3)
    _check_moving(moving)
    body = _explained(body)
    if size == 1:
        return body(init, moving, 0)

    def step(carry: Any, block: Any, index: Any) -> Any:
        block_next = _hop(block, axis_name, size)
        return body(carry, block, index), block_next

    # The barriers keep the next hop from starting before a step is over: all blocks would be held at once.
    state = joint_barrier(step(init, moving, 0))
    carry, block = _in_pairs(step, state, 1, size - 1)
    # So that the last sum is made in its matmul, as the others are, and not beside it in what casts it.
    return joint_barrier(body(carry, block, size - 1))


def collect(
    body: Callable[[Any, Any, Any], Any] | tuple[Callable[[Any, Any, Any], Any], Callable[[Any, Any, Any], Any]],
    moving: Any,
    init: Any,
    *,
    axis_name: str | None,
    dtype: Any,
    count: int = 1,
    piece: Callable[[Any, Any], Any] = lambda moving, index: moving,
) -> tuple[Any, Any]:
    """Runs `body` with the block of every device of the ring in turn, its own block last, and adds up what it returns for each.

    Args:
      body: `(carry, block, step) -> (carry, sums)`. `sums` is a pytree of arrays to be added up, for each block, over all
        devices; otherwise as for `scan`. It is traced six times at most. With several pieces `init` has the structure of later
        carries. Two functions are called one after another, the second with what the first returned: beside the first the sums
        hop, beside the second the block. Beside one function both do.
      moving: this device's block, a pytree of arrays of the same shapes on every device.
      dtype: of the sums that are returned; they travel as `body` makes them.
      count: blocks go round in so many pieces, one after another. The first hop of a piece is hidden behind the end of the one
        before.
      piece: `(moving, index) -> piece`, of which `body` is given one at a time.

    Returns:
      The last carry, and the sums of all devices for this device's own block, stacked by pieces: (count, ...).

    Raises:
      ValueError: outside a `jax.shard_map` over `axis_name`.
    """
    size = _size(axis_name)
    _check_moving(moving)
    check.dtype("dtype", dtype)
    check.integer("count", count, least=1, what="a number of pieces")
    check.function("piece", piece, "piece(moving, index) returns a part", arguments=2)
    if not callable(body) and not (isinstance(body, tuple) and len(body) == 2):
        raise check.fail(TypeError, "body", "a function, or a pair of functions", body)
    first, second = (None, body) if callable(body) else body
    for f in (second,) if first is None else (first, second):
        check.function("body", f, "body(carry, block, step) returns (carry, sums)", arguments=3)
    first, second = None if first is None else _explained(first), _explained(second, pair=True)

    def work(carry: Any, block: Any, index: Any) -> Any:
        return second(carry if first is None else first(carry, block, index), block, index)

    def step(carry: Any, block: Any, sums: Any, index: Any, onward: Any) -> Any:
        arrived = _hop(sums, axis_name, size)
        if first is not None:
            carry = first(carry, block, index)
            if sums is not None:
                carry, arrived, onward = joint_barrier((carry, arrived, onward))
        block_next = _hop(onward, axis_name, size)
        carry, computed = second(carry, block, index)
        return carry, block_next, computed if arrived is None else _add(arrived, computed)

    def one_round(state: Any, index: Any) -> Any:
        carry, block = state
        if size == 1:
            carry, sums = work(carry, piece(moving, index), 0)
            return (carry, None), cast(sums)
        carry, block, sums = joint_barrier(step(carry, block, None, 1, block if size > 2 else None))
        go_on = lambda carry, block, sums, index: step(carry, block, sums, index, block)
        carry, block, sums = _in_pairs(go_on, (carry, block, sums), 2, size - 1)
        if size > 2:
            carry, _, sums = step(carry, block, sums, size - 1, None)
        # Nothing is computed from the own block earlier, and held.
        carry, sums, index, own_block = joint_barrier((carry, sums, index, moving))
        following = piece(own_block, (index + 1) % count) if count > 1 else None
        carry, block, sums = joint_barrier(step(carry, piece(own_block, index), sums, 0, following))
        return (carry, block), cast(sums)

    cast = lambda sums: jax.tree.map(lambda a: a.astype(dtype), sums)
    state = init, _hop(piece(moving, 0), axis_name, size) if size > 1 else None
    if count == 1:
        (carry, _), sums = one_round(state, 0)
        return carry, jax.tree.map(lambda a: a[None], sums)
    (carry, _), sums = lax.scan(one_round, state, jnp.arange(count, dtype=jnp.int32))
    return carry, sums


def _in_pairs(step: Callable[..., Any], state: Any, begin: int, end: int) -> Any:
    """Steps `begin` to `end`, two in each turn of a loop.

    With one step in each turn, a block that arrives would be copied to the place of the one before, and only then be sent on.
    With two, each block has a place of its own.
    """
    whole = lambda *args: joint_barrier(step(*args))
    if begin < end and (end - begin) % 2 == 1:
        state, begin = whole(*state, begin), begin + 1
    if begin < end:
        indices = jnp.arange(begin, end, 2, dtype=jnp.int32)
        state, _ = lax.scan(lambda s, i: (whole(*whole(*s, i), i + 1), None), state, indices)
    return state


def _size(axis_name: Any) -> int:
    size = 1 if axis_name is None else check.axis_size("axis_name", axis_name)
    if size > 1:
        _warn_without_overlap()
    return size


def _check_moving(moving: Any) -> None:
    for leaf in jax.tree.leaves(moving):
        check.array("moving", leaf, fix="pass a pytree of this device's arrays")


def _explained(body: Callable[..., Any], *, pair: bool = False) -> Callable[..., Any]:
    """`body` with errors that say what it was called with."""

    def call(carry: Any, block: Any, step: Any) -> Any:
        with call_errors("body", body, {"a carry": carry, "a block": block}):
            out = body(carry, block, step)
        if pair and not (isinstance(out, tuple) and len(out) == 2):
            raise check.fail(TypeError, "body", "a function that returns (carry, sums)", out)
        return check.arrays("the result of body", out)

    return call


def _hop(tree: Any, axis_name: Any, size: int) -> Any:
    """The `tree` of the previous device."""
    return lax.ppermute(tree, axis_name, [(i, (i + 1) % size) for i in range(size)])


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "XLA_FLAGS": "--xla_gpu_collective_permute_mode=peer"}
_MORE_FLAGS = "--xla_gpu_collective_permute_combine_threshold_bytes=1073741824", "--xla_gpu_enable_triton_gemm=false"


def hide_hops() -> None:
    """Makes GPUs hide hops behind compute. Call it before the first use of a device.

    Sets `CUDA_DEVICE_MAX_CONNECTIONS=1`, unless it has a value, so that hops start before the matmuls beside them, and adds to
    `XLA_FLAGS`, unless they name these flags:

    - `--xla_gpu_collective_permute_mode=peer`: copy engines move blocks between the GPUs of a process. By default a kernel of
      NCCL does, on multiprocessors that the matmuls then lack, as it still does between processes.
    - `--xla_gpu_collective_permute_combine_threshold_bytes=1073741824`: arrays that move at the same time are one hop. XLA has
      one under way at a time, and at each the host's threads wait for one another.
    - `--xla_gpu_enable_triton_gemm=false`: matmuls are cuBLAS's, which add what they make to the sums so far. XLA's own add only
      to arguments of a loop; other sums take a pass over memory and an array more. This holds for all of the program.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for flag in (_ENVIRONMENT["XLA_FLAGS"], *_MORE_FLAGS):
        flags = os.environ.get("XLA_FLAGS", "")
        if flag.split("=")[0] not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


_warned = False


def _warn_without_overlap() -> None:
    global _warned
    if _warned or jax.default_backend() != "gpu":
        return
    missing = [
        f"{name}={value}" for name, value in _ENVIRONMENT.items() if value not in os.environ.get(name, "").split()
    ]
    if missing:
        _warned = True
        warnings.warn(
            "Hops round the ring are not hidden behind compute: call memjax.shard.hide_hops() before the first use of a"
            f" device, or set {' and '.join(missing)}.",
            stacklevel=4,
        )
