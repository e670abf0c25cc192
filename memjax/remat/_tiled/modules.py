"""Flax modules and classes of modules, tiled: a module of the same kind, with the same variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from memjax._core.arguments import objects_in
from memjax.remat import _checkpoint_modules

Wrap = Callable[..., Callable[..., Any]]


class _CreatesVariables(Exception):
    """A module of Linen is being initialised."""


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

    return _checkpoint_modules.wrapped(wrap, target, ())
