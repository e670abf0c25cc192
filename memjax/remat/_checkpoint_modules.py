"""`checkpoint` of Flax modules, classes and instances: a module of the same kind, with the same variables."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
from flax import nnx
from flax.core import lift

Wrap = Callable[..., Callable[..., Any]]


def linen_class(wrap: Wrap, cls: type[nn.Module], static: tuple[int, ...]) -> type[nn.Module]:
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


def linen_instance(wrap: Wrap, module: nn.Module, static: tuple[int, ...]) -> nn.Module:
    """The module as an instance of the class that `linen_class` gives, bound to variables if the module is."""
    cls = linen_class(wrap, type(module), static)
    if module.scope is None and not isinstance(module.parent, nn.Module):
        fields = [field.name for field in dataclasses.fields(module) if field.init and field.name != "parent"]
        return cls(**{name: getattr(module, name) for name in fields}, parent=None)
    copy = object.__new__(cls)
    vars(copy).update(vars(module))
    return copy


def nnx_class(wrap: Wrap, cls: type[nnx.Module], static: tuple[int, ...]) -> type[nnx.Module]:
    """A subclass whose `__call__` is checkpointed by `wrap(f, static_argnums=...)`; positions count `self` as 0."""

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, nnx.Module | nnx.Rngs | nnx.RngStream | nnx.Variable):
                raise TypeError(
                    f"arguments of a checkpointed {cls.__name__} must hold arrays, got a {type(argument).__name__}, whose "
                    "state could not be updated: make it an attribute of the module"
                )
        graph, state = nnx.split(self)

        @functools.wraps(cls.__call__)
        def run(state, *args, **kwargs):
            module = nnx.merge(graph, state, copy=True)
            out = cls.__call__(module, *args, **kwargs)
            after, state = nnx.split(module)
            if after != graph:
                raise ValueError(
                    f"{cls.__name__} must not add or remove variables inside a checkpoint: create them before"
                )
            return out, state

        out, state = wrap(run, static_argnums=static)(state, *args, **kwargs)
        nnx.update(self, state)
        return out

    return type(cls)(  # type: ignore[misc]
        cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__, "__doc__": cls.__doc__}
    )


def nnx_instance(wrap: Wrap, module: nnx.Module, static: tuple[int, ...]) -> nnx.Module:
    """An instance of the class that `nnx_class` gives, which shares the variables of the module."""
    copy = object.__new__(nnx_class(wrap, type(module), static))
    vars(copy).update(vars(module))
    return copy


def wrapped(wrap: Wrap, target: Any, static: tuple[int, ...]) -> Any | None:
    """The checkpointed module or class of modules; None where `target` is neither."""
    if isinstance(target, type):
        if issubclass(target, nn.Module):
            return linen_class(wrap, target, static)
        return nnx_class(wrap, target, static) if issubclass(target, nnx.Module) else None
    if isinstance(target, nn.Module):
        return linen_instance(wrap, target, static)
    return nnx_instance(wrap, target, static) if isinstance(target, nnx.Module) else None
