"""A matmul for Hopper GPUs that does not end with a store: what becomes of its tiles is the caller's code.

    out[i, j] = epilogue(sum_k a[i, k] b[j, k])

A persistent kernel in Pallas (Mosaic GPU). Each block has one warpgroup that loads, through a ring of slots in
shared memory, and others that multiply, each 64 rows of the block's tile. Pairs of blocks share their columns: what
one loads of `b` arrives in both. The ring runs on from tile to tile, so the next tile is loaded during an epilogue.
Operands may be stored either way, and may be windows of larger arrays that begin where a traced number says; copies
of the windows are not made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from memjax._core.compat import varying_like
from memjax._core.platforms import traced_device
from memjax._linear_cross_entropy.options import Array

plgpu: Any = mosaic_gpu  # its interface differs between versions of JAX

DEPTH = 64  # of a slot, along the contraction
ALIGNMENT = 64  # of where windows begin, and of the sizes of all arrays
_CLUSTER = 2
_STAGES = 4


@dataclass(frozen=True)
class Tiling:
    """How a product is taken apart: 128 x 256 tiles need less shared memory traffic for each operation, 192 x 192
    ones may fill the GPU better."""

    warpgroups: int = 2
    columns: int = 256
    band: int = 8  # of tile rows that are worked on together, so that both operands stay in the cache

    @property
    def rows(self) -> int:
        """Rows of a pair of blocks."""
        return 64 * self.warpgroups * _CLUSTER

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // self.rows), -(-columns // self.columns)

    def fill(self, rows: int, columns: int) -> float:
        """The share of the GPU that is busy with a product of this size."""
        m, n = self.grid(rows, columns)
        pairs = multiprocessors() // _CLUSTER
        return rows * columns / (-(-m * n // pairs) * pairs * self.rows * self.columns)


def fullest(rows: int, columns: int) -> Tiling:
    return max((Tiling(2, 256, band=4), Tiling(3, 192, band=4)), key=lambda tiling: tiling.fill(rows, columns))


def multiprocessors() -> int:
    return traced_device().core_count


class Operand(NamedTuple):
    """A matrix of bfloat16 or float16, contracted along `contraction`; the window begins at `start` along `axis`."""

    array: Any
    contraction: int
    axis: int | None = None


class Tile(NamedTuple):
    """Where a warpgroup's part of a tile is: 64 rows from `row` on, the tiling's columns from `column` on."""

    row: Any
    column: Any
    column_index: Any  # column / tiling.columns
    start: Any  # of the windows
    warpgroup: Any


def swizzled(columns: int) -> tuple[Any, ...]:
    """The layout of blocks of 128-byte rows in shared memory that tensor cores and the copy engine agree on."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)


def _transpose(ref: Any) -> Any:
    return ref.T if hasattr(ref, "T") else plgpu.transpose_ref(ref, (1, 0))


