"""Checkpoints or tiles the call of a Flax module or class; returns one of the same kind, with the same variables."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from flax.core import lift

from memjax._core.arguments import objects_in, put_changes, with_changes

Wrap = Callable[..., Callable[..., Any]]


def _linen_class(wrap: Wrap, cls: type[nn.Module], static: tuple[int, ...]) -> type[nn.Module]:
    """A subclass whose `__call__` is checkpointed by `wrap(f, static_argnums=...)`; positions count `self` as 0."""

    def transform(call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(scope_of, variables_of, variables, rngs, *args, **kwargs):
            def run(variables, rngs, *args, **kwargs):
                scope = scope_of(variables, rngs)
                return call(scope, *args, **kwargs), variables_of(scope)

            functools.update_wrapper(run, cls.__call__)
            shifted = tuple(position + 1 if position >= 0 else position for position in static)
            return wrap(run, static_argnums=shifted)(variables, rngs, *args, **kwargs)

        return lift.pack(inner, (True,), (True,), (True,), name="remat", enable_kwargs=True)

    transform.__name__ = "checkpoint"  # which is part of the class's name, as of nn.remat's
    return nn.transforms.lift_transform(transform, cls)


def _nnx_class(wrap: Wrap, cls: type[nnx.Module], static: tuple[int, ...]) -> type[nnx.Module]:
    """A subclass whose `__call__` is checkpointed by `wrap(f, static_argnums=...)`; positions count `self` as 0."""

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        graph, state = nnx.split(self)

        @functools.wraps(cls.__call__)
        def run(state, *args, **kwargs):
            module = nnx.merge(graph, state, copy=True)
            return with_changes(lambda module: cls.__call__(module, *args, **kwargs), (module,), {})

        out, changes = wrap(run, static_argnums=static)(state, *args, **kwargs)
        put_changes([self], changes)
        return out

    return type(cls)(  # type: ignore[misc]
        cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__, "__doc__": cls.__doc__}
    )


def wrapped(wrap: Wrap, target: Any, static: tuple[int, ...]) -> Any | None:
    """The checkpointed module, with the same variables, or class of modules; None where `target` is neither."""
    cls: Any = target if isinstance(target, type) else type(target)
    if not issubclass(cls, nn.Module | nnx.Module):
        return None
    is_linen = issubclass(cls, nn.Module)
    made: Any = (_linen_class if is_linen else _nnx_class)(wrap, cls, static)
    if target is cls:
        return made
    if is_linen and target.scope is None and not isinstance(target.parent, nn.Module):  # it has no variables yet
        fields = [field.name for field in dataclasses.fields(target) if field.init and field.name != "parent"]
        return made(**{name: getattr(target, name) for name in fields}, parent=None)
    copy = object.__new__(made)
    vars(copy).update(vars(target))
    return copy


class _CreatesVariables(Exception):
    """Raised if a call changes the tree structure of a Linen module's variables, as `init` does. The module then runs untiled."""


def wrapped_module(tile: Wrap, target: Any) -> Any | None:
    """The module or class of modules whose `__call__` is tiled by `tile(f, leading=...)`; None where `target` is neither."""
    cls = target if isinstance(target, type) else type(target)
    is_linen = issubclass(cls, nn.Module)
    leading = 2 if is_linen else 1  # Linen's function takes variables and keys before the arguments, NNX's its state

    def wrap(run: Callable[..., Any], static_argnums: Any) -> Callable[..., Any]:
        @functools.wraps(run)
        def results(variables, *args, **kwargs):
            out, after = run(variables, *args, **kwargs)
            if is_linen:
                before: Any = jax.tree.structure(variables)
                if before != jax.tree.structure(after):
                    raise _CreatesVariables
                after = [
                    a for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(variables), strict=True) if a is not b
                ]
            if any(change is not None for change in after):
                raise ValueError(
                    f"f must not change its variables, got {cls.__name__}: each tile would change them. Switch off what "
                    "updates statistics or counts random numbers (use_running_average=True, deterministic=True)"
                )
            return out

        def call(variables, *args, **kwargs):
            for given in objects_in((args, kwargs)):
                raise TypeError(
                    f"arguments of a tiled {cls.__name__} must hold arrays, got a {type(given).__name__}, whose state each tile "
                    "would change: make it an attribute of the module, and let nothing change in it"
                )
            try:
                return tile(results, leading=leading)(variables, *args, **kwargs), variables if is_linen else []
            except _CreatesVariables:
                return run(variables, *args, **kwargs)

        return call

    return wrapped(wrap, target, ())
