"""Runs of consecutive steps as plain scans: the units that schedules move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from memjax._core.arrays import zeros
from memjax._core.lists import Arrays, pick
from memjax.remat._scan.step import Step, StepBackward


class Pull(NamedTuple):
    """What the backward pass carries: cotangents of the carry's floats, and of the chosen consts so far."""

    carry: Arrays
    consts: Arrays


class Blocks:
    """Blocks of steps of one scan over `xs` (flat), which are sliced where they are used and never copied.

    Outputs (ys, and cotangents of xs) go straight into rows of whole arrays, which the loops update in place.
    """

    def __init__(self, step: Step, consts: Arrays, xs: Arrays, length: int, reverse: bool, unroll: int | bool = 1):
        self.step, self.consts, self.xs = step, consts, xs
        self.length, self.reverse, self.unroll = length, reverse, unroll

    def _row(self, i: Any) -> Any:
        return self.length - 1 - i if self.reverse else i

    def _x(self, i: Any) -> Arrays:
        return [at(x, self._row(i)) for x in self.xs]

    def _write(self, stacks: Arrays, rows: Arrays, i: Any) -> Arrays:
        return [put(stack, row, self._row(i)) for stack, row in zip(stacks, rows, strict=True)]

    def advance(self, carry: Arrays, start: Any, n: int) -> Arrays:
        """The carry after `n` steps from `start` on."""
        return self._loop(n, lambda carry, i: (self.step.run(self.consts, carry, self._x(start + i))[0], []), carry)[0]

    def emit(self, carry: Arrays, ys: Arrays, start: Any, n: int) -> tuple[Arrays, Arrays]:
        """(carry, ys) after `n` steps, outputs written into `ys`."""

        def body(state, i):
            carry, ys = state
            carry, y = self.step.run(self.consts, carry, self._x(start + i))
            return (carry, self._write(ys, y, start + i)), []

        return self._loop(n, body, (carry, ys))[0]

    def keep(
        self, backward: StepBackward, carry: Arrays, ys: Arrays, start: Any, n: int
    ) -> tuple[Arrays, Arrays, Arrays]:
        """(carry, ys, kept) after `n` steps, with what `back` needs. Outputs are written unless `ys` is empty."""

        def body(state, i):
            carry, ys = state
            out, kept = backward.keep([*self.consts, *carry, *self._x(start + i)])
            carry, y = out[: len(carry)], out[len(carry) :]
            return (carry, self._write(ys, y, start + i) if ys else ys), kept

        (carry, ys), kept = self._loop(n, body, (carry, ys))
        return carry, ys, kept

    def back(
        self,
        backward: StepBackward,
        kept: Arrays,
        start: Any,
        n: int,
        pull: Pull,
        d_xs: Arrays,
        ct_ys: Sequence[Any],
    ) -> tuple[Pull, Arrays]:
        """Backpropagate through `n` steps: (pull, cotangents of the chosen xs).

        `ct_ys` are the cotangents of the float outputs, each of shape (length, ...), or None for one that is zero.
        """
        y_types = pick(self.step.y, backward.out_float[len(self.step.carry) :])
        n_consts = len(pull.consts)
        n_before_x = n_consts + len(pull.carry)

        def body(state, i):
            (ct_carry, so_far), d_xs = state
            j = start + i
            ct_y = [
                zeros(aval) if ct is None else at(ct, self._row(j)) for aval, ct in zip(y_types, ct_ys, strict=True)
            ]
            kept_here = [at(k, i) for k in kept]
            cts = backward.back([*self.consts, *self._x(j)], kept_here, [*ct_carry, *ct_y])
            so_far = [a + b for a, b in zip(so_far, cts[:n_consts], strict=True)]
            ct_carry, d_x = cts[n_consts:n_before_x], cts[n_before_x:]
            return (Pull(ct_carry, so_far), self._write(d_xs, d_x, j)), []

        return self._loop(n, body, (pull, d_xs), reverse=True)[0]

    def _loop(self, n: int, body: Any, state: Any, *, reverse: bool = False) -> tuple[Any, Arrays]:
        if n == 1:  # no loop to set up
            state, out = body(state, 0)
            return state, [a[None] for a in out]
        return lax.scan(body, state, jnp.arange(n, dtype=jnp.int32), reverse=reverse, unroll=self.unroll)


def at(stack: Any, i: Any) -> Any:
    """One row of a stack."""
    return lax.dynamic_index_in_dim(stack, i, 0, keepdims=False)


def put(stack: Any, row: Any, i: Any) -> Any:
    """The stack with one row replaced."""
    return lax.dynamic_update_index_in_dim(stack, row, i, 0)
