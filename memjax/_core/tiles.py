"""A function of tiles, run over all tiles of its arguments in both passes, results written in place.

Nothing but the arguments is kept for the backward pass. Loops slice arrays where they lie and write into rows of whole
arrays, for an array that a loop is given in pieces (`jax.lax.map` over a transposed copy) exists twice. An array that has
been read is written over where a result of the same type is due: in the backward pass the cotangent of a result by that of
an argument.

A tile has positions of every device that an axis is sharded over: see `memjax._core.segments`.
"""

from __future__ import annotations

import functools
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
from memjax._core.lists import Arrays, drop, merge, pick, spread
from memjax._core.platforms import traced_device
from memjax._core.program.jaxpr import with_axes
from memjax._core.segments import Segments
from memjax._core.wide_sums import in_wide_sums

Body = Callable[[Arrays, Arrays], Arrays]
"""From shared arrays and tiles to tiles of results and summands of sums."""


class Tiles:
    """`body`, run over tiles of its arguments.

    Args:
      body: of (shared, tiles).
      in_axes: where the arguments have positions.
      out_axes: where the results have them; None for results that are sums over positions.
      out_types: of the whole results.
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
        body = lambda tiles, _: self._body(shared, tiles)
        return self._tiled(body, arrays, self._in_axes, self._out_types, self._out_axes)

    def _keep(self, shared: Any, arrays: Any) -> tuple[Arrays, Any]:
        wanted = perturbed(shared), perturbed(arrays)
        shared, arrays = ([primal.value for primal in group] for group in (shared, arrays))
        return self._forward(shared, arrays), (shared, arrays, Static(wanted))

    def _back(self, kept: Any, cotangents: Any) -> tuple[Arrays, Arrays]:
        """The backward pass is a function of tiles, too: of those of the arguments and of the cotangents."""
        shared, arrays, (shared_wanted, arrays_wanted) = kept[0], kept[1], kept[2].value
        types, axes, cotangents = (
            pick(some, self._out_float) for some in (self._out_types, self._out_axes, cotangents)
        )
        is_nonzero = [not isinstance(ct, SymbolicZero) for ct in cotangents]
        n, count = len(arrays), sum(shared_wanted)

        def gradients(given: Arrays, size: int) -> Arrays:
            tiles = given[:n]
            nothing = [
                zeros(aval if axis is None else aval.update(shape=with_size(aval.shape, axis, size)))
                for aval, axis in zip(drop(types, is_nonzero), drop(axes, is_nonzero), strict=True)
            ]

            def float_results(some_shared, some_tiles):
                outs = self._body(
                    merge(some_shared, drop(shared, shared_wanted), shared_wanted),
                    merge(some_tiles, drop(tiles, arrays_wanted), arrays_wanted),
                )
                return pick(outs, self._out_float)

            _, pull = jax.vjp(float_results, pick(shared, shared_wanted), pick(tiles, arrays_wanted))
            d_shared, d_tiles = pull(merge(given[n:], nothing, is_nonzero))
            return [*d_shared, *d_tiles]

        wanted = [*pick(shared, shared_wanted), *pick(arrays, arrays_wanted)]
        widened = [self._start(aval, None)[1].dtype != aval.dtype for aval in map(jax.typeof, wanted[:count])]
        sums = [i for i in range(count) if widened[i]]
        platform = traced_device().platform
        found = self._tiled(
            lambda given, size: in_wide_sums(functools.partial(gradients, size=size), given, sums, platform),
            [*arrays, *pick(cotangents, is_nonzero)],
            [*self._in_axes, *pick(axes, is_nonzero)],
            list(map(jax.typeof, wanted)),
            [*[None] * count, *pick(self._in_axes, arrays_wanted)],
            is_backward=True,
        )
        return spread(found[:count], shared_wanted), spread(found[count:], arrays_wanted)

    def _tiled(
        self,
        body: Callable[[Arrays, int], Arrays],
        arrays: Arrays,
        in_axes: Sequence[int | None],
        types: Sequence[Any],
        axes: Sequence[int | None],
        *,
        is_backward: bool = False,
    ) -> Arrays:
        """The results of `body`, of (tiles, positions in a tile), for whole arrays. What has no positions it is given whole.

        In the backward pass the arrays are the arguments, which are not written over, and then cotangents.
        """
        made = [self._start(aval, axis) for aval, axis in zip(types, axes, strict=True)]
        # In the backward pass recomputation waits for the cotangents, or a compiler begins it as soon as the arguments exist.
        if is_backward or self._tile < self._length:
            made, arrays = made_after(made, arrays)
        first = len(self._in_axes) if is_backward else 0
        over = _written_over(types, axes, arrays[first:], in_axes[first:])
        buffers = [arrays[first + over[i]] if i in over else filled(*new) for i, new in enumerate(made)]
        source = {first + array: result for result, array in over.items()}
        split, join, cut, put = self._segments.split, self._segments.join, self._segments.cut, self._segments.put
        arrays = [a if axis is None else split(a, axis) for a, axis in zip(arrays, in_axes, strict=True)]
        buffers = [a if axis is None else split(a, axis) for a, axis in zip(buffers, axes, strict=True)]

        def one(start, size, buffers):
            tiles = [
                array if axis is None else cut(buffers[source[i]] if i in source else array, start, size, axis)
                for i, (array, axis) in enumerate(zip(arrays, in_axes, strict=True))
            ]
            outs = body(tiles, self._segments.count * size)
            return [
                _add(buffer, out) if axis is None else put(buffer, out, start, axis)
                for buffer, out, axis in zip(buffers, outs, axes, strict=True)
            ]

        over_tiles = with_axes(lambda buffers: self._over_tiles(one, buffers), self._axes if is_backward else {})
        return [
            (buffer if axis is None else join(buffer, axis)).astype(aval.dtype)
            for buffer, axis, aval in zip(over_tiles(buffers), axes, types, strict=True)
        ]

    def _over_tiles(self, one: Callable[[Any, int, Any], Any], state: Any) -> Any:
        """`state = one(start, size, state)` for each tile: `size` places of each segment, from `start` on."""
        full, last = divmod(self._length, self._tile)
        if full == 1:
            state = one(0, self._tile, state)
        elif full > 1:
            starts = jnp.arange(full, dtype=jnp.int32) * self._tile
            state, _ = lax.scan(lambda state, start: (one(start, self._tile, state), None), state, starts)
        return one(full * self._tile, last, state) if last else state

    def _start(self, aval: Any, axis: int | None) -> New:
        """What results are written into, or sums begin with."""
        is_sum = axis is None and self._sum_dtype is not None and jnp.issubdtype(aval.dtype, jnp.floating)
        if is_sum and jnp.finfo(self._sum_dtype).bits > jnp.finfo(aval.dtype).bits:
            aval = aval.update(dtype=self._sum_dtype)
        return vary(jnp.zeros((), aval.dtype), varying(aval)), aval


New = tuple[jax.Array, Any]  # a zero, and the type of a buffer of it


def made_after(made: Sequence[New], arrays: Arrays) -> tuple[list[New], Arrays]:
    """Both again, so that buffers are made when the arrays are there: a compiler makes all that are alike at the first."""
    floats = [is_float(jax.typeof(array)) for array in arrays]
    starts, waited = barrier(([zero for zero, _ in made], pick(arrays, floats)))
    made = [(zero, aval) for zero, (_, aval) in zip(starts, made, strict=True)]
    return made, merge(waited, drop(arrays, floats), floats)


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
