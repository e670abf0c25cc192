"""Compresses the calls of Flax modules, which keep their fields, variables and names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.core.lift
import flax.linen as nn
import jax
from flax import nnx
from flax.linen.transforms import lift_transform

from memjax._core import check
from memjax._core.arguments import is_array, is_nnx, put_changes, with_changes
from memjax._core.compat import is_tracer
from memjax._core.patterns import matches
from memjax.compress._transform.array_codecs import ArrayCodecs
from memjax.compress._transform.differentiable import call_compressed
from memjax.compress._transform.keep.costs import Which


def _methods_of(cls: type, base: type) -> list[str]:
    """The names of `__call__` and of the public methods that `cls` has beside those of `base`: what others may call."""
    members: dict[str, Any] = {}
    for parent in reversed(cls.__mro__):
        if parent not in base.__mro__:
            members.update(vars(parent))

    def is_public(name, member):
        is_bound = callable(member) and hasattr(member, "__get__") and not isinstance(member, type | staticmethod)
        return is_bound and not name.startswith("_")

    return [name for name, member in members.items() if name == "__call__" or is_public(name, member)]


# Linen


def compressed_linen_module(module: nn.Module, codecs: ArrayCodecs, which: Which) -> nn.Module:
    """The module, compressed as a whole. `which` selects by named scopes, of which each Linen module makes one."""
    # Inside another module's call `module` is registered there already: it is that object which has to change.
    result = module if module.parent is not None else module.clone()
    object.__setattr__(result, "__class__", compressed_linen_class(type(module), codecs, which))
    return result


def compressed_linen_class(original: type[nn.Module], codecs: ArrayCodecs, which: Which) -> type[nn.Module]:
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
    is_outside = lambda name: name == "setup" or getattr(getattr(original, name), "nowrap", False)
    names = [name for name in _methods_of(original, nn.Module) if not is_outside(name)]
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
    _compress_submodules_where_bound(new, original, codecs, in_part)
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
        object.__setattr__(bound, "__class__", compressed_linen_class(type(part), codecs, which))
        object.__setattr__(bound, _FROM_OUTSIDE, True)
        return bound

    def __getattribute__(self, name):
        value = original.__getattribute__(self, name)
        return as_seen(self, name, value) if isinstance(value, nn.Module | tuple | list | Mapping) else value

    def __getattr__(self, name):
        return as_seen(self, name, original.__getattr__(self, name))

    new.bind, new.__getattribute__, new.__getattr__ = bind, __getattribute__, __getattr__


_FROM_OUTSIDE = "_memjax_reads_from_outside"  # an attribute of bound modules, which is False within their calls


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


# NNX


def compressed_nnx_module(module: nnx.Module, codecs: ArrayCodecs, which: Which) -> nnx.Module:
    """A module with the same variables: compressed as a whole, or in the submodules that `which` selects.

    Of these, calls and public methods are compressed, and those of the submodules in them. What runs inside a compressed call
    has the original classes: nothing is compressed twice.
    """
    where = which.where
    new = nnx.merge(*nnx.split(module))  # other module objects with the same variables
    if where is None or where == "conv":
        parts = [new]
    else:
        which = dataclasses.replace(which, where=None)
        wanted = where if callable(where) else lambda path, module: matches(path, where)
        paths = {name: node for name, node in _modules(new) if name}
        parts = [node for name, node in paths.items() if callable(node) and wanted(name, node)]
        if not parts:
            raise check.fail(ValueError, "where", f"a match for one of the submodules {[*paths]}", where)
    classes = _Classes(codecs, which)
    for part in parts:
        for name, node in _modules(part):
            classes.wrap(node, is_part=not name)
    return new


def _modules(node: Any) -> list[tuple[str, nnx.Module]]:
    """The modules in a module, or in a list of modules, with their paths. A module comes before those in it."""
    found = [("/".join(map(str, path)), each) for path, each in nnx.iter_graph(node) if isinstance(each, nnx.Module)]
    return sorted(found, key=lambda pair: pair[0])


class _Classes:
    """The classes of compressed modules, by those of the original ones."""

    def __init__(self, codecs: ArrayCodecs, which: Which):
        self._codecs, self._which = codecs, which
        self._compressed: dict[tuple[type, bool], type] = {}
        self._original: dict[type, type] = {}

    def wrap(self, module: nnx.Module, *, is_part: bool) -> None:
        """Give a module the compressed class: of a part that was to be compressed, or of a module in one."""
        original = type(module)
        if isinstance(module, nnx.List | nnx.Dict) or original in self._original:
            return
        key = original, is_part
        if key not in self._compressed:
            calls = {name: self._call(original, name, is_part=is_part) for name in _methods_of(original, nnx.Module)}
            # The new class keeps the original's name, because modules may be named after their class.
            members = {**calls, "__module__": original.__module__, "__doc__": original.__doc__}
            kind: Any = type(original)
            self._compressed[key] = new = kind(original.__name__, (original,), members)
            self._original[new] = original
        object.__setattr__(module, "__class__", self._compressed[key])

    def _call(self, original: type, name: str, *, is_part: bool) -> Callable[..., Any]:
        method, is_whole = getattr(original, name), is_part and name == "__call__"
        which = self._which if is_whole else dataclasses.replace(self._which, needed=False)

        @functools.wraps(method)
        def call(module, *args, **kwargs):
            if is_whole or self._is_differentiable(name, module, args, kwargs):
                return self._run(method, module, args, kwargs, which)
            return method(module, *args, **kwargs)

        return call

    def _is_differentiable(self, name: str, module: nnx.Module, args: Any, kwargs: Any) -> bool:
        """Whether a call may be part of what is differentiated: methods that set something up, or run eagerly, are left alone."""
        arrays = [leaf for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_nnx) if is_array(leaf)]
        return bool(arrays or name == "__call__") and any(
            map(is_tracer, [*arrays, *jax.tree.leaves(nnx.state(module))])
        )

    def _run(self, method: Callable[..., Any], module: Any, args: Any, kwargs: Any, which: Which) -> Any:
        given, tree = jax.tree.flatten((args, kwargs), is_leaf=is_nnx)
        # Random streams and other objects that a call is given may be changed by it, too.
        objects = [module, *filter(is_nnx, given)]
        graph, state = nnx.split(objects)
        # Variables of the module are named by their paths in it, as in errors and in `Layers.weights`.
        others = {f"argument {i}": state[i] for i in range(1, len(objects)) if i in state}
        lasting = {**state.get(0, {}), **others}

        def pure(lasting, passing):
            own = {name: lasting[name] for name in lasting if name not in others}
            given_states = {i: lasting[f"argument {i}"] for i in range(1, len(objects)) if f"argument {i}" in others}
            now = nnx.State({0: nnx.State(own), **given_states})
            copies = nnx.merge(graph, now, copy=True)  # or `state` itself would change
            for _, copy in _modules(copies):
                if type(copy) in self._original:
                    object.__setattr__(copy, "__class__", self._original[type(copy)])
            module, rest = copies[0], iter(copies[1:])
            given_now = [next(rest) if is_nnx(leaf) else new for leaf, new in zip(given, passing, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, given_now)
            return with_changes(method, (module, *args), kwargs)

        passing = [None if is_nnx(leaf) else leaf for leaf in given]
        out, changes = call_compressed(pure, lasting, passing, user=type(module), codecs=self._codecs, which=which)
        put_changes(objects, changes)
        return out
