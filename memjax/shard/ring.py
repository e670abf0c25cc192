"""A ring of devices, round which blocks travel while every device computes with the block it holds.

The schedule of memory-efficient tensor parallelism (Liang et al. 2025), and of ring attention (Liu et al. 2023). At step t
device i holds the block of device i - t. `scan` uses the own block first:

    step 0          step 1          ...   step p-1
    use own block   use block i-1         use block i+1
    send it on      send it on

Every hop is started before a step's work and awaited after it, so that the link and the matrix units are busy together
(double buffering: the block in use and the one that arrives). `collect` also adds up something from every device for each
block (its gradient). Those sums travel with the blocks, one step behind: what arrives is added to what was just computed. The
own block comes last, while the sums of the others for it come home:

                    step 1          ...   step p-1          homecoming
                    use block i-1         use block i+1     use own block
    send own block  send it on            send its sums     add its sums

Memory: a block and its sums twice. Traffic per device: p - 1 blocks and p - 1 sums. Not hidden is the first hop of `collect`, one
block; if blocks go round in pieces, one after another, one piece.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

def scan(
    body: Callable[..., Any] | Sequence[Callable[..., Any]], moving: Any, init: Any, *, axis_name: str | None
) -> Any:
    """Runs `body` with the block of every device of the ring in turn, the own one first, hops hidden behind it.

    Args:
      body: `(carry, block, step) -> carry`. `block` is the `moving` of device `(i - step) % p`; `step` is the Python integer 0
        for the device's own block, and an int32 scalar, or an integer, for the others. It is traced five times at most,
        whatever the size of the ring. Several functions are called one after another, each with what the one before returned:
        beside each one array hops, beside the last all that are left. XLA has one hop under way at a time, and if left to
        itself puts some beside less than they take.
      moving: this device's block, a pytree of arrays of the same shapes on every device.
      init: the carry before the first call, a pytree; it stays on the device. It may have another structure than later ones.
      axis_name: the axis of `jax.shard_map` that is the ring; None for a ring of one device.

    Returns:
      The last carry.

    Raises:
      ValueError: outside a `jax.shard_map` over `axis_name`.
    """
    size, parts = _size(axis_name), _parts(body)
    if size == 1:
        return _beside(parts, init, moving, 0)[0]

    def step(carry: Any, block: Any, index: Any) -> Any:
        return _beside(parts, carry, block, index, block, lambda tree: _hop(tree, axis_name, size))

    # The barriers keep the next hop from starting before a step is over: all blocks would be held at once.
    state = lax.optimization_barrier(step(init, moving, 0))
    carry, block = _in_pairs(step, state, 1, size - 1)
    # So that the last sum is made in its matmul, as the others are, and not beside it in what casts it.
    return lax.optimization_barrier(_beside(parts, carry, block, size - 1)[0])


def collect(
    body: Callable[..., Any] | Sequence[Callable[..., Any]],
    moving: Any,
    init: Any,
    *,
    axis_name: str | None,
    dtype: Any,
    count: int = 1,
    piece: Callable[[Any, Any], Any] = lambda moving, index: moving,
    together: bool = False,
) -> tuple[Any, Any]:
    """Runs `body` with the block of every device of the ring in turn, the own one last, and adds up what it returns for each.

    Args:
      body: `(carry, block, step) -> (carry, sums)`, or several functions of which the last one is such. `sums` is a pytree of
        arrays to be added up, for each block, over all devices; they hop before the arrays of the block. Otherwise as for
        `scan`. It is traced six times at most. With several pieces `init` has the structure of later carries.
      moving: this device's block, a pytree of arrays of the same shapes on every device.
      dtype: of the sums that are returned; they travel as `body` makes them.
      count: blocks go round in so many pieces, one after another. The first hop of a piece is hidden behind the end of the one
        before.
      piece: `(moving, index) -> piece`, of which `body` is given one at a time.
      together: a block and the sums for the one before travel as one array, at the price of a copy. XLA has one hop under way
        at a time: if `body` is one kernel it hides one hop, and others are waited for.

    Returns:
      The last carry, and the sums of all devices for this device's own block, stacked by pieces: (count, ...).

    Raises:
      ValueError: outside a `jax.shard_map` over `axis_name`.
    """
    size, parts = _size(axis_name), _parts(body)
    hop = lambda tree: (_hop_together if together else _hop)(tree, axis_name, size)

    def step(carry: Any, block: Any, sums: Any, index: Any, onward: Any) -> Any:
        (carry, more), (arrived, block_next) = _beside(parts, carry, block, index, (sums, onward), hop)
        return carry, block_next, more if arrived is None else _add(arrived, more)

    def one_round(state: Any, index: Any) -> Any:
        carry, block = state
        if size == 1:
            carry, sums = _beside(parts, carry, piece(moving, index), 0)[0]
            return (carry, None), cast(sums)
        carry, block, sums = lax.optimization_barrier(step(carry, block, None, 1, block if size > 2 else None))
        go_on = lambda carry, block, sums, index: step(carry, block, sums, index, block)
        carry, block, sums = _in_pairs(go_on, (carry, block, sums), 2, size - 1)
        if size > 2:
            carry, _, sums = step(carry, block, sums, size - 1, None)
        # Of the own block nothing is computed before, and held.
        carry, sums, index, mine = lax.optimization_barrier((carry, sums, index, moving))
        following = piece(mine, (index + 1) % count) if count > 1 else None
        carry, block, sums = lax.optimization_barrier(step(carry, piece(mine, index), sums, 0, following))
        return (carry, block), cast(sums)

    cast = lambda sums: jax.tree.map(lambda a: a.astype(dtype), sums)
    state = init, _hop(piece(moving, 0), axis_name, size) if size > 1 else None
    if count == 1:
        (carry, _), sums = one_round(state, 0)
        return carry, jax.tree.map(lambda a: a[None], sums)
    (carry, _), sums = lax.scan(one_round, state, jnp.arange(count, dtype=jnp.int32))
    return carry, sums


def _parts(body: Any) -> Sequence[Callable[..., Any]]:
    return [body] if callable(body) else body


def _beside(parts: Any, carry: Any, block: Any, index: Any, tree: Any = (), hop: Any = None) -> tuple[Any, Any]:
    """What the parts of a body return, called in turn while `tree` hops, and the tree that arrives."""
    *firsts, last = parts
    leaves, structure = jax.tree.flatten(tree)
    arrived: list[Any] = []
    for part in firsts:
        now, leaves = leaves[:1], leaves[1:]
        comes = hop(now) if now else []
        carry = part(carry, block, index)
        if now:  # nothing of the next part, nor its hop, begins before
            carry, comes, leaves = lax.optimization_barrier((carry, comes, leaves))
        arrived += comes
    arrived += hop(leaves) if leaves else []
    return last(carry, block, index), jax.tree.unflatten(structure, arrived)


def _in_pairs(step: Callable[..., Any], state: Any, begin: int, end: int) -> Any:
    """Steps `begin` to `end`, two by two: a loop of single steps would copy every block that arrives to where the one before was,
    and send it on only then. With two, each has its place."""
    whole = lambda *args: lax.optimization_barrier(step(*args))
    if begin < end and (end - begin) % 2 == 1:
        state, begin = whole(*state, begin), begin + 1
    if begin < end:
        indices = jnp.arange(begin, end, 2, dtype=jnp.int32)
        state, _ = lax.scan(lambda s, i: (whole(*whole(*s, i), i + 1), None), state, indices)
    return state


def _size(axis_name: Any) -> int:
    size = 1 if axis_name is None else axis_size(axis_name)
    if size > 1:
        _warn_without_overlap()
    return size


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
    """`tree` of the previous device."""
    return lax.ppermute(tree, axis_name, [(i, (i + 1) % size) for i in range(size)])


def _hop_together(tree: Any, axis_name: Any, size: int) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    if len(leaves) < 2:
        return _hop(tree, axis_name, size)
    word = 8 * min(a.dtype.itemsize for a in leaves)
    split = [_words(a, word) for a in leaves]
    words = _hop(jnp.concatenate([w for parts in split for w in parts]), axis_name, size)
    arrived, start = [], 0
    for a, parts in zip(leaves, split, strict=True):
        ends = [start + (i + 1) * a.size for i in range(len(parts))]
        arrived.append(_from_words([words[end - a.size : end] for end in ends], a, word))
        start = ends[-1]
    return jax.tree.unflatten(structure, arrived)


def _words(a: Any, word: int) -> list[jax.Array]:
    """The bits of `a`, so many of every entry at a time, from the lowest on. Not a bitcast to a smaller dtype: its inverse is
    a sum, which XLA puts into a kernel of its own."""
    bits = lax.bitcast_convert_type(a, f"uint{8 * a.dtype.itemsize}").reshape(-1)
    return [(bits >> bits.dtype.type(low)).astype(f"uint{word}") for low in range(0, 8 * a.dtype.itemsize, word)]


def _from_words(words: list[jax.Array], like: Any, word: int) -> jax.Array:
    wide = jnp.dtype(f"uint{8 * like.dtype.itemsize}")
    bits = words[0].astype(wide)
    for i, more in enumerate(words[1:], 1):
        bits |= more.astype(wide) << wide.type(i * word)
    return lax.bitcast_convert_type(bits.reshape(like.shape), like.dtype)


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "XLA_FLAGS": "--xla_gpu_collective_permute_mode=peer"}
_SUMS_IN_MATMULS = "--xla_gpu_enable_triton_gemm=false"


def hide_hops() -> None:
    """Has GPUs hide hops behind compute; to be called before the first use of a device.

    Sets `CUDA_DEVICE_MAX_CONNECTIONS=1`, unless it has a value, so that hops start before the matmuls beside them, and adds to
    `XLA_FLAGS`, unless they name these flags:

    - `--xla_gpu_collective_permute_mode=peer`: copy engines move blocks between the GPUs of a process. By default a kernel of
      NCCL does, on multiprocessors that the matmuls then lack, as it still does between processes.
    - `--xla_gpu_enable_triton_gemm=false`: matmuls are cuBLAS's, which add what they make to the sums so far. XLA's own add only
      to arguments of a loop; other sums take a pass over memory and an array more. This holds for all of the program.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for flag in (_ENVIRONMENT["XLA_FLAGS"], _SUMS_IN_MATMULS):
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
