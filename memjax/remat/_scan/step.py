"""The step of a scan, traced once: run it, run it keeping what its backward pass needs, run it backwards.

All on flat lists of arrays. `consts` are what the step closes over (parameters): the same at every step, so
neither they nor anything that depends on them alone is kept per step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax._core import check
from memjax._core.arrays import is_float
from memjax._core.compat import varying
from memjax._core.jaxpr import evaluate, nbytes
from memjax._core.lists import Arrays, drop, merge, pick
from memjax._core.min_cut import smallest_kept
from memjax._core.partition import Part


@dataclasses.dataclass(frozen=True)
class Step:
    """`f(carry, x) -> (carry, y)`, flat.

    Attributes:
      jaxpr: of (consts, carry, x) to (carry, y).
      consts: values of what `f` closes over.
      carry, x, y: types of the flat carry, and of one step's input and output.
      carry_tree, y_tree: to give the user's structure back.
    """

    jaxpr: Any
    consts: Arrays
    carry: Arrays
    x: Arrays
    y: Arrays
    carry_tree: Any
    y_tree: Any

    def run(self, consts: Sequence[Any], carry: Sequence[Any], x: Sequence[Any]) -> tuple[Arrays, Arrays]:
        """One step: (carry, y)."""
        out = evaluate(self.jaxpr, consts, [*carry, *x], differentiable=True)
        return out[: len(self.carry)], out[len(self.carry) :]

    @functools.cached_property
    def moving(self) -> list[bool]:
        """Which leaves of the carry change from step to step: the others come out as they went in."""
        n = len(self.carry)
        inputs, outputs = self.jaxpr.invars[:n], self.jaxpr.outvars[:n]
        return [given is not returned for given, returned in zip(inputs, outputs, strict=True)]

    @functools.cached_property
    def carry_nbytes(self) -> int:
        return sum(map(nbytes, self.carry))


def trace_step(f: Callable[..., Any], init: Any, xs: Any) -> tuple[Step, Arrays]:
    """`f` traced for a carry like `init` and slices of `xs`; with it the flat `init`, weak types made
    definite.

    Raises TypeError where `f` gives back a carry of another structure or type than it got.
    """
    init = jax.tree.map(jnp.asarray, init)
    x = jax.eval_shape(lambda xs: jax.tree.map(lambda a: a[0], xs), xs)
    leaves, tree = jax.tree.flatten(init)
    for _ in range(3):  # a weakly typed carry (a Python number) takes the type that the step gives back
        closed, shapes = jax.make_jaxpr(f, return_shape=True)(jax.tree.unflatten(tree, leaves), x)
        if not (isinstance(shapes, tuple) and len(shapes) == 2):
            raise TypeError(f"f must return a pair (carry, y), got {jax.tree.structure(shapes)}")
        out_tree, y_tree = (jax.tree.structure(shape) for shape in shapes)
        if out_tree != tree:  # type: ignore[operator]
            raise TypeError(f"f must return a carry of the structure it got, {tree}, but returned {out_tree}")
        out = closed.out_avals[: len(leaves)]
        definite = [_as_strong_as(leaf, aval) for leaf, aval in zip(leaves, out, strict=True)]
        if all(new is old for new, old in zip(definite, leaves, strict=True)):
            break
        leaves = definite
    paths = [jax.tree_util.keystr(path) or "the carry" for path, _ in jax.tree_util.tree_leaves_with_path(init)]
    for path, leaf, aval in zip(paths, leaves, out, strict=True):
        got = jax.typeof(leaf)
        if _essence(got) != _essence(aval):
            raise TypeError(
                f"f must return a carry of the type it got: {path} went in as {got.str_short()} and came "
                f"out as {aval.str_short()}; convert it inside f, or change init (inside shard_map, "
                f"jax.lax.pcast it)"
            )
    step = Step(
        jaxpr=closed.jaxpr,
        consts=list(closed.consts),
        carry=[jax.typeof(leaf) for leaf in leaves],
        x=jax.tree.leaves(x),
        y=list(closed.out_avals[len(leaves) :]),
        carry_tree=tree,
        y_tree=y_tree,
    )
    return step, leaves


def _essence(aval: Any) -> tuple[Any, ...]:
    return aval.shape, aval.dtype, varying(aval)


def _as_strong_as(leaf: Any, aval: Any) -> Any:
    if jax.typeof(leaf).weak_type and not (aval.weak_type and aval.dtype == leaf.dtype):
        return jax.lax.convert_element_type(leaf, aval.dtype)
    return leaf


def as_arrays(name: str, tree: Any) -> Any:
    """The tree, its leaves as arrays; types of arrays as they are."""

    def convert(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        is_text = isinstance(leaf, np.ndarray | np.generic) and not check.is_array(leaf)
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not is_text
        if isinstance(leaf, bool | int | float | complex) or is_array:
            return jnp.asarray(leaf)
        where = f"{name}{jax.tree_util.keystr(path)}"
        raise check.fail(TypeError, where, "an array or a number", leaf, "close over what is no array")

    return jax.tree_util.tree_map_with_path(convert, tree)


class Backward:
    """How to differentiate a `Step` for chosen consts and inputs, keeping the fewest bytes per step.

    Attributes:
      kept: types of what `keep` returns for `back`, one step's worth.
      kept_nbytes: their bytes.
    """

    def __init__(self, step: Step, wrt_consts: Sequence[bool], wrt_x: Sequence[bool]):
        self.step = step
        self.wrt_consts = list(wrt_consts)
        self.wrt_carry = [is_float(aval) for aval in step.carry]
        self.wrt_x = list(wrt_x)
        self.wrt = [*self.wrt_consts, *self.wrt_carry, *self.wrt_x]
        self.out_float = [is_float(aval) for aval in (*step.carry, *step.y)]

        avals = [*map(jax.typeof, step.consts), *step.carry, *step.x]
        treedef = []

        def forward(*inputs):
            out, vjp, rest = jax.vjp(functools.partial(self._floats, inputs), pick(inputs, self.wrt), has_aux=True)
            leaves, tree = jax.tree.flatten(vjp)
            treedef.append(tree)
            return [*merge(out, rest, self.out_float), *leaves]

        closed = jax.make_jaxpr(forward)(*avals)
        self._vjp_tree = treedef[0]
        jaxpr = closed.jaxpr
        n_out = len(self.out_float)
        outs, residuals = jaxpr.outvars[:n_out], jaxpr.outvars[n_out:]
        n_consts, n_carry = len(step.consts), len(step.carry)
        consts, carry, x = np.split(np.array(jaxpr.invars, object), [n_consts, n_consts + n_carry])
        kept = smallest_kept(jaxpr, [*consts, *jaxpr.constvars], x, residuals, lambda var: max(nbytes(var.aval), 1))
        self.kept = [var.aval for var in kept]
        self.kept_nbytes = sum(map(nbytes, self.kept))
        self._literals = list(closed.consts)
        known = [*jaxpr.constvars, *consts]
        self._keep = Part(jaxpr, [*known, *carry, *x], [*outs, *kept], effects=True)
        self._rebuild = Part(jaxpr, [*known, *x, *kept], residuals, effects=False)

    def _floats(self, inputs: Sequence[Any], chosen: Sequence[Any]) -> tuple[Arrays, Arrays]:
        step = self.step
        full = merge(chosen, drop(inputs, self.wrt), self.wrt)
        n_consts, n_carry = len(step.consts), len(step.carry)
        carry, y = step.run(full[:n_consts], full[n_consts : n_consts + n_carry], full[n_consts + n_carry :])
        return pick([*carry, *y], self.out_float), drop([*carry, *y], self.out_float)

    def keep(self, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """One step forward: (carry, y, kept)."""
        out = self._keep([*self._literals, *consts, *carry, *x])
        n_carry, n_out = len(self.step.carry), len(self.out_float)
        return out[:n_carry], out[n_carry:n_out], out[n_out:]

    def back(
        self, consts: Arrays, x: Arrays, kept: Arrays, ct_carry: Arrays, ct_y: Arrays
    ) -> tuple[Arrays, Arrays, Arrays]:
        """One step backward: cotangents of the chosen consts, of the carry's floats, and of the chosen x.

        `ct_carry` and `ct_y` hold cotangents of the float leaves only.
        """
        residuals = self._rebuild([*self._literals, *consts, *x, *kept])
        vjp = jax.tree.unflatten(self._vjp_tree, residuals)
        (cts,) = vjp([*ct_carry, *ct_y])
        n_consts, n_carry = sum(self.wrt_consts), sum(self.wrt_carry)
        return cts[:n_consts], cts[n_consts : n_consts + n_carry], cts[n_consts + n_carry :]
