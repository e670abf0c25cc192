"""Compresses the calls of NNX modules, which keep their state and the name of their class."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from memjax._core import check
from memjax._core.arguments import is_array, is_nnx, put_changes, with_changes
from memjax._core.compat import is_tracer
from memjax.compress._transform.array_codecs import ArrayCodecs
from memjax.compress._transform.differentiable import call_compressed, methods_of
from memjax.compress._transform.keep.which import Which, matches

_CONTAINERS = nnx.List, nnx.Dict


def compressed_module(module: nnx.Module, codecs: ArrayCodecs, which: Which) -> nnx.Module:
    """A module with the same variables: compressed as a whole, or in the submodules that `which` selects.

    Of these, calls and public methods are compressed, and those of the submodules in them. What runs inside a compressed call
    has the original classes: nothing is compressed twice.
    """
    where = which.where
    new = _copied(module, {})
    if where is None or where == "conv":
        parts = [new]
    else:
        which = dataclasses.replace(which, where=None)
        wanted = where if callable(where) else lambda path, module: matches(path, where)
        paths = {name: node for name, node in _modules(new, ()) if name}
        parts = [node for name, node in paths.items() if callable(node) and wanted(name, node)]
        if not parts:
            raise check.fail(ValueError, "where", f"a match for one of the submodules {[*paths]}", where)
    classes = _Classes(codecs, which)
    for part in parts:
        for name, node in _modules(part, ()):
            classes.wrap(node, is_part=not name)
    return new


def _copied(node: Any, seen: dict[int, Any]) -> Any:
    """Other module objects with the same variables."""
    if id(node) in seen:
        return seen[id(node)]
    if isinstance(node, nnx.Module):
        seen[id(node)] = new = object.__new__(type(node))
        vars(new).update(vars(node))
        for key, value in vars(node).items():
            vars(new)[key] = _copied(value, seen)
        return new
    if isinstance(node, list | tuple) and not hasattr(node, "_fields"):
        return type(node)(_copied(value, seen) for value in node)
    if isinstance(node, dict):
        return {key: _copied(value, seen) for key, value in node.items()}
    return node


def _modules(node: Any, path: tuple[str, ...], seen: set[int] | None = None) -> Iterator[tuple[str, nnx.Module]]:
    """The modules in a module, or in lists, tuples and dicts, with their paths. The module itself comes first."""
    seen = set() if seen is None else seen
    if id(node) in seen:
        return
    if isinstance(node, nnx.Module):
        seen.add(id(node))
        yield "/".join(path), node
        inside = [*vars(node).items()]
    elif isinstance(node, list | tuple):
        inside = [(str(i), value) for i, value in enumerate(node)]
    elif isinstance(node, dict):
        inside = [(str(key), value) for key, value in node.items()]
    else:
        return
    for key, value in inside:
        yield from _modules(value, (*path, key), seen)


class _Classes:
    """The classes of compressed modules, by those of the original ones."""

    def __init__(self, codecs: ArrayCodecs, which: Which):
        self._codecs, self._which = codecs, which
        self._compressed: dict[tuple[type, bool], type] = {}
        self._original: dict[type, type] = {}

    def wrap(self, module: nnx.Module, *, is_part: bool) -> None:
        """Give a module the compressed class: of a part that was to be compressed, or of a module in one."""
        original = type(module)
        if isinstance(module, _CONTAINERS) or original in self._original:
            return
        key = original, is_part
        if key not in self._compressed:
            calls = {name: self._call(original, name, is_part=is_part) for name in methods_of(original, nnx.Module)}
            # The class keeps its name, after which modules may be named.
            members = {**calls, "__module__": original.__module__, "__doc__": original.__doc__}
            kind: Any = type(original)
            self._compressed[key] = new = kind(original.__name__, (original,), members)
            self._original[new] = original
        object.__setattr__(module, "__class__", self._compressed[key])

    def _unwrap(self, objects: list[Any]) -> None:
        for _, module in _modules(objects, ()):
            if type(module) in self._original:
                object.__setattr__(module, "__class__", self._original[type(module)])

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
            self._unwrap(copies)
            module, rest = copies[0], iter(copies[1:])
            given_now = [next(rest) if is_nnx(leaf) else new for leaf, new in zip(given, passing, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, given_now)
            return with_changes(method, (module, *args), kwargs)

        passing = [None if is_nnx(leaf) else leaf for leaf in given]
        out, changes = call_compressed(pure, lasting, passing, user=type(module), codecs=self._codecs, which=which)
        put_changes(objects, changes)
        return out
