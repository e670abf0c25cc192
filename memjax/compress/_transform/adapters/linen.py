"""Compresses the calls of Linen modules, which keep their fields, variables and names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.core.lift
import flax.linen as nn
from flax.linen.transforms import lift_transform

from memjax.compress._transform.adapters.function import call_compressed
from memjax.compress._transform.adapters.methods import methods_of
from memjax.compress._transform.array_codecs import ArrayCodecs
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
    # Linen names submodules after their classes.
    new.__name__, new.__qualname__, new.__module__ = original.__name__, original.__qualname__, original.__module__
    return new


def _is_outside(cls: type[nn.Module], name: str) -> bool:
    """Whether a method sets up a module, or is called without variables."""
    return name == "setup" or getattr(getattr(cls, name), "nowrap", False)


def _where_bound(compressed: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a module that is compressed where it has variables. Elsewhere nothing is computed from any."""

    @functools.wraps(compressed)
    def call(module, *args, **kwargs):
        return (plain if module.scope is None else compressed)(module, *args, **kwargs)

    return call
