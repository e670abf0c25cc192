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

from memjax._core.arrays import as_array, is_float, zeros
from memjax._core.backward import Backward
from memjax._core.clear_errors import call_errors
from memjax._core.lists import Arrays, pick
from memjax._core.program.jaxpr import axis_sizes, evaluate, nbytes
from memjax._plan.schedule.choose import Steps
from memjax._plan.schedule.execute import Blocks, Execution, StepBack
from memjax._plan.schedule.store import ArrayType, at
from memjax._plan.schedule.unroll import ONE, Unroll


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

    def steps(self, length: int) -> Steps:
        """So many of them, for who chooses what to keep."""
        return Steps(length, self.step.carry, self.kept)


class Pull(NamedTuple):
    """What the backward pass carries: cotangents of the carry's floats, and of the chosen consts so far."""

    carry: Arrays
    consts: Arrays


class ScanBlocks(Blocks):
    """The steps of one scan over `xs` (flat), which are sliced where they are used and never copied."""

    def __init__(
        self,
        backward: StepBackward,
        consts: Arrays,
        xs: Arrays,
        length: int,
        reverse: bool,
        unroll: Unroll = ONE,
    ):
        super().__init__(backward.step.carry, backward.kept, length, reverse, unroll)
        self.backward, self.consts, self._step, self._xs = backward, consts, backward.step, xs

    def outputs(self) -> Arrays:
        return [zeros(aval, (self.length,)) for aval in self._step.y]

    def _x(self, i: Any) -> Arrays:
        return [at(x, self.row(i)) for x in self._xs]

    def step(self, carry: Arrays, i: Any, *, writes: bool, keeps: bool) -> tuple[Arrays, Arrays, Arrays]:
        x, kept = self._x(i), Arrays()
        if keeps:
            out, kept = self.backward.keep([*self.consts, *carry, *x])
            carry, y = out[: len(carry)], out[len(carry) :]
        else:
            carry, y = self._step.run(self.consts, carry, x)
        return carry, y if writes else [], kept

    def pull_back(
        self, execution: Execution, saved: Any, ct_carry: Arrays, ct_ys: Sequence[Any]
    ) -> tuple[Arrays, Arrays, Arrays]:
        """Cotangents of the chosen consts, of the carry's floats and of the chosen xs, after the forward pass of `execution`.

        `ct_ys` are the cotangents of the float outputs, each of shape (length, ...), or None for one that is zero.
        """
        consts = [jnp.zeros_like(c) for c in pick(self.consts, self.backward.wrt_consts)]
        none_yet = Pull(ct_carry, consts), [jnp.zeros_like(x) for x in pick(self._xs, self.backward.wrt_x)]
        pull, d_xs = execution.pull_back(saved, none_yet, self.step_back(ct_ys))
        return pull.consts, pull.carry, d_xs

    def step_back(self, ct_ys: Sequence[Any]) -> StepBack:
        """One step of the backward pass, with cotangents of outputs as for `pull_back`."""
        backward = self.backward
        y_types = pick(self._step.y, backward.out_float[len(self.carry) :])
        n_consts = sum(backward.wrt_consts)
        n_before_x = n_consts + sum(backward.wrt_carry)

        def step(cotangents: tuple[Pull, Arrays], kept: Arrays, i: Any) -> tuple[Pull, Arrays]:
            (ct_carry, so_far), d_xs = cotangents
            ct_y = [zeros(aval) if ct is None else at(ct, self.row(i)) for aval, ct in zip(y_types, ct_ys, strict=True)]
            cts = backward.back([*self.consts, *self._x(i)], kept, [*ct_carry, *ct_y])
            so_far = [a + b for a, b in zip(so_far, cts[:n_consts], strict=True)]
            ct_carry, d_x = cts[n_consts:n_before_x], cts[n_before_x:]
            return Pull(ct_carry, so_far), self.write(d_xs, d_x, i)

        return step
