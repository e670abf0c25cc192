"""The line that puts a step under `memjax.jit`, for a program to paste."""

from __future__ import annotations

import ast
import keyword
import types
from collections.abc import Callable, Mapping
from typing import Any


def line(
    f: Callable[..., Any] | None = None,
    options: Mapping[str, Any] = types.MappingProxyType({}),
    code: Mapping[str, str | None] = types.MappingProxyType({}),
) -> str:
    """`step = memjax.jit(f, ...)`, which is valid Python. A comment names what cannot be written, such as shardings.

    Args:
      f: the step. A lambda, a method of an object and what else has no name that is known is called `train_step`.
      options: of `memjax.jit`.
      code: options as code.
    """
    written: dict[str, str | None] = {
        name: _written(value) for name, value in ({"budget": "40GiB"} if f is None else options).items()
    }
    written |= code
    left = [name for name, text in written.items() if text is None]
    arguments = [f"{name}={text}" for name, text in written.items() if text is not None]
    return f"step = memjax.jit({', '.join([_name(f), *arguments])})" + f"  # and your {', '.join(left)}" * bool(left)


def _name(f: Any) -> str:
    name = getattr(f, "__qualname__", "").rpartition("<locals>.")[2]
    is_name = all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split("."))
    return name if is_name and not isinstance(f, types.MethodType | type) else "train_step"


def _written(value: Any) -> str | None:
    """A value as code; None if that does not give it back."""
    try:
        return repr(value) if ast.literal_eval(repr(value)) == value else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
