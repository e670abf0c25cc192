"""Max-pooling that keeps the index of each maximum in its window, a byte per output, instead of its input."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, UInt8

from memjax._core.arrays import accumulator, is_float
from memjax._core.barriers import barrier
from memjax._core.program.dataflow import is_literal
from memjax._core.program.jaxpr import Program, bind, calls_in_place, inside, read, same_program
from memjax.compress._codecs.kernels import call_on_whole_arrays, is_of_one_device
from memjax.compress._error_bounded.launch import why_not

_FEW = 64  # the kernel is compiled for windows of at most so many values, because it is unrolled over them


def max_pool(x: Float[Array, ...], *, window_dimensions, window_strides, padding, base_dilation, window_dilation):
    """What the primitive `reduce_window_max` computes, with the same gradient, which goes to the first of equal values.

    It keeps an exact index into the window, uint8, for every output. Windows of more than 256 values, dilated windows and
    negative padding keep the input instead.
    """
    axes = axes_of(x.shape, window_dimensions, window_strides, padding)
    is_dilated = any(d != 1 for d in (*base_dilation, *window_dilation))
    if is_dilated or not has_index(axes):
        return _plain(x, axes, base_dilation, window_dilation)
    return _indexed(x, axes)


class Axis(NamedTuple):
    """An axis of the arrays of a max-pooling.

    Attributes:
      inputs: number of elements of the input.
      size, stride: those of the windows.
      low, high: padding before and after the input.
    """

    inputs: int
    size: int
    stride: int
    low: int
    high: int

    @property
    def outputs(self) -> int:
        return max((self.low + self.inputs + self.high - self.size) // self.stride + 1, 0)

    @property
    def begun(self) -> int:
        """Number of windows that begin before the input's end, with an output or without."""
        return -(-(self.inputs + self.low) // self.stride)


Axes = tuple[Axis, ...]


def has_index(axes: Axes) -> bool:
    """Whether a byte says where in its window each maximum is."""
    return math.prod(axis.size for axis in axes) <= 256 and all(min(axis.low, axis.high) >= 0 for axis in axes)


def axes_of(shape: Sequence[int], sizes: Sequence[int], strides: Sequence[int], padding: Sequence[Any]) -> Axes:
    return tuple(Axis(n, k, s, low, high) for n, k, s, (low, high) in zip(shape, sizes, strides, padding, strict=True))


def _least(dtype) -> Any:
    if dtype == jnp.bool_:
        return np.asarray(False)
    return np.asarray(-np.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min, dtype)


def _plain(x, axes: Axes, base_dilation=None, window_dilation=None):
    sizes, strides = tuple(axis.size for axis in axes), tuple(axis.stride for axis in axes)
    padding = tuple((axis.low, axis.high) for axis in axes)
    return lax.reduce_window(x, _least(x.dtype), lax.max, sizes, strides, padding, base_dilation, window_dilation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _indexed(x, axes: Axes):
    return _plain(x, axes)


def with_index(x, axes: Axes):
    """The maxima and where they are, uint8, in one pass."""
    if _overlap(axes):
        x = barrier(x)  # or the compiler would compute it once for every window that it is in
    shape = tuple(axis.outputs for axis in axes)
    if 0 in shape:
        return _plain(x, axes), jnp.zeros(shape, jnp.uint8)
    x = lax.pad(x, _least(x.dtype), [(axis.low, axis.high, 0) for axis in axes])
    values = []
    for offset in itertools.product(*(range(axis.size) for axis in axes)):
        stop = [at + (axis.outputs - 1) * axis.stride + 1 for at, axis in zip(offset, axes, strict=True)]
        values.append(lax.slice(x, offset, stop, [axis.stride for axis in axes]))
    out, index = values[0], jnp.zeros_like(values[0], jnp.uint8)
    for i, value in enumerate(values[1:], 1):
        is_next = (out == out) & ~(value <= out)  # the first NaN, if there is any
        out, index = jnp.maximum(out, value), jnp.where(is_next, jnp.uint8(i), index)
    return out, index


def from_index(axes: Axes, index, ct):
    """The gradient of the input, a tuple of one: each cotangent goes to where its window's maximum is."""
    woven = functools.partial(_woven, axes)
    aval = jax.typeof(ct)
    is_whole = is_of_one_device(aval) and all(axis is None for axis in aval.sharding.spec)
    if not (_overlap(axes) and 0 not in ct.shape and why_not() is None and is_whole):
        return woven(index, ct)
    plan = plan_of(axes)
    if plan.inputs >= 2**31 or math.prod(axis.size for axis in axes) > _FEW or plan.share_of_lanes < 0.5:
        return woven(index, ct)
    by_kernel = lambda index, ct: (max_pool_gradient(plan, index, ct).reshape([axis.inputs for axis in axes]),)
    return lax.platform_dependent(index, ct, cuda=by_kernel, default=woven)


def _woven(axes: Axes, index, ct):
    """The gradient in plain JAX. Windows begin every `stride`; the `place` of an input is its distance from the last beginning.

    The window that begins there has the input at offset `place`, the window before it at `place` + stride, and so on. So there is
    an array for every place, with an element for every beginning, and the gradient interleaves these arrays.
    """
    if any(axis.begun == 0 or axis.outputs == 0 for axis in axes):
        none = [(0, axis.inputs - axis.outputs, 0) for axis in axes]
        return (lax.pad(jnp.zeros_like(ct), jnp.zeros((), ct.dtype), none),)
    wide, places = ct.astype(accumulator(ct.dtype)), []
    zero, begun = jnp.zeros((), wide.dtype), [axis.begun for axis in axes]
    for place in itertools.product(*(range(axis.stride) for axis in axes)):
        total = lax.pad(jnp.zeros_like(wide), zero, [(0, axis.begun - axis.outputs, 0) for axis in axes])
        for back, i in windows_of(place, axes):
            edges = [(b, axis.begun - axis.outputs - b, 0) for b, axis in zip(back, axes, strict=True)]
            total = total + lax.pad(jnp.where(index == jnp.uint8(i), wide, zero), zero, edges)
        places.append(total.astype(ct.dtype))
    if _overlap(axes):
        places = barrier(places)  # or all would be computed for every element of the gradient
    strided = [i for i, axis in enumerate(axes) if axis.stride > 1]
    woven = jnp.stack(places).reshape(*(axes[i].stride for i in strided), *begun)
    # One by one: JAX does not reshape several axes of an explicitly sharded array at once.
    for axis in reversed(strided):
        left = strided.index(axis)
        woven = jnp.moveaxis(woven, left, left + 1 + axis)
        woven = lax.collapse(woven, left + axis, left + axis + 2)
    ends = [axis.low + axis.inputs for axis in axes]
    return (lax.slice(woven, [axis.low for axis in axes], ends),)


def _overlap(axes: Axes) -> bool:
    return any(axis.size > axis.stride for axis in axes)


def plan_of(axes: Axes) -> Plan:
    is_whole = lambda axis: axis.size == axis.stride == 1 and axis.low == 0 and axis.inputs == axis.outputs
    first = next((i for i, axis in enumerate(axes) if not is_whole(axis)), 0)
    last = next((i for i in reversed(range(len(axes))) if not is_whole(axes[i])), len(axes) - 1)
    outer, inner = (math.prod(axis.inputs for axis in others) for others in (axes[:first], axes[last + 1 :]))
    return Plan(outer, axes[first : last + 1], inner)


_indexed.defvjp(with_index, from_index)


# Moves ReLUs from before a max-pooling to behind it: the same values and gradients, with less to compute and to keep.
#
# The ReLU then has a fraction of the values. Its output is often the next convolution's input, from which its mask
# follows; before pooling the mask has to be kept.

_POOLING = "reduce_window_max"
_DILATIONS = "base_dilation", "window_dilation"


def evaluate_pools_first(
    program: Program, inputs: Sequence[Any], *, replace: dict[str, Callable[[Any, list[Any]], list[Any]]]
) -> list[Any]:
    """The outputs of a program whose only calls are those with a derivative of their own.

    Args:
      replace: by the name of a primitive, a function of an equation and its inputs that does the same.
    """
    relus = _relus_before_pooling(program)
    env = program.given(inputs)
    for eqn in program.eqns:
        values = read(env, eqn.invars)
        name, first = eqn.primitive.name, eqn.invars[0] if eqn.invars else None
        if eqn.outvars and eqn.outvars[0] in relus:
            outs = values
        elif name in replace:
            with inside(eqn):
                outs = replace[name](eqn, values)
        else:
            outs = bind(eqn, values)
        if name == _POOLING and not is_literal(first) and first in relus:
            with inside(relus[first]):
                outs = [jax.nn.relu(outs[0])]
        env.update(zip(eqn.outvars, outs, strict=True))
    return read(env, program.outvars)


def _relus_before_pooling(program: Program) -> dict[Any, Any]:
    """The ReLUs that only a max-pooling reads, by their outputs."""
    readers = program.flow.consumers
    relus = {}
    for eqn in program.eqns:
        if eqn.primitive.name == "custom_jvp_call" and len(eqn.outvars) == 1:
            [out] = eqn.outvars
            pools = [_is_pooling(reader) for reader in readers.get(out, [])]
            if pools == [True] and not any(out is var for var in program.outvars) and _is_relu(eqn):
                relus[out] = eqn
    return relus


def _is_pooling(eqn: Any) -> bool:
    """Whether an equation takes maxima of windows. No window may be all padding: a ReLU would turn its -inf into zero."""
    names = "window_dimensions", "window_strides", "padding"
    if eqn.primitive.name != _POOLING or any(d != 1 for name in _DILATIONS for d in eqn.params[name]):
        return False
    last = lambda axis: (axis.outputs - 1) * axis.stride - axis.low  # where the last window begins
    axes = axes_of(eqn.invars[0].aval.shape, *(eqn.params[name] for name in names))
    return all(axis.inputs > 0 and axis.low < axis.size and last(axis) < axis.inputs for axis in axes)


def _is_relu(eqn: Any) -> bool:
    """Whether the equation is `jax.nn.relu`: the JVPs of both (value and tangent) trace to the same program."""
    if len(eqn.invars) != 1 or not is_float(eqn.invars[0].aval):
        return False
    body = calls_in_place(eqn.params["call_jaxpr"], differentiable=False)
    if [inner.primitive.name for inner in body.eqns] != ["max"]:
        return False  # before its derivative is asked for
    aval = eqn.invars[0].aval

    def derivative(f):
        traced = jax.make_jaxpr(lambda x, tangent: jax.jvp(f, (x,), (tangent,)))(aval, aval)
        return calls_in_place(traced, differentiable=False)

    return same_program(derivative(lambda x: bind(eqn, [x])[0]), derivative(jax.nn.relu))


# The gradient for overlapping windows, as a Pallas kernel that writes every element once. XLA's version of the same sums
# writes an array for each place (`_woven`) and reads all of them again.

_BLOCK, _WARPS = 1024, 4


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
    plan: Plan, index: UInt8[Array, ...], ct: Float[Array, ...], *, interpret: bool = False
) -> Float[Array, n]:
    """The gradient of the input, flat, from the index of each maximum in its window. `plan.inputs` must be below 2^31."""
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
    """Each program adds up `_BLOCK` windows' neighbours for all places: see `_woven`."""

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
    """The windows that have an input which lies `place` after the beginning of a window: by how many windows earlier each
    begins, and the input's index in it.
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
