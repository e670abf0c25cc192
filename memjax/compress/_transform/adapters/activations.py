"""Which arguments of a function are activations. The others last until the backward pass anyway."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from memjax._core import check

Keys = set[int | str]
"""Positions of positional arguments, and names of the others."""


def activations(
    f: Callable[..., Any], inputs: bool | int | str | Sequence[int | str]
) -> Callable[[tuple[Any, ...], dict[str, Any]], Keys]:
    """A function from the arguments of a call of `f` to the keys of those that `inputs` names: see `memjax.compressed`."""
    if isinstance(inputs, bool):
        return lambda args, kwargs: {*range(len(args)), *kwargs} if inputs else set()
    wanted = "True, False, or positions and names of arguments"
    names = (inputs,) if isinstance(inputs, int | str) else inputs
    if not isinstance(names, Sequence):
        raise check.fail(TypeError, "inputs", wanted, inputs)
    names = [name if isinstance(name, str) else check.integer("inputs", name, what=wanted) for name in names]
    try:
        parameters = list(inspect.signature(f).parameters)
    except (TypeError, ValueError):  # a function without a signature that Python can see
        parameters = []

    def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Keys:
        keys: Keys = set()
        for name in names:
            key: int | str = name
            if isinstance(name, str):
                if name not in kwargs and name in parameters:
                    key = parameters.index(name)
            elif name < 0:
                key = len(args) + name
            if key not in kwargs and not (isinstance(key, int) and 0 <= key < len(args)):
                call = f"a call with {len(args)} positional arguments and the names {sorted(kwargs)}"
                raise ValueError(f"inputs must be positions and names of arguments, got {name!r} for {call}")
            keys.add(key)
        return keys

    return named


def split(args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Keys) -> tuple[Any, Any]:
    """The other arguments and the chosen ones: two calls' arguments, with None where the argument is in the other."""
    part = lambda inside: (
        tuple(arg if (i in chosen) == inside else None for i, arg in enumerate(args)),
        {name: arg if (name in chosen) == inside else None for name, arg in kwargs.items()},
    )
    return part(False), part(True)


def joined(others: Any, chosen_ones: Any, chosen: Keys) -> tuple[list[Any], dict[str, Any]]:
    """The inverse of `split`."""
    args = [chosen_ones[0][i] if i in chosen else arg for i, arg in enumerate(others[0])]
    return args, {name: chosen_ones[1][name] if name in chosen else arg for name, arg in others[1].items()}