def matmul(
    a: Operand,
    b: Operand,
    epilogue: Callable[..., None],
    *,
    shape: tuple[int, int, int],
    start: Any = 0,
    inputs: Sequence[Any] = (),
    outputs: Sequence[tuple[tuple[int, ...], Any]] = (),
    scratch: Sequence[Any] = (),
    tiling: Tiling,
) -> Any:
    """Calls `epilogue(accumulator, tile, inputs, outputs, scratch)` for each warpgroup's part of each tile.

    Args:
      a, b: operands of `shape` (rows, columns, depth): a gives rows, b columns.
      start: () int32, a multiple of `ALIGNMENT`.
      inputs: further arrays in GPU memory, or `jax.new_ref`s, which the epilogue may write.
      outputs: shapes and dtypes of what is returned.
      scratch: shared memory for the epilogue.
    """
    rows, columns, depth = shape
    groups, stages = tiling.warpgroups, _STAGES
    tile_rows = 64 * groups
    m, n = tiling.grid(rows, columns)
    steps = -(-depth // DEPTH)
    dtype = a.array.dtype

    def kernel(a_ref: Any, b_ref: Any, start_ref: Any, *refs: Any) -> None:
        extra, (a_slots, b_slots, full, free), scratch_refs = (
            refs[: len(inputs) + len(outputs)],
            refs[len(inputs) + len(outputs) :][:4],
            refs[len(inputs) + len(outputs) + 4 :],
        )
        group, block = lax.axis_index("group"), lax.axis_index("cluster")
        begin = pl.multiple_of(start_ref[0], ALIGNMENT)

        def slot(step: Any) -> Any:
            return lax.rem(step, jnp.int32(stages))

        def place(index: Any) -> tuple[Any, Any, Any]:
            i, j = plgpu.planar_snake(index, (m, n), 0, tiling.band)
            row = pl.multiple_of((i * _CLUSTER + block) * tile_rows, ALIGNMENT)
            return row, pl.multiple_of(j * tiling.columns, ALIGNMENT), j

        def window(operand: Operand, free_start: Any, size: int, k: Any) -> tuple[Any, Any]:
            starts = [free_start, k]
            if operand.axis is not None:
                which = int(operand.axis == operand.contraction)
                starts[which] = pl.multiple_of(begin + starts[which], ALIGNMENT)
            slices = pl.ds(starts[0], size), pl.ds(starts[1], DEPTH)
            return slices if operand.contraction == 1 else slices[::-1]

        @pl.when(group == groups)
        def load() -> None:
            plgpu.set_max_registers(40 if groups == 2 else 32, action="decrease")

            @plgpu.nd_loop((m * n,), collective_axes="pair")
            def over_tiles(info: Any) -> None:
                row, column, _ = place(info.index[0])

                @pl.loop(0, steps)
                def over_depth(k: Any) -> None:
                    step = info.local_index * steps + k

                    @pl.when(step >= stages)
                    def wait() -> None:
                        plgpu.barrier_wait(free.at[slot(step)])

                    k = pl.multiple_of(k * DEPTH, DEPTH)
                    plgpu.copy_gmem_to_smem(
                        a_ref.at[window(a, row, tile_rows, k)], a_slots.at[slot(step)], full.at[slot(step)]
                    )
                    plgpu.copy_gmem_to_smem(
                        b_ref.at[window(b, column, tiling.columns, k)],
                        b_slots.at[slot(step)],
                        full.at[slot(step)],
                        collective_axes="cluster",
                    )

            # The other block of the pair may still write here: stay until both have used everything.
            pairs = lax.axis_size("pair")
            done = lax.div(m * n + pairs - 1 - lax.axis_index("pair"), jnp.int32(pairs)) * steps

            @pl.loop(0, stages)
            def drain(i: Any) -> None:
                @pl.when(done + i >= stages)
                def wait() -> None:
                    plgpu.barrier_wait(free.at[slot(done + i)])

        @pl.when(group < groups)
        def compute() -> None:
            plgpu.set_max_registers(232 if groups == 2 else 160, action="increase")
            group_rows = pl.ds(pl.multiple_of(group * 64, 64), 64)

            @plgpu.nd_loop((m * n,), collective_axes="pair")
            def over_tiles(info: Any) -> None:
                row, column, j = place(info.index[0])

                def accumulate(total: Any) -> Any:
                    @pl.loop(0, steps)
                    def over_depth(k: Any) -> None:
                        step = info.local_index * steps + k
                        plgpu.barrier_wait(full.at[slot(step)])
                        left = a_slots.at[slot(step)]
                        left = left.at[group_rows] if a.contraction == 1 else _transpose(left.at[:, group_rows])
                        right = b_slots.at[slot(step)]
                        plgpu.wgmma(total, left, _transpose(right) if b.contraction == 1 else right)
                        plgpu.wgmma_wait(1)

                        @pl.when(k > 0)
                        def release() -> None:
                            plgpu.barrier_arrive(free.at[slot(step - 1)])

                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot(info.local_index * steps + steps - 1)])
                    return total[...]

                total = pl.run_scoped(accumulate, plgpu.ACC((64, tiling.columns), jnp.float32))
                tile = Tile(pl.multiple_of(row + group * 64, 64), column, j, begin, group)
                epilogue(total, tile, extra[: len(inputs)], extra[len(inputs) :], scratch_refs)

            plgpu.wait_smem_to_gmem(0)

    def slots(operand: Operand, size: int) -> Any:
        box = (size, DEPTH) if operand.contraction == 1 else (DEPTH, size)
        return plgpu.SMEM((stages, *box), dtype, transforms=swizzled(64))

    shared = [
        slots(a, tile_rows),
        slots(b, tiling.columns),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=groups, num_barriers=stages),
        *scratch,
    ]
    mesh = plgpu.Mesh(
        grid=(multiprocessors() // _CLUSTER,), grid_names=("pair",), cluster=(_CLUSTER,), cluster_names=("cluster",),
        num_threads=groups + 1, thread_name="group",
    )  # fmt: skip
    like = jax.typeof(a.array)
    call = pl.kernel(
        lambda *refs: pl.run_scoped(partial(kernel, *refs), *shared, collective_axes="group"),
        out_type=tuple(varying_like(like, *out) for out in outputs),
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=512,  # rows are reduced within a warp
        ),
    )
    return call(a.array, b.array, jnp.asarray(start, jnp.int32).reshape(1), *inputs)


def staging(dtype: Any, tiling: Tiling) -> Any:
    """Shared memory by way of which `store` writes arrays of `dtype`: what the operands leave."""
    width = 128 // jnp.dtype(dtype).itemsize
    slots = 2 if tiling.warpgroups == 2 else 1
    return plgpu.SMEM((tiling.warpgroups, slots, 64, width), dtype, transforms=swizzled(width))


def store(
    piece: Callable[[int], Array], out: Any, tile: Tile, tiling: Tiling, staged: Any, *, add: bool = False
) -> None:
    """Writes a tile to `out`, or adds it; what lies outside of `out` is dropped. `piece(i)` gives the tile's columns
    from i on, 128 bytes wide in out's dtype."""
    slots, width = staged.shape[1], staged.shape[3]
    for i, first in enumerate(range(0, tiling.columns, width)):
        plgpu.wait_smem_to_gmem(slots - 1 if i else 0, wait_read_only=True)
        slot = staged.at[tile.warpgroup, i % slots]
        slot[...] = piece(first).astype(staged.dtype)
        plgpu.commit_smem()
        target = out.at[pl.ds(tile.row, 64), pl.ds(tile.column + first, width)]
        plgpu.copy_smem_to_gmem(slot, target, reduction_op="add" if add else None)
