"""A jitted step and its arguments.

NNX objects are replaced by the values of their variables, and static arguments are split off.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from flax import nnx

from memjax._core.arguments import Statics, is_nnx, objects_in, with_changes
from memjax._core.program.scopes import function_name


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


class Step:
    """A step whose NNX objects have a certain structure.

    Args:
      f, graph, options: as below.
      run: what runs in place of `f`, a function of arguments that are taken apart; None: `f` itself.

    Attributes:
      graph: that structure.
      f, name, options: the function, its name, and what `jax.jit` is given.
      plain: the step as it is written, under `jax.jit`, a function of arguments that are taken apart.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        graph: Any,
        options: dict[str, Any],
        run: Callable[..., Any] | None = None,
    ):
        self.graph, self.f, self.options = graph, f, options
        self.name = function_name(f)
        self.statics = Statics(f, options.get("static_argnums"), options.get("static_argnames"))
        self._run = run
        self._pure = Pure(f, graph)
        self.plain = self._jitted()

    def _jitted(self) -> Any:
        if self._run is not None:
            return self.with_options(self._run)
        if self.graph is None:
            return jax.jit(self.f, **self.options)
        return self.with_options(lambda *args, **kwargs: self._pure(args, kwargs))

    def with_options(self, run: Callable[..., Any], more: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """`run`, a function of the same arguments, under `jax.jit` as the step is, and with more options of the compiler."""
        options = self.options
        if more:
            options = options | {"compiler_options": {**(options.get("compiler_options") or {}), **more}}
        run = functools.wraps(self.f)(run)
        run.__name__ = self.name  # which a functools.partial has none of
        return jax.jit(run, **options)

    def trace(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The step as it is written, traced. What is donated and stays as it is becomes a result."""
        if self.graph is not None and self._run is None and self.options.keys() & {"donate_argnums", "donate_argnames"}:
            donated = donated_values(self.f, self.options, args, kwargs)
            if not donated <= self._pure.returned:
                self._pure.returned |= donated
                self.plain = self._jitted()
        return self.plain.trace(*args, **kwargs)


class Call(NamedTuple):
    """A step for certain arguments.

    Attributes:
      step: it.
      args, kwargs: its arguments, taken apart.
      leaves: of those that are dynamic.
      traced: the step as it is written, traced for them.
      elsewhere: numbers of leaves that the caller has in another memory.
    """

    step: Step
    args: tuple
    kwargs: dict[str, Any]
    leaves: list[Any]
    traced: Any
    elsewhere: frozenset[int] = frozenset()

    def with_leaves(self, others: Mapping[int, Any], step: Step | None = None) -> Call:
        """The call with other leaves, by number, in other memories, of this step or another."""
        step = self.step if step is None else step
        leaves = [others.get(i, leaf) for i, leaf in enumerate(self.leaves)]
        _, dynamic, named = step.statics.split(self.args, self.kwargs)
        tree = jax.tree.structure((dynamic, named))
        args, kwargs = step.statics.joined(self.args, self.kwargs, *jax.tree.unflatten(tree, leaves))
        return Call(step, args, kwargs, leaves, step.trace(args, kwargs), self.elsewhere | others.keys())

    @property
    def donated(self) -> set[int]:
        """Numbers of the leaves that are donated."""
        return {k for k, info in enumerate(jax.tree.leaves(self.traced.args_info)) if info.donated}
