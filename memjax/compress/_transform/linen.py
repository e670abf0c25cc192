"""Compresses the calls of Linen modules, which keep their fields, variables and names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.core.lift
import flax.linen as nn
import jax
from flax.linen.transforms import lift_transform

from memjax.compress._transform.array_codecs import ArrayCodecs
from memjax.compress._transform.differentiable import call_compressed, methods_of
from memjax.compress._transform.keep.which import Which


def compressed_module(module: nn.Module, codecs: ArrayCodecs, which: Which) -> nn.Module:
    """The module, compressed as a whole. `which` selects by named scopes, of which each Linen module makes one."""
    # Inside another module's call `module` is registered there already: it is that object which has to change.
    result = module if module.parent is not None else module.clone()
    object.__setattr__(result, "__class__", compressed_class(type(module), codecs, which))
    return result


def compressed_class(original: type[nn.Module], codecs: ArrayCodecs, which: Which) -> type[nn.Module]:
    """A subclass of which calls, and calls of other methods, are compressed. What these call has the original class."""

    def compress(function, which, variables=True, rngs=True):
        def inner(scope_of, repack, variable_groups, rng_groups, *args, **kwargs):
            def pure(lasting, passing):
                args, kwargs = passing
                scope = scope_of(*lasting)
                out = function(scope, *args, **kwargs)
                return out, repack(scope)

            variables_and_keys = variable_groups, rng_groups
            return call_compressed(pure, variables_and_keys, (args, kwargs), user=original, codecs=codecs, which=which)

        return flax.core.lift.pack(inner, (variables,), (variables,), (rngs,), name="compressed", enable_kwargs=True)

    in_part = dataclasses.replace(which, needed=False)
    names = [name for name in methods_of(original, nn.Module) if not _is_outside(original, name)]
    each = {name: {"which": which if name == "__call__" else in_part} for name in names}
    new = lift_transform(compress, original, methods=each)
    for name in names:
        setattr(new, name, _where_bound(getattr(new, name), getattr(original, name)))

    def as_compressed(method: Any) -> Any:
        """What `apply` is to call for its argument `method`, which may be any function of a module."""
        method = getattr(method, "__func__", method)
        if not callable(method):
            return method  # a name, or None
        known = next((name for name in names if method in (getattr(original, name), getattr(new, name))), None)
        if known is not None:
            return getattr(new, known)

        def with_original(module, *args, **kwargs):
            object.__setattr__(module, "__class__", original)  # it is a clone, made for this call
            return method(module, *args, **kwargs)

        return lift_transform(compress, with_original, which=in_part)

    @functools.wraps(original.apply)
    def apply(self, variables, *args, method=None, **kwargs):
        return original.apply(self, variables, *args, method=as_compressed(method), **kwargs)

    new.apply = apply
    _compress_submodules_where_bound(new, original, codecs, dataclasses.replace(which, needed=False))
    # Linen names submodules after their classes.
    new.__name__, new.__qualname__, new.__module__ = original.__name__, original.__qualname__, original.__module__
    return new


def _compress_submodules_where_bound(new: Any, original: Any, codecs: ArrayCodecs, which: Which) -> None:
    """Let a module that `bind` gives have compressed submodules, for who calls them in its place.

    Linen reads submodules, too: while it sets the module up, and in the module's own calls. Those it gets as they are.
    """

    @functools.wraps(original.bind)
    def bind(self, *args, **kwargs):
        bound = original.bind(self, *args, **kwargs)
        object.__setattr__(bound, _FROM_OUTSIDE, True)
        return bound

    def as_seen(self, name, value):
        is_inner = name in ("parent", "scope") or name.startswith("_")
        if is_inner or not self.__dict__.get(_FROM_OUTSIDE) or self._state.in_setup:
            return value
        return jax.tree.map(submodule, value, is_leaf=lambda part: isinstance(part, nn.Module))

    def submodule(part):
        if not isinstance(part, nn.Module) or part.scope is None:
            return part
        bound = part.clone(parent=part.scope.rewound())  # in which the names of its own submodules are free
        object.__setattr__(bound, "__class__", compressed_class(type(part), codecs, which))
        object.__setattr__(bound, _FROM_OUTSIDE, True)
        return bound

    def __getattribute__(self, name):
        value = original.__getattribute__(self, name)
        return as_seen(self, name, value) if isinstance(value, nn.Module | tuple | list | Mapping) else value

    def __getattr__(self, name):
        return as_seen(self, name, original.__getattr__(self, name))

    new.bind, new.__getattribute__, new.__getattr__ = bind, __getattribute__, __getattr__


_FROM_OUTSIDE = "_memjax_reads_from_outside"  # an attribute of bound modules, which is False within their calls


def _is_outside(cls: type[nn.Module], name: str) -> bool:
    """Whether a method sets up a module, or is called without variables."""
    return name == "setup" or getattr(getattr(cls, name), "nowrap", False)


def _where_bound(compressed: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a module that is compressed where it has variables. Elsewhere nothing is computed from any."""

    @functools.wraps(compressed)
    def call(module, *args, **kwargs):
        if module.scope is None:
            return plain(module, *args, **kwargs)
        from_outside = module.__dict__.get(_FROM_OUTSIDE, False)
        object.__setattr__(module, _FROM_OUTSIDE, False)
        try:
            return compressed(module, *args, **kwargs)
        finally:
            object.__setattr__(module, _FROM_OUTSIDE, from_outside)

    return call
