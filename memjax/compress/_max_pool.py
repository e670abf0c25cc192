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

    def offsets(self):
        """Positions in the window, in the order of memory."""
        return itertools.product(*map(range, self.size))


def _least(dtype) -> Any:
    return np.asarray(-np.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min, dtype)


def _plain(x, window: _Window, base_dilation=None, window_dilation=None):
    shape = (window.size, window.strides, window.padding, base_dilation, window_dilation)
    return lax.reduce_window(x, _least(x.dtype), lax.max, *shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _indexed(x, window: _Window):
    return _plain(x, window)


def _forward(x, window: _Window):
    out = _plain(x, window)
    padded = lax.pad(x, _least(x.dtype), [(low, high, 0) for low, high in window.padding])
    index = jnp.zeros(out.shape, jnp.uint8)
    found = jnp.zeros(out.shape, bool)
    for i, offset in enumerate(window.offsets()):
        stop = [at + (n - 1) * s + 1 for at, n, s in zip(offset, out.shape, window.strides, strict=True)]
        here = lax.slice(padded, offset, stop, window.strides) == out
        index = jnp.where(here & ~found, jnp.uint8(i), index)
        found |= here
    return out, index


def _backward(window: _Window, index, ct):
    total = jnp.zeros((), ct.dtype)
    for i, offset in enumerate(window.offsets()):
        # Where an output's maximum is at this offset of its window; places of windows are `stride` apart.
        sizes = zip(offset, ct.shape, window.strides, window.padding, window.shape, strict=True)
        edges = [(at - low, n + low - at - (m - 1) * s - 1, s - 1) for at, m, s, (low, _), n in sizes]
        part = jnp.where(index == i, ct, jnp.zeros((), ct.dtype))
        total = total + lax.pad(part, jnp.zeros((), ct.dtype), edges)
    return (total,)


_indexed.defvjp(_forward, _backward)
