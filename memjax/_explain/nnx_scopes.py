"""Scopes for the modules of Flax NNX, which, unlike those of Linen, put none into JAX's name stacks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

_CONTAINERS = (nnx.List, nnx.Dict)
_LOCK = threading.Lock()
_ORIGINALS: list[tuple[type, str, Callable]] = []
_users = 0


class _Here(threading.local):
    """What this thread traces: whether it wants scopes, and the modules whose methods run, the innermost last."""

    def __init__(self) -> None:
        self.wanted = 0
        self.modules: list[Any] = []


_here = _Here()


@contextlib.contextmanager
def nnx_scopes() -> Iterator[None]:
    """While a function is traced in this thread, methods of NNX modules run in a scope: "layers[3]", within its owner's.

    The classes' methods are wrapped for that time, and are what they were afterwards; in other threads they do nothing new.
    """
    global _users
    with _LOCK:
        _users += 1
        if _users == 1:
            _wrap_all()
    _here.wanted += 1
    try:
        yield
    finally:
        _here.wanted -= 1
        with _LOCK:
            _users -= 1
            if not _users:
                while _ORIGINALS:
                    owner, name, method = _ORIGINALS.pop()
                    setattr(owner, name, method)


def _wrap_all() -> None:
    for owner in _subclasses(nnx.Module):
        for name, method in list(vars(owner).items()):
            public = name == "__call__" or not name.startswith("_")
            if public and inspect.isfunction(method) and not inspect.isgeneratorfunction(method):
                _ORIGINALS.append((owner, name, method))
                setattr(owner, name, _scoped(method))


def _subclasses(base: type) -> Iterator[type]:
    """Each class below `base` once."""
    pending: list[type] = list(base.__subclasses__())
    seen: set[type] = set(_CONTAINERS)
    while pending:
        owner = pending.pop()
        if owner not in seen:
            seen.add(owner)
            pending += owner.__subclasses__()
            yield owner


def _scoped(method: Callable) -> Callable:
    @functools.wraps(method)
    def scoped(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = _here.modules
        if not _here.wanted or (modules and modules[-1] is self):
            return method(self, *args, **kwargs)
        name = _name(modules[-1], self) if modules else type(self).__name__
        modules.append(self)
        try:
            with jax.named_scope(name):
                return method(self, *args, **kwargs)
        finally:
            modules.pop()

    return scoped


def _name(owner: Any, module: Any) -> str:
    """Where `module` is in `owner`, "layers[3]/mlp"; the name of its class if it is not in there."""
    pending: list[tuple[str, Any]] = [("", owner)]
    seen: set[int] = set()
    while pending:
        path, value = pending.pop(0)
        if value is module and path:
            return path
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, list | tuple | nnx.List):
            pending += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        elif isinstance(value, dict | nnx.Dict | nnx.Module):
            items = value.items() if isinstance(value, dict | nnx.Dict) else vars(value).items()
            pending += [(f"{path}/{key}" if path else str(key), item) for key, item in items]
    return type(module).__name__
