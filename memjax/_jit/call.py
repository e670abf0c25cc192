"""The arguments of a jitted step.

NNX objects are replaced by the values of their variables, and static arguments are split off.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from memjax._core.arguments import is_nnx, objects_in, with_changes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Values:
    """The values of the variables of an NNX object among arguments, in its place."""

    state: Any


def _is_values(value: Any) -> bool:
    return isinstance(value, Values)


def state_of(apart: tuple, named: dict[str, Any]) -> nnx.State:
    """The values of all objects, from arguments that are taken apart."""
    leaves = jax.tree.leaves((apart, named), is_leaf=_is_values)
    return nnx.State(dict(enumerate(leaf.state for leaf in leaves if _is_values(leaf))))


def taken_apart(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple, dict[str, Any]]:
    """(structure of the NNX objects, arguments with `Values` in place of each). The structure is None if there is no object."""
    objects = objects_in((args, kwargs))
    if not objects:
        return None, args, kwargs
    graph, state = nnx.split(objects)
    values = iter([Values(state.get(i, nnx.State({}))) for i in range(len(objects))])
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_nnx)
    args, kwargs = jax.tree.unflatten(tree, [next(values) if is_nnx(leaf) else leaf for leaf in leaves])
    return graph, args, kwargs


class Pure:
    """`f` as a function of arguments that are taken apart. It gives (result, what changes in the objects).

    Args:
      f: the function.
      graph: the structure of the objects.

    Attributes:
      returned: numbers of values that are results even where they do not change: those that are donated.
    """

    def __init__(self, f: Callable[..., Any], graph: Any):
        self._f, self._graph = f, graph
        self.returned: set[int] = set()

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_values)
        states = [leaf.state for leaf in leaves if _is_values(leaf)]
        objects = iter(nnx.merge(self._graph, nnx.State(dict(enumerate(states)))))
        args, kwargs = jax.tree.unflatten(tree, [next(objects) if _is_values(leaf) else leaf for leaf in leaves])
        out, changes = with_changes(self._f, args, kwargs)
        values = jax.tree.leaves(states)
        pairs = enumerate(zip(changes, values, strict=True))
        return out, [value if change is None and i in self.returned else change for i, (change, value) in pairs]


def donated_values(f: Callable[..., Any], options: dict[str, Any], args: tuple, kwargs: dict[str, Any]) -> set[int]:
    """Numbers of the values of objects that `jax.jit` with these options gives `f` to keep."""
    of_arguments = {name: value for name, value in options.items() if name.startswith(("static_", "donate_"))}
    does_nothing = functools.wraps(f)(lambda *args, **kwargs: None)
    every = jax.tree.leaves(jax.jit(does_nothing, **of_arguments).trace(*args, **kwargs).args_info, is_leaf=_is_values)
    infos = [info for one in every if _is_values(one) for info in jax.tree.leaves(one, is_leaf=_is_info)]
    return {i for i, info in enumerate(infos) if info.donated}


def _is_info(value: Any) -> bool:
    return hasattr(value, "donated")
