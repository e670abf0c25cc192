"""A function of tiles, run over all tiles of its arguments in both passes, results written in place.

Nothing but the arguments is kept for the backward pass. Loops slice arrays where they lie and write into rows of whole
arrays, for an array that a loop is given in pieces (`jax.lax.map` over a transposed copy) exists twice. An array that has
been read is written over where a result of the same type is due: in the backward pass the cotangent of a result by that of
an argument.

A tile has positions of every device that an axis is sharded over: see `memjax._core.segments`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from memjax._core.arrays import filled, is_float, vary, zeros
from memjax._core.backward.derivatives import Static, perturbed
from memjax._core.barriers import barrier
from memjax._core.compat import varying
from memjax._core.lists import Arrays, drop, merge, pick
from memjax._core.program.jaxpr import with_axes
from memjax._core.segments import Segments

Body = Callable[[Arrays, Arrays], Arrays]
"""From shared arrays and tiles to tiles of results and summands of sums."""


class Tiles:
    """`body`, run over tiles of its arguments.

    Args:
      body: of (shared, tiles).
      in_axes: where the arguments have positions.
      out_axes: where the results have them; None for results that are sums over positions.
      out_types: of the whole results.
      length: the number of positions.
      segments: of the axis with the positions.
      tile: how many positions a tile has, a multiple of the number of segments; the last one may have fewer.
      sum_dtype: sums of floats are kept in this dtype, or in their own if that is None or has more bits.
      axes: the sizes of the named axes over which the body has collectives.
    """

    def __init__(
        self,
        body: Body,
        in_axes: Sequence[int],
        out_axes: Sequence[int | None],
        out_types: Sequence[Any],
        segments: Segments,
        tile: int,
        sum_dtype: Any | None,
        axes: dict[str, int] | None = None,
    ):
        self._body, self._in_axes, self._out_axes = body, list(in_axes), list(out_axes)
        self._out_types, self._segments, self._sum_dtype = list(out_types), segments, sum_dtype
        self._axes = axes or {}
        self._length, self._tile = segments.length // segments.count, tile // segments.count  # of a segment
        self._out_float = [is_float(aval) for aval in out_types]
        self._run = jax.custom_vjp(self._forward)
        self._run.defvjp(self._keep, self._back, symbolic_zeros=True)

    def __call__(self, shared: Arrays, arrays: Arrays) -> Arrays:
        """The results for whole arrays."""
        return self._run(shared, arrays)

    def _forward(self, shared: Arrays, arrays: Arrays) -> Arrays:
        over = _written_over(self._out_types, self._out_axes, arrays, self._in_axes)
        made = [self._start(aval, axis) for aval, axis in zip(self._out_types, self._out_axes, strict=True)]
        if self._tile < self._length:
            made, arrays = _made_after(made, arrays)
        buffers = [arrays[over[i]] if i in over else filled(*new) for i, new in enumerate(made)]
        arrays, buffers = self._split(arrays, self._in_axes), self._split(buffers, self._out_axes)
        source = {array: result for result, array in over.items()}

        def one(start, size, buffers):
            tiles = [
                self._segments.cut(buffers[source[i]] if i in source else array, start, size, axis)
                for i, (array, axis) in enumerate(zip(arrays, self._in_axes, strict=True))
            ]
            outs = self._body(shared, tiles)
            return [
                _add(buffer, out) if axis is None else self._segments.put(buffer, out, start, axis)
                for buffer, out, axis in zip(buffers, outs, self._out_axes, strict=True)
            ]

        buffers = self._join(self._over_tiles(one, buffers), self._out_axes)
        return [buffer.astype(aval.dtype) for buffer, aval in zip(buffers, self._out_types, strict=True)]

    def _keep(self, shared: Any, arrays: Any) -> tuple[Arrays, Any]:
        wanted = perturbed(shared), perturbed(arrays)
        shared, arrays = ([primal.value for primal in group] for group in (shared, arrays))
        return self._forward(shared, arrays), (shared, arrays, Static(wanted))

    def _back(self, kept: Any, cotangents: Any) -> tuple[Arrays, Arrays]:
        shared, arrays, (shared_wanted, arrays_wanted) = kept[0], kept[1], kept[2].value
        types = pick(self._out_types, self._out_float)
        axes = pick(self._out_axes, self._out_float)
        cotangents = pick(cotangents, self._out_float)
        is_nonzero = [not isinstance(ct, SymbolicZero) for ct in cotangents]
        # Recomputation waits for the cotangents, or a compiler begins it as soon as the arguments exist.
        nonzero = pick(cotangents, is_nonzero)
        made = [self._start(jax.typeof(value), None) for value in pick(shared, shared_wanted)]
        made += [self._start(jax.typeof(value), 0) for value in pick(arrays, arrays_wanted)]
        made, waited = _made_after(made, [*nonzero, *arrays])
        nonzero, arrays = waited[: len(nonzero)], waited[len(nonzero) :]

        targets, target_axes = pick(arrays, arrays_wanted), pick(self._in_axes, arrays_wanted)
        over = _written_over(list(map(jax.typeof, targets)), target_axes, nonzero, pick(axes, is_nonzero))
        source = {cotangent: target for target, cotangent in over.items()}
        sums, new = [filled(*one) for one in made[: sum(shared_wanted)]], made[sum(shared_wanted) :]
        buffers = [nonzero[over[i]] if i in over else filled(*new[i]) for i in range(len(targets))]
        arrays, buffers = self._split(arrays, self._in_axes), self._split(buffers, target_axes)
        nonzero_axes = pick(axes, is_nonzero)
        nonzero = self._split(nonzero, nonzero_axes)

        def one(start, size, state):
            sums, buffers = state
            cut, count = self._segments.cut, self._segments.count
            tiles = [cut(array, start, size, axis) for array, axis in zip(arrays, self._in_axes, strict=True)]
            of_tile = [
                ct if axis is None else cut(buffers[source[i]] if i in source else ct, start, size, axis)
                for i, (ct, axis) in enumerate(zip(nonzero, nonzero_axes, strict=True))
            ]
            nothing = [
                zeros(aval if axis is None else aval.update(shape=with_size(aval.shape, axis, count * size)))
                for aval, axis in zip(drop(types, is_nonzero), drop(axes, is_nonzero), strict=True)
            ]

            def float_results(some_shared, some_tiles):
                outs = self._body(
                    merge(some_shared, drop(shared, shared_wanted), shared_wanted),
                    merge(some_tiles, drop(tiles, arrays_wanted), arrays_wanted),
                )
                return pick(outs, self._out_float)

            _, pull = jax.vjp(float_results, pick(shared, shared_wanted), pick(tiles, arrays_wanted))
            d_shared, d_tiles = pull(merge(of_tile, nothing, is_nonzero))
            sums = [_add(total, d) for total, d in zip(sums, d_shared, strict=True)]
            put = self._segments.put
            buffers = [put(b, d, start, axis) for b, d, axis in zip(buffers, d_tiles, target_axes, strict=True)]
            return sums, buffers

        over_tiles = with_axes(lambda *state: self._over_tiles(one, state), self._axes)
        sums, buffers = over_tiles(sums, buffers)
        buffers = self._join(buffers, target_axes)
        sums = [total.astype(value.dtype) for total, value in zip(sums, pick(shared, shared_wanted), strict=True)]
        return (
            merge(sums, [None] * (len(shared) - len(sums)), shared_wanted),
            merge(buffers, [None] * (len(arrays) - len(buffers)), arrays_wanted),
        )

    def _split(self, arrays: Arrays, axes: Sequence[int | None]) -> Arrays:
        split = self._segments.split
        return [a if axis is None else split(a, axis) for a, axis in zip(arrays, axes, strict=True)]

    def _join(self, arrays: Arrays, axes: Sequence[int | None]) -> Arrays:
        join = self._segments.join
        return [a if axis is None else join(a, axis) for a, axis in zip(arrays, axes, strict=True)]

    def _over_tiles(self, one: Callable[[Any, int, Any], Any], state: Any) -> Any:
        """`state = one(start, size, state)` for each tile: `size` places of each segment, from `start` on."""
        full, last = divmod(self._length, self._tile)
        if full == 1:
            state = one(0, self._tile, state)
        elif full > 1:
            starts = jnp.arange(full, dtype=jnp.int32) * self._tile
            state, _ = lax.scan(lambda state, start: (one(start, self._tile, state), None), state, starts)
        return one(full * self._tile, last, state) if last else state

    def _start(self, aval: Any, axis: int | None) -> _New:
        """What results are written into, or sums begin with."""
        is_sum = axis is None and self._sum_dtype is not None and jnp.issubdtype(aval.dtype, jnp.floating)
        if is_sum and jnp.finfo(self._sum_dtype).bits > jnp.finfo(aval.dtype).bits:
            aval = aval.update(dtype=self._sum_dtype)
        return vary(jnp.zeros((), aval.dtype), varying(aval)), aval


_New = tuple[jax.Array, Any]  # a zero, and the type of a buffer of it


def _made_after(made: Sequence[_New], arrays: Arrays) -> tuple[list[_New], Arrays]:
    """Both again, so that buffers are made when the arrays are there: a compiler makes all that are alike at the first."""
    floats = [is_float(jax.typeof(array)) for array in arrays]
    waited = barrier([*(zero for zero, _ in made), *pick(arrays, floats)])
    made = [(zero, aval) for zero, (_, aval) in zip(waited, made, strict=False)]
    return made, merge(waited[len(made) :], drop(arrays, floats), floats)


def _written_over(
    types: Sequence[Any], axes: Sequence[int | None], arrays: Sequence[Any], array_axes: Sequence[int | None]
) -> dict[int, int]:
    """Which array each result may be written over: one of the same type and axis, each array once."""
    over: dict[int, int] = {}
    for i, (aval, axis) in enumerate(zip(types, axes, strict=True)):
        for j, (array, array_axis) in enumerate(zip(arrays, array_axes, strict=True)):
            if axis is not None and axis == array_axis and j not in over.values() and _same(aval, jax.typeof(array)):
                over[i] = j
                break
    return over


def _same(a: Any, b: Any) -> bool:
    """Whether a buffer of one type holds values of the other. Arguments know their mesh, arrays made in the program do not."""
    properties = lambda aval: (aval.shape, aval.dtype, aval.sharding.spec, varying(aval))
    return bool(properties(a) == properties(b))


def with_size(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    """The shape with another size along one axis."""
    return (*shape[:axis], size, *shape[axis + 1 :])


def _add(total: Any, summand: Any) -> Any:
    return total + summand.astype(total.dtype)
