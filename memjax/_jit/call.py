"""The arguments of a jitted step.

NNX objects are replaced by the values of their variables, and static arguments are split off.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from memjax._core import check
from memjax._core.arguments import Static, is_nnx, objects_in, with_changes


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


class Statics:
    """Which arguments `jax.jit` takes to be static.

    Args:
      f: the function.
      static_argnums, static_argnames: as for `jax.jit`.
    """

    def __init__(self, f: Callable[..., Any], static_argnums: Any, static_argnames: Any):
        listed = lambda given, kind: () if given is None else (given,) if isinstance(given, kind) else tuple(given)
        numbers: Sequence[int] = listed(static_argnums, int)
        names: Sequence[str] = listed(static_argnames, str)
        try:
            parameters = list(inspect.signature(f).parameters)
        except (TypeError, ValueError):
            parameters = []
        count = len(parameters)
        self._numbers = {number % count if number < 0 and count else number for number in numbers}
        self._numbers |= {parameters.index(name) for name in names if name in parameters}
        self._names = {*names, *(parameters[i] for i in self._numbers if i < count)}

    def marked(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments, with the static ones marked as such."""
        marked = tuple(Static(arg) if i in self._numbers else arg for i, arg in enumerate(args))
        return marked, {name: Static(value) if name in self._names else value for name, value in kwargs.items()}

    def split(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple, dict[str, Any]]:
        """(the static values, the other arguments)."""
        if not self._numbers and not self._names:
            return (), args, kwargs
        numbered = tuple((i, arg) for i, arg in enumerate(args) if i in self._numbers)
        named = tuple((name, kwargs[name]) for name in sorted(kwargs) if name in self._names)
        others = tuple(arg for i, arg in enumerate(args) if i not in self._numbers)
        for name, value in (*((f"argument {i}", arg) for i, arg in numbered), *named):
            try:
                hash(value)
            except TypeError:
                fix = "pass a tuple or a number, or do not name it static"
                raise check.fail(TypeError, name, "hashable, as it is static", value, fix) from None
        return (numbered, named), others, {name: value for name, value in kwargs.items() if name not in self._names}
