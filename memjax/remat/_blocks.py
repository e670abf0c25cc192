"""Runs of consecutive steps as plain scans: the units that schedules move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from memjax.remat._step import Arrays, Backward, Step, pick


class Pull(NamedTuple):
    """What the backward pass carries: cotangents of the carry's floats, and of the chosen consts so far."""

    carry: Arrays
    consts: Arrays


class Blocks:
    """Blocks of steps of one scan over `xs` (flat), which are sliced where they are used and never copied.

    `ct_ys` are the cotangents of the float outputs, each of shape (length, ...), or None for one that is
    zero.
    """

    def __init__(self, step: Step, consts: Arrays, xs: Arrays, length: int, reverse: bool):
        self.step, self.consts, self.xs = step, consts, xs
        self.length, self.reverse = length, reverse

    def first_row(self, start: Any, n: int) -> Any:
        """The first of the rows of `xs` that `n` steps from `start` on use."""
        return self.length - start - n if self.reverse else start

    def _row(self, i: Any) -> Any:
        return self.length - 1 - i if self.reverse else i

    def _x(self, i: Any) -> Arrays:
        return [at(x, self._row(i)) for x in self.xs]

    def advance(self, carry: Arrays, start: Any, n: int) -> Arrays:
        """The carry after `n` steps from `start` on."""
        return _loop(n, lambda carry, i: (self.step.run(self.consts, carry, self._x(start + i))[0], []), carry)[0]

    def emit(self, carry: Arrays, start: Any, n: int) -> tuple[Arrays, Arrays]:
        """(carry, ys): the same with outputs, in the order of their rows."""

        def body(carry, i):
            return self.step.run(self.consts, carry, self._x(start + i))

        carry, ys = _loop(n, body, carry)
        return carry, self._rows(ys)

    def keep(self, backward: Backward, carry: Arrays, start: Any, n: int) -> tuple[Arrays, Arrays, Arrays]:
        """(carry, ys, kept): the same, keeping what `back` needs."""
        n_y = len(self.step.y)

        def body(carry, i):
            carry, y, kept = backward.keep(self.consts, carry, self._x(start + i))
            return carry, [*y, *kept]

        carry, out = _loop(n, body, carry)
        return carry, self._rows(out[:n_y]), out[n_y:]

    def back(
        self, backward: Backward, kept: Arrays, start: Any, n: int, pull: Pull, ct_ys: Sequence[Any]
    ) -> tuple[Pull, Arrays]:
        """Backpropagate through `n` steps: (pull, cotangents of the chosen xs in the order of their rows)."""
        y_types = pick(self.step.y, backward.out_float[len(self.step.carry) :])

        def body(pull, i):
            j = start + i
            ct_y = [
                zeros(aval) if ct is None else at(ct, self._row(j)) for aval, ct in zip(y_types, ct_ys, strict=True)
            ]
            kept_here = [at(k, i) for k in kept]
            d_consts, d_carry, d_x = backward.back(self.consts, self._x(j), kept_here, pull.carry, ct_y)
            return Pull(d_carry, [a + b for a, b in zip(pull.consts, d_consts, strict=True)]), d_x

        pull, d_xs = _loop(n, body, pull, reverse=True)
        return pull, self._rows(d_xs)

    def _rows(self, stacked: Arrays) -> Arrays:
        return [jnp.flip(a, 0) for a in stacked] if self.reverse else stacked


def _loop(n: int, body: Any, carry: Any, *, reverse: bool = False) -> tuple[Any, Arrays]:
    if n == 1:  # no loop to set up
        carry, out = body(carry, 0)
        return carry, [a[None] for a in out]
    return lax.scan(body, carry, jnp.arange(n, dtype=jnp.int32), reverse=reverse)


def at(stack: Any, i: Any) -> Any:
    """One row of a stack."""
    return lax.dynamic_index_in_dim(stack, i, 0, keepdims=False)


def put(stack: Any, row: Any, i: Any) -> Any:
    """The stack with one row replaced."""
    return lax.dynamic_update_index_in_dim(stack, row, i, 0)


def zeros(aval: Any, leading: tuple[int, ...] = ()) -> Any:
    """Zeros of a type, with leading dimensions; varying over the same mesh axes inside `shard_map`."""
    value = jnp.zeros((*leading, *aval.shape), aval.dtype)
    axes = tuple(aval.manual_axis_type.varying)
    return lax.pcast(value, axes, to="varying") if axes else value
