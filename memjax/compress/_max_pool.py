"""Max-pooling that keeps where each maximum was, a byte per output, instead of its whole input."""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float


def max_pool(x: Float[Array, "..."], *, window_dimensions, window_strides, padding, base_dilation, window_dilation):
    """What the primitive `reduce_window_max` computes, with the same gradient: to the first of equal values.

    Keeps an index into the window, uint8, for every output: exact, whatever else is compressed. Windows of more than 256
    values and dilated ones keep the input.
    """
    window = _Window(x.shape, tuple(window_dimensions), tuple(window_strides), tuple(map(tuple, padding)))
    if math.prod(window.size) > 256 or any(d != 1 for d in (*base_dilation, *window_dilation)):
        return _plain(x, window, tuple(base_dilation), tuple(window_dilation))
    return _indexed(x, window)


class _Window(NamedTuple):
    """The input's shape, and by axis the window's size, strides and padding."""

    shape: tuple[int, ...]
    size: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]


def _least(dtype) -> Any:
    if dtype == jnp.bool_:
        return np.asarray(False)
    return np.asarray(-np.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min, dtype)


def _plain(x, window: _Window, base_dilation=None, window_dilation=None):
    shape = (window.size, window.strides, window.padding, base_dilation, window_dilation)
    return lax.reduce_window(x, _least(x.dtype), lax.max, *shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _indexed(x, window: _Window):
    return _plain(x, window)


def _forward(x, window: _Window):
    """The maxima and where they are, in one pass."""
    if any(k > s for k, s in zip(window.size, window.strides, strict=True)):
        x = lax.optimization_barrier(x)  # or the compiler would compute it once for every window that it is in
    shape = jax.eval_shape(lambda: _plain(x, window)).shape
    if 0 in shape:
        return _plain(x, window), jnp.zeros(shape, jnp.uint8)
    x = lax.pad(x, _least(x.dtype), [(low, high, 0) for low, high in window.padding])
    values = []
    for offset in itertools.product(*map(range, window.size)):
        stop = [at + (n - 1) * s + 1 for at, n, s in zip(offset, shape, window.strides, strict=True)]
        values.append(lax.slice(x, offset, stop, window.strides))
    out, index = values[0], jnp.zeros_like(values[0], jnp.uint8)
    for i, value in enumerate(values[1:], 1):
        is_next = (out == out) & ~(value <= out)  # the first NaN, if there is any
        out, index = jnp.maximum(out, value), jnp.where(is_next, jnp.uint8(i), index)
    return out, index


def _backward(window: _Window, index, ct):
    """Windows begin every `stride`: inputs as far behind such a beginning, their `place`, have alike neighbours.

    The window that begins there has them at offset `place`, the one before it at `place` + stride, and so on. So there is
    an array for every place, with an element for every beginning; the gradient is all of them, woven into one another.
    """
    lows = [low for low, _ in window.padding]
    # So many windows begin before the input's end, whether there are outputs for all of them or not.
    begun = [-(-(n + low) // s) for n, low, s in zip(window.shape, lows, window.strides, strict=True)]
    if 0 in (*begun, *ct.shape):
        return (jnp.zeros(window.shape, ct.dtype),)
    zero, places = jnp.zeros((), ct.dtype), []
    for place in itertools.product(*map(range, window.strides)):
        earlier = [range(-(-(k - at) // s)) for at, k, s in zip(place, window.size, window.strides, strict=True)]
        total = jnp.zeros(begun, ct.dtype)
        for back in itertools.product(*earlier):
            offset = [at + s * b for at, s, b in zip(place, window.strides, back, strict=True)]
            i = jnp.uint8(np.ravel_multi_index(offset, window.size))
            edges = [(b, n - m - b, 0) for b, n, m in zip(back, begun, ct.shape, strict=True)]
            total = total + lax.pad(jnp.where(index == i, ct, zero), zero, edges)
        places.append(total)
    if any(k > s for k, s in zip(window.size, window.strides, strict=True)):
        places = lax.optimization_barrier(places)  # or all would be computed for every element of the gradient
    strided = [axis for axis, s in enumerate(window.strides) if s > 1]
    woven = jnp.stack(places).reshape(*(window.strides[axis] for axis in strided), *begun)
    for axis in reversed(
        strided
    ):  # one by one: JAX does not reshape several axes of an explicitly sharded array at once
        left = strided.index(axis)
        woven = jnp.moveaxis(woven, left, left + 1 + axis)
        woven = lax.collapse(woven, left + axis, left + axis + 2)
    return (lax.slice(woven, lows, [low + n for low, n in zip(lows, window.shape, strict=True)]),)


_indexed.defvjp(_forward, _backward)
