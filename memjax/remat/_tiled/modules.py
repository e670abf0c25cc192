"""Flax modules and classes of modules, tiled: a module of the same kind, with the same variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from memjax.remat import _checkpoint_modules

Wrap = Callable[..., Callable[..., Any]]


class _CreatesVariables(Exception):
    """A module of Linen is being initialised."""


def wrapped_module(tile: Wrap, target: Any) -> Any | None:
    """The module or class of modules whose `__call__` is tiled by `tile(f, leading=...)`; None where `target` is neither."""
    cls = target if isinstance(target, type) else type(target)
    # Linen's function takes variables and keys before the arguments, NNX's its state.
    leading = 2 if issubclass(cls, nn.Module) else 1

    def wrap(run: Callable[..., Any], static_argnums: Any) -> Callable[..., Any]:
        @functools.wraps(run)
        def results(variables, *args, **kwargs):
            out, after = run(variables, *args, **kwargs)
            before: Any = jax.tree.structure(variables)
            if before != jax.tree.structure(after):
                raise _CreatesVariables
            if any(a is not b for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(variables), strict=True)):
                raise ValueError(
                    f"f must not change its variables, got {cls.__name__}: each tile would change them. Switch off what "
                    "updates statistics or counts random numbers (use_running_average=True, deterministic=True)"
                )
            return out

        def call(variables, *args, **kwargs):
            try:
                return tile(results, leading=leading)(variables, *args, **kwargs), variables
            except _CreatesVariables:
                return run(variables, *args, **kwargs)

        return call

    return _checkpoint_modules.wrapped(wrap, target, ())
