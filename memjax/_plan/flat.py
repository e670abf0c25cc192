"""Traces a function of pytrees and NNX objects as a program of arrays, and rebuilds its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memjax._core.arguments import Parts, is_array, is_nnx
from memjax._core.arrays import is_float
from memjax._core.lists import drop, merge, pick
from memjax._core.program.jaxpr import trace


class Traced(NamedTuple):
    """The program of a function.

    Attributes:
      closed: the closed jaxpr. It returns the array leaves of the result, then the state of the NNX arguments.
      types: avals of the jaxpr's constants, then of its inputs.
      has_cotangent: for each output, whether it is differentiated: only the loss if the first result is a float scalar,
        otherwise all float leaves of the result.
      out_tree: structure of the result.
      is_dynamic: for each leaf of the result, whether it is an array.
      static: the leaves of the result that are not arrays.
    """

    closed: Any
    types: list[Any]
    has_cotangent: list[bool]
    out_tree: Any
    is_dynamic: list[bool]
    static: list[Any]


class Flat:
    """Flattens the arguments of `f` to arrays, and rebuilds its result from arrays.

    Attributes:
      arrays: the arrays in the arguments.
    """

    def __init__(self, f: Callable[..., Any], args: tuple, kwargs: dict[str, Any]):
        self._f = f
        self._parts = Parts(args, kwargs)
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_nnx)
        self._objects = [leaf for leaf in leaves if is_nnx(leaf)]
        self.arrays = [leaf if _is_abstract(leaf) else jnp.asarray(leaf) for leaf in self._parts.arrays]

    def program(self) -> Traced:
        """Traces `f` as a function of `arrays`."""
        found: list[Any] = []

        def run(*arrays: Any) -> list[Any]:
            args, kwargs, objects = self._parts.rebuild(arrays)
            leaves, tree = jax.tree.flatten(self._f(*args, **kwargs))
            dynamic = [is_array(leaf) for leaf in leaves]
            found.append((tree, dynamic, drop(leaves, dynamic)))
            return [*pick(leaves, dynamic), *_state(objects)]

        closed = trace(run, self.arrays, {})
        tree, dynamic, static = found[-1]
        types = [*map(jax.typeof, closed.consts), *closed.in_avals]
        return Traced(closed, types, _has_cotangent(closed.out_avals, tree, dynamic), tree, dynamic, static)

    def result(self, program: Traced, outs: Sequence[Any]) -> Any:
        """Updates the state that `f` changes in its NNX arguments, and returns its result."""
        n = sum(program.is_dynamic)
        inputs = set(program.closed.jaxpr.invars)
        changed = [var not in inputs for var in program.closed.jaxpr.outvars[n:]]
        if any(changed):  # what stays as it is may be a value of an outer trace, that cannot be written to
            structure: Any = jax.tree.structure(nnx.split(self._objects)[1])
            marks, state = (nnx.to_flat_state(structure.unflatten(leaves)) for leaves in (changed, outs[n:]))
            pairs = zip(marks, state, strict=True)
            nnx.update(
                self._objects, nnx.from_flat_state([new for mark, new in pairs if any(jax.tree.leaves(mark[1]))])
            )
        return jax.tree.unflatten(program.out_tree, merge(outs[:n], program.static, program.is_dynamic))

    def float_arrays_of(self, chosen: Mapping[int, Any]) -> list[bool]:
        """For each array, whether it is a float of a chosen positional argument and, in an NNX object, selected by the filter."""
        marks = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in self.arrays]  # an array may be there twice
        args, _, _ = self._parts.rebuild(marks)
        found: set[int] = set()
        for position, wanted in chosen.items():
            for leaf in jax.tree.leaves(args[position], is_leaf=is_nnx):
                found.update(map(id, jax.tree.leaves(nnx.split(leaf, wanted, ...)[1]) if is_nnx(leaf) else [leaf]))
        return [id(mark) in found and is_float(mark) for mark in marks]


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct | jax.Array)


def _state(objects: Sequence[Any]) -> list[Any]:
    return jax.tree.leaves(nnx.split(list(objects))[1]) if objects else []


def _has_cotangent(avals: Sequence[Any], tree: Any, dynamic: Sequence[bool]) -> list[bool]:
    n = sum(dynamic)
    floats = [i < n and is_float(aval) for i, aval in enumerate(avals)]
    children = tree.children()
    first = children[0] if tree.node_data() is not None and tree.node_data()[0] is tuple and children else tree
    is_loss = first.num_leaves == 1 and dynamic[0] and floats[0] and avals[0].shape == ()
    return [flag and (i == 0 or not is_loss) for i, flag in enumerate(floats)]
