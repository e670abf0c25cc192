"""The gradient of max-pooling with overlapping windows, as a Pallas kernel that writes every element once.

XLA's version of the same sums writes an array for each place (`max_pool._woven`) and reads all of them again.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, UInt8

from memjax._core.arrays import accumulator
from memjax.compress._codecs.kernels import call_on_whole_arrays

_BLOCK, _WARPS = 1024, 4


class Axis(NamedTuple):
    """An axis of the arrays of a max-pooling.

    Attributes:
      inputs, outputs: number of elements of the input and of the output.
      begun: number of windows that begin before the input's end, with an output or without.
      size, stride: those of the windows.
      low: padding before the input.
    """

    inputs: int
    outputs: int
    begun: int
    size: int
    stride: int
    low: int


class Plan(NamedTuple):
    """Arrays as (outer, *axes, inner)."""

    outer: int
    axes: tuple[Axis, ...]
    inner: int

    @property
    def rows(self) -> int:
        """Number of rows of windows. A row has those that differ in the last axis and in `inner` alone."""
        return self.outer * math.prod(axis.begun for axis in self.axes[:-1])

    @property
    def blocks(self) -> int:
        """Number of blocks in a row."""
        return -(-self.axes[-1].begun * self.inner // _BLOCK)

    @property
    def share_of_lanes(self) -> float:
        """Share of the lanes of all blocks that have a window."""
        return self.axes[-1].begun * self.inner / (self.blocks * _BLOCK)

    @property
    def inputs(self) -> int:
        return self.outer * math.prod(axis.inputs for axis in self.axes) * self.inner


def max_pool_gradient(
    plan: Plan, index: UInt8[Array, "..."], ct: Float[Array, "..."], *, interpret: bool = False
) -> Float[Array, "n"]:
    """The gradient of the input, flat.

    Args:
      plan: a plan whose `inputs` are below 2^31.
      index: the index of each maximum in its window.
      ct: cotangents of the outputs.
    """
    [gradient] = call_on_whole_arrays(
        _kernel(plan),
        (index.reshape(-1), ct.reshape(-1)),
        [((plan.inputs,), ct.dtype)],
        programs=plan.rows * plan.blocks,
        warps=_WARPS,
        interpret=interpret,
    )
    return gradient


@functools.cache
def _kernel(plan: Plan):
    """Each program adds up `_BLOCK` windows' neighbours for all places: see `max_pool._woven`."""

    def kernel(index_ref, ct_ref, out_ref):
        from jax.experimental.pallas import triton

        row, block = lax.div(pl.program_id(0), plan.blocks), lax.rem(pl.program_id(0), plan.blocks)
        starts = _split(row, [axis.begun for axis in plan.axes[:-1]])
        outer, starts = starts[0], starts[1:]
        element = block * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
        # Of the last axis, by element; of the others, one for all.
        starts = [*starts, lax.div(element, jnp.int32(plan.inner))]
        channel = lax.rem(element, jnp.int32(plan.inner))

        loaded = {}
        for back in itertools.product(*(range(-(-axis.size // axis.stride)) for axis in plan.axes)):
            at = [start - b for start, b in zip(starts, back, strict=True)]
            inside = _all((i >= 0) & (i < axis.outputs) for i, axis in zip(at, plan.axes, strict=True))
            before = _join(outer, at[:-1], [axis.outputs for axis in plan.axes[:-1]])
            place = before * (plan.axes[-1].outputs * plan.inner) + (element - back[-1] * plan.inner)
            loaded[back] = (
                triton.load(index_ref.at[place], mask=inside, other=0).astype(jnp.int32),
                triton.load(ct_ref.at[place], mask=inside, other=0).astype(accumulator(ct_ref.dtype)),
            )
        for place in itertools.product(*(range(axis.stride) for axis in plan.axes)):
            total = jnp.zeros((_BLOCK,), accumulator(ct_ref.dtype))
            for back, i in windows_of(place, plan.axes):
                index, ct = loaded[back]
                total = total + jnp.where(index == i, ct, jnp.zeros_like(ct))
            at = [start * axis.stride + (p - axis.low) for start, p, axis in zip(starts, place, plan.axes, strict=True)]
            inside = _all((i >= 0) & (i < axis.inputs) for i, axis in zip(at, plan.axes, strict=True))
            before = _join(outer, at[:-1], [axis.inputs for axis in plan.axes[:-1]])
            to = (before * plan.axes[-1].inputs + at[-1]) * plan.inner + channel
            triton.store(out_ref.at[to], total.astype(ct_ref.dtype), mask=inside)

    return kernel


def windows_of(place: tuple[int, ...], axes: Any) -> Iterator[tuple[tuple[int, ...], int]]:
    """The windows that have an input which lies `place` after the beginning of a window.

    Yields:
      by how many windows earlier such a window begins, and the input's index in it.
    """
    earlier = (range(-(-(axis.size - at) // axis.stride)) for at, axis in zip(place, axes, strict=True))
    for back in itertools.product(*earlier):
        offset = [at + axis.stride * b for at, axis, b in zip(place, axes, back, strict=True)]
        yield back, int(np.ravel_multi_index(offset, [axis.size for axis in axes]))


def _split(number, sizes) -> list[Any]:
    """The digits of a number in a mixed base: each is below its size, and the first digit has no limit."""
    parts = []
    for size in reversed(sizes):
        parts.append(lax.rem(number, jnp.int32(size)))
        number = lax.div(number, jnp.int32(size))
    return [number, *reversed(parts)]


def _join(number, parts, sizes):
    """The inverse of `_split`."""
    for part, size in zip(parts, sizes, strict=True):
        number = number * size + part
    return number


def _all(conditions):
    """Whether all conditions hold, for each element of a block."""
    return functools.reduce(jnp.logical_and, conditions, jnp.ones((_BLOCK,), bool))
