"""The step of a scan, traced once: run it, run it keeping what its backward pass needs, run it backwards; and blocks of steps.

Everything is a flat list of arrays. `consts` are what the step closes over (parameters): the same at every step, so
neither they nor anything that depends on them alone is kept per step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memjax._core.arrays import as_array, is_float, zeros
from memjax._core.backward import Backward
from memjax._core.clear_errors import call_errors
from memjax._core.compat import varying
from memjax._core.lists import Arrays, pick
from memjax._core.program.jaxpr import axis_sizes, evaluate, nbytes


class ArrayType(NamedTuple):
    """What two arrays have in common that can stand in for each other."""

    shape: tuple[int, ...]
    dtype: Any
    varying: frozenset[str]  # the mesh axes of a surrounding `shard_map` that values differ along

    @classmethod
    def of(cls, aval: Any, leading: tuple[int, ...] = ()) -> ArrayType:
        return cls((*leading, *aval.shape), aval.dtype, varying(aval))


@dataclasses.dataclass(frozen=True)
class Step:
    """`f(carry, x) -> (carry, y)` on flat lists of arrays.

    Attributes:
      jaxpr: of (consts, carry, x) to (carry, y).
      consts: values of what `f` closes over.
      carry, x, y: types of the flat carry, and of one step's input and output.
      carry_tree, y_tree: to give the user's structure back.
      axes: sizes of the named axes that collectives of the step run over.
    """

    jaxpr: Any
    consts: Arrays
    carry: Arrays
    x: Arrays
    y: Arrays
    carry_tree: Any
    y_tree: Any
    axes: dict[str, int]

    def run(self, consts: Sequence[Any], carry: Sequence[Any], x: Sequence[Any]) -> tuple[Arrays, Arrays]:
        """One step: (carry, y)."""
        out = evaluate(self.jaxpr, consts, [*carry, *x], differentiable=True)
        return out[: len(self.carry)], out[len(self.carry) :]

    @functools.cached_property
    def moving(self) -> list[bool]:
        """Flags for the leaves of the carry: whether they change from step to step."""
        n = len(self.carry)
        inputs, outputs = self.jaxpr.invars[:n], self.jaxpr.outvars[:n]
        return [received is not returned for received, returned in zip(inputs, outputs, strict=True)]

    @functools.cached_property
    def carry_nbytes(self) -> int:
        return sum(map(nbytes, self.carry))


def trace_step(f: Callable[..., Any], init: Any, xs: Any) -> tuple[Step, Arrays]:
    """`f` traced for a carry like `init` and slices of `xs`; with it the flat `init`, weak types made
    definite.

    Raises TypeError where `f` gives back a carry of another structure or type than it got.
    """
    init = jax.tree.map(as_array, init)
    leaves, tree = jax.tree.flatten(xs)
    x = jax.tree.unflatten(tree, jax.make_jaxpr(lambda *leaves: [a[0] for a in leaves])(*leaves).out_avals)
    leaves, tree = jax.tree.flatten(init)
    for _ in range(3):  # a weakly typed carry (a Python number) takes the type that the step gives back
        carry = jax.tree.unflatten(tree, leaves)
        with call_errors("f", f, {"a carry": carry, "an x": x}):
            closed, shapes = jax.make_jaxpr(f, return_shape=True)(carry, x)
        if not (isinstance(shapes, tuple) and len(shapes) == 2) or jax.tree.structure(shapes[0]) != tree:  # type: ignore[operator]
            raise _of_jax(f, init, xs)
        out = closed.out_avals[: len(leaves)]
        definite = [_as_strong_as(leaf, aval) for leaf, aval in zip(leaves, out, strict=True)]
        if all(new is old for new, old in zip(definite, leaves, strict=True)):
            break
        leaves = definite
    if any(ArrayType.of(jax.typeof(leaf)) != ArrayType.of(aval) for leaf, aval in zip(leaves, out, strict=True)):
        raise _of_jax(f, init, xs)
    step = Step(
        jaxpr=closed.jaxpr,
        consts=list(closed.consts),
        carry=[jax.typeof(leaf) for leaf in leaves],
        x=jax.tree.leaves(x),
        y=list(closed.out_avals[len(leaves) :]),
        carry_tree=tree,
        y_tree=jax.tree.structure(shapes[1]),
        axes=axis_sizes(closed.jaxpr),
    )
    return step, leaves


def _of_jax(f: Callable[..., Any], init: Any, xs: Any) -> Exception:
    """What `jax.lax.scan` raises for a step that returns no carry like the one it got: it says which part differs, and how."""
    try:
        with jax.disable_jit(False):
            jax.lax.scan(f, init, xs, None if jax.tree.leaves(xs) else 1)
    except TypeError as error:
        return error
    return TypeError("f must return (carry, y) with a carry of the structure and types that it got")


def _as_strong_as(leaf: Any, aval: Any) -> Any:
    if jax.typeof(leaf).weak_type and not (aval.weak_type and aval.dtype == leaf.dtype):
        return jax.lax.convert_element_type(leaf, aval.dtype)
    return leaf


class StepBackward(Backward):
    """How to differentiate a `Step` with respect to some of its consts and inputs, and all floats of its carry."""

    def __init__(self, step: Step, wrt_consts: Sequence[bool], wrt_x: Sequence[bool]):
        self.step = step
        self.wrt_consts, self.wrt_x = list(wrt_consts), list(wrt_x)
        self.wrt_carry = [is_float(aval) for aval in step.carry]
        sizes = len(step.consts), len(step.carry), len(step.x)

        def mask(*group: bool) -> list[bool]:
            return [value for value, size in zip(group, sizes, strict=True) for _ in range(size)]

        super().__init__(
            lambda inputs: evaluate(step.jaxpr, inputs[: sizes[0]], inputs[sizes[0] :], differentiable=True),
            [*map(jax.typeof, step.consts), *step.carry, *step.x],
            [*self.wrt_consts, *self.wrt_carry, *self.wrt_x],
            [is_float(aval) for aval in (*step.carry, *step.y)],
            invariant=mask(True, False, False),
            lost=mask(False, True, False),
        )


# Runs of consecutive steps as plain scans: the units that schedules move.


class Pull(NamedTuple):
    """What the backward pass carries: cotangents of the carry's floats, and of the chosen consts so far."""

    carry: Arrays
    consts: Arrays


