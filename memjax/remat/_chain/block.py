"""One block of a chain, traced once: run it, run it keeping what its backward pass needs, run it backwards.

Everything is a flat list of arrays. `p` are the leaves of the block's parameters and what it closes over, which exist anyhow.
`x` are the leaves of its input, which the chain holds for as long as they are needed. The block keeps the smallest set of values
from which its backward pass follows without repeating matrix products and the like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero

from memjax._core import check
from memjax._core.arrays import is_float, zeros
from memjax._core.backward import Backward
from memjax._core.backward.derivatives import Static, perturbed
from memjax._core.barriers import barrier
from memjax._core.lists import Arrays, drop, merge, pick
from memjax._core.program.jaxpr import axis_sizes, evaluate, is_literal, with_axes


class Block:
    """`f(params, x) -> y`, or `-> (y, aux)`; float leaves of y carry gradients, aux does not.

    Attributes:
      jaxpr: of (p, x) to (y, aux).
      consts: values of what `f` closes over; with the leaves of the parameters behind them they are `p`.
      p, x, y, aux: types of the leaves.
      x_vars, y_vars: the variables of `jaxpr` that hold x and y.
      axes: sizes of the named axes that collectives of the block run over.
      y_tree, aux_tree: to give the user's structure back.
      run: (p, x) to (y, aux), as a program that equal blocks share. It must not be differentiated.
      keep: (p, x) to (y, aux). Differentiating it keeps what the backward pass needs.
    """

    def __init__(self, f: Callable[..., Any], params: Any, x: Any, has_aux: bool):
        def with_aux(params, x):
            out = f(params, x)
            if not has_aux:
                return out, ()
            if not (isinstance(out, tuple) and len(out) == 2):
                raise TypeError(
                    f"with has_aux=True each block must return a pair (y, aux), got {jax.tree.structure(out)}"
                )
            return out[0], lax.stop_gradient(out[1])

        closed, (y, aux) = jax.make_jaxpr(with_aux, return_shape=True)(params, x)
        self.y_tree, self.aux_tree = jax.tree.structure(y), jax.tree.structure(aux)
        self.jaxpr, self.consts = closed.jaxpr, list(closed.consts)
        self.axes = axis_sizes(closed.jaxpr)
        n_params, n_y = len(jax.tree.leaves(params)), len(jax.tree.leaves(y))
        variables = [*self.jaxpr.constvars, *self.jaxpr.invars]
        self.n_p = len(self.consts) + n_params
        self.p = [var.aval for var in variables[: self.n_p]]
        self.x_vars, self.y_vars = variables[self.n_p :], self.jaxpr.outvars[:n_y]
        self.x = [var.aval for var in self.x_vars]
        self.y, self.aux = list(closed.out_avals[:n_y]), list(closed.out_avals[n_y:])
        self.y_float = [is_float(aval) for aval in self.y]
        self._backwards: dict[tuple[bool, ...], Backward] = {}  # no cache that outlives the block, with its constants
        self.run = jax.jit(self.evaluate)
        self.keep = jax.custom_vjp(self.run)
        self.keep.defvjp(self._keep, self._back, symbolic_zeros=True)

    def _flat(self, inputs: Arrays) -> Arrays:
        n = len(self.consts)
        return evaluate(self.jaxpr, inputs[:n], inputs[n:], differentiable=True)

    def evaluate(self, p: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        """(y, aux), traced into the program that calls it."""
        out = self._flat([*p, *x])
        return out[: len(self.y)], out[len(self.y) :]

    def handed_on(self, x_mask: Sequence[bool]) -> tuple[bool, ...]:
        """Flags for the leaves of the output: whether they are leaves of the input that `x_mask` marks."""
        marked = set(pick(self.x_vars, x_mask))
        return tuple(not is_literal(var) and var in marked for var in self.y_vars)

    def backward(self, wrt: tuple[bool, ...]) -> Backward:
        """How to differentiate the block with respect to the leaves of (p, x) that are chosen."""
        if wrt not in self._backwards:
            out_float = [*self.y_float, *[False] * len(self.aux)]
            backward = self._backwards[wrt] = Backward(self._flat, [*self.p, *self.x], wrt, out_float)
            # Programs of their own: equal blocks share them.
            backward.keep, backward.back = jax.jit(backward.keep), jax.jit(backward.back)  # type: ignore[method-assign]
        return self._backwards[wrt]

    def _keep(self, p: Arrays, x: Arrays) -> tuple[tuple[Arrays, Arrays], Any]:
        wrt = perturbed([*p, *x])
        p, x = [leaf.value for leaf in p], [leaf.value for leaf in x]
        check.known_sizes("remat.chain", (p, x))
        out, kept = self.backward(wrt).keep([*p, *x])
        n = len(self.y)
        saved = together([*out[:n], *kept])  # these arrays are kept, and not others that the compiler prefers
        return (saved[:n], out[n:]), (Static(wrt), p, x, saved[n:])

    def _back(self, saved: Any, cts: Any) -> tuple[Arrays, Arrays]:
        wrt, p, x, kept = saved
        (p, x, kept), cts = after(pick(cts[0], self.y_float), (p, x, kept))
        cts = together(with_axes(self.backward(wrt.value).back, self.axes)([*p, *x], kept, cts))
        cts = merge(cts, [None] * (len(wrt.value) - len(cts)), wrt.value)
        return cts[: self.n_p], cts[self.n_p :]


def after(cts: Sequence[Any], values: Any) -> tuple[Any, Arrays]:
    """(values, cts): the values may only be used once the gradients are there, so nothing is recomputed early.

    Cotangents that are known to be zero become zeros.
    """
    is_zero = [isinstance(ct, SymbolicZero) for ct in cts]
    nonzero = drop(cts, is_zero)
    leaves, tree = jax.tree.flatten(values)
    out = barrier([*nonzero, *leaves]) if nonzero else leaves
    cts = merge([zeros(ct.aval) for ct in pick(cts, is_zero)], out[: len(nonzero)], is_zero)
    return jax.tree.unflatten(tree, out[len(nonzero) :]), cts


def together(arrays: Arrays) -> Arrays:
    """The arrays. None can be used before all are there, so no gradient of a parameter is put off."""
    return barrier(arrays)
