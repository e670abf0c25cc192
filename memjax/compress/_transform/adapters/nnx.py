"""Compresses the calls of NNX modules, which keep their state and the name of their class."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from memjax._core import check
from memjax.compress._transform.adapters.function import call_compressed
from memjax.compress._transform.array_codecs import ArrayCodecs
from memjax.compress._transform.keep.which import Which, matches


def compressed_module(module: nnx.Module, codecs: ArrayCodecs, which: Which) -> nnx.Module:
    """A module with the same variables: compressed as a whole, or in the submodules that `which` selects."""
    where = which.where
    if where is None or where == "conv":
        return _with_compressed_call(_copy(module), codecs, which)
    inside = dataclasses.replace(which, where=None)
    wanted = where if callable(where) else lambda path, module: matches(path, where)
    paths: list[str] = []
    matched: list[str] = []

    def rebuild(node: Any, path: tuple[str, ...], seen: dict[int, Any]) -> Any:
        if id(node) in seen:
            return seen[id(node)]
        if isinstance(node, nnx.Module):
            name = "/".join(path)
            if path:
                paths.append(name)
            seen[id(node)] = new = _copy(node)
            if path and callable(node) and wanted(name, node):
                matched.append(name)
                return _with_compressed_call(new, codecs, inside)  # what is inside is compressed with it
            for key, value in vars(node).items():
                vars(new)[key] = rebuild(value, (*path, key), seen)
            return new
        if isinstance(node, list | tuple) and not hasattr(node, "_fields"):
            return type(node)(rebuild(value, (*path, str(i)), seen) for i, value in enumerate(node))
        if isinstance(node, dict):
            return {key: rebuild(value, (*path, str(key)), seen) for key, value in node.items()}
        return node

    new = rebuild(module, (), {})
    if not matched:
        raise check.fail(ValueError, "where", f"a match for one of the submodules {paths}", where)
    return new


def _copy(module: nnx.Module) -> nnx.Module:
    """Another object with the same attributes, variables included."""
    new = object.__new__(type(module))
    vars(new).update(vars(module))
    return new


def _with_compressed_call(module: nnx.Module, codecs: ArrayCodecs, which: Which) -> nnx.Module:
    original = type(module)

    @functools.wraps(original.__call__)
    def call(self, *args, **kwargs):
        return _call(original.__call__, self, args, kwargs, codecs, which)

    name = original.__name__
    # The class keeps its name, after which modules may be named.
    new = type(name, (original,), {"__call__": call, "__module__": original.__module__, "__doc__": original.__doc__})
    object.__setattr__(module, "__class__", new)
    return module


def _call(function: Callable[..., Any], module: Any, args: Any, kwargs: Any, codecs: ArrayCodecs, which: Which) -> Any:
    graph, state = nnx.split(module)

    def pure(state, passing):
        args, kwargs = passing
        copy = nnx.merge(graph, state, copy=True)  # or `state` itself would change
        out = function(copy, *args, **kwargs)
        new_graph, new_state = nnx.split(copy)
        if new_graph != graph:
            raise ValueError(
                f"f_or_module must be a module whose calls change the values of its variables alone, but a call of "
                f"{type(module).__name__} adds, removes or replaces variables, submodules or other attributes: "
                "make them in __init__, and change a variable by variable[...] = value"
            )
        before, after = jax.tree.leaves(state), jax.tree.leaves(new_state)
        updates = [None if old is new else new for old, new in zip(before, after, strict=True)]
        return out, updates

    out, updates = call_compressed(pure, state, (args, kwargs), user=type(module), codecs=codecs, which=which)
    leaves, tree = jax.tree.flatten(state)
    if any(update is not None for update in updates):
        new = [old if update is None else update for old, update in zip(leaves, updates, strict=True)]
        nnx.update(module, jax.tree.unflatten(tree, new))
    return out