class Blocks:
    """Blocks of steps of one scan over `xs` (flat), which are sliced where they are used and never copied.

    Outputs (ys, and cotangents of xs) go straight into rows of whole arrays, which the loops update in place.
    """

    def __init__(
        self, backward: StepBackward, consts: Arrays, xs: Arrays, length: int, reverse: bool, unroll: int | bool = 1
    ):
        self.step, self.backward, self.consts, self.xs = backward.step, backward, consts, xs
        self.length, self.reverse, self.unroll = length, reverse, unroll

    def _row(self, i: Any) -> Any:
        return self.length - 1 - i if self.reverse else i

    def _x(self, i: Any) -> Arrays:
        return [at(x, self._row(i)) for x in self.xs]

    def _write(self, stacks: Arrays, rows: Arrays, i: Any) -> Arrays:
        return [put(stack, row, self._row(i)) for stack, row in zip(stacks, rows, strict=True)]

    def advance(self, carry: Arrays, start: Any, n: int) -> Arrays:
        """The carry after `n` steps from `start` on."""
        return self.run(carry, [], start, n)[0]

    def run(
        self, carry: Arrays, ys: Arrays, start: Any, n: int, *, keeps: bool = False
    ) -> tuple[Arrays, Arrays, Arrays]:
        """(carry, ys, kept) after `n` steps, outputs written into `ys`, unless that is empty.

        With `keeps`, kept is what `back` needs.
        """

        def body(state, i):
            carry, ys = state
            x, kept = self._x(start + i), Arrays()
            if keeps:
                out, kept = self.backward.keep([*self.consts, *carry, *x])
                carry, y = out[: len(carry)], out[len(carry) :]
            else:
                carry, y = self.step.run(self.consts, carry, x)
            return (carry, self._write(ys, y, start + i) if ys else ys), kept

        (carry, ys), kept = self._loop(n, body, (carry, ys))
        return carry, ys, kept

    def back(
        self, kept: Arrays, start: Any, n: int, pull: Pull, d_xs: Arrays, ct_ys: Sequence[Any]
    ) -> tuple[Pull, Arrays]:
        """Backpropagate through `n` steps: (pull, cotangents of the chosen xs). None in `ct_ys` is zero."""
        y_types = pick(self.step.y, self.backward.out_float[len(self.step.carry) :])
        n_consts = len(pull.consts)
        n_before_x = n_consts + len(pull.carry)

        def body(state, i):
            (ct_carry, so_far), d_xs = state
            j = start + i
            ct_y = [
                zeros(aval) if ct is None else at(ct, self._row(j)) for aval, ct in zip(y_types, ct_ys, strict=True)
            ]
            kept_here = [at(k, i) for k in kept]
            cts = self.backward.back([*self.consts, *self._x(j)], kept_here, [*ct_carry, *ct_y])
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
