"""The step that a command is about: a factory of the user's makes it."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from memjax._core import check
from memjax._core.clear_errors import is_own
from memjax._core.compat import is_memjax, is_users

_WANTED = "(step, arguments), a function and a tuple of what it is called with"
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_SAYS_NO_MORE = "--------------------"  # JAX: that it has removed its internal frames


class CommandError(ValueError):
    """Something in a command that its user can put right."""


def made(target: str, devices: Sequence[Any] | None = None) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The step and its arguments, by the factory of this name. If it takes `devices`, it is given these, or those of JAX."""
    module, _, name = target.partition(":")
    if not name or module.endswith(".py") or not all(part.isidentifier() for part in module.split(".")):
        fix = "name the module, not its file, and the function, such as train:make_step"
        raise CommandError(f"FACTORY must be PACKAGE.MODULE:FACTORY, got {target!r}: {fix}")
    found = _imported(module)
    if not hasattr(found, name):
        near = difflib.get_close_matches(name, vars(found), 1)
        own = [key for key, value in vars(found).items() if getattr(value, "__module__", None) == module]
        fix = f"did you mean {near[0]!r}?" if near else f"it defines {', '.join(own) or 'nothing'}"
        raise CommandError(f"FACTORY must be a function in {module}, got {name!r}: {fix}")
    factory = _with_devices(getattr(found, name), devices)
    check.function("FACTORY", factory, f"it may take `devices`, and returns {_WANTED}", arguments=0)
    with users_errors(f"FACTORY must return {_WANTED}; {target}"):
        result = factory()
    if not (
        isinstance(result, tuple | list)
        and len(result) == 2
        and callable(result[0])
        and isinstance(result[1], tuple | list)
    ):
        raise CommandError(f"FACTORY must return {_WANTED}; {target} returned {check.shown(result)}")
    return result[0], result[1]


def _with_devices(factory: Any, devices: Sequence[Any] | None) -> Any:
    try:
        parameter = inspect.signature(factory).parameters.get("devices")
    except (TypeError, ValueError):  # no function, or a built-in one
        return factory
    if parameter is None or (devices is None and parameter.default is not inspect.Parameter.empty):
        return factory
    return functools.partial(factory, devices=jax.devices() if devices is None else list(devices))


def _imported(module: str) -> Any:
    try:
        with users_errors(f"FACTORY must be in a module that can be imported; {module}", but=(ModuleNotFoundError,)):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            fix = "run the command in the folder that has it, or install it"
            raise CommandError(f"FACTORY must be in a module that is there, got {module!r}: {fix}") from None
        raise CommandError(f"{module} imports {error.name!r}, which is not there: install it") from None


@contextlib.contextmanager
def users_errors(what: str, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Says of `what` which error the user's code raises in it, `but` some. A module that ends the program is one as well."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, (CommandError, *but)) or is_own(error) or _is_memjax_at_fault(error):
            raise
        text = f"{type(error).__name__}: {said(error)}".rstrip(": ")
        raise CommandError(f"{what} raises {text}") from error


def said(error: BaseException) -> str:
    """What an error says, without what JAX adds about its traceback."""
    return str(error).partition(_SAYS_NO_MORE)[0].rstrip()


def tell(error: Exception) -> None:
    """Prints an error, and below it where in the user's code it comes from, on standard error.

    Of an error that is memjax's fault the whole traceback.
    """
    if not isinstance(error, CommandError) and not is_own(error):
        traceback.print_exception(error)
        return
    first, *others = said(error).splitlines() or [""]
    print(f"error: {first}", *(f"  {line}".rstrip() for line in others), sep="\n", file=sys.stderr)
    seen: BaseException | None = error
    while seen is not None:
        frames = [frame for frame in traceback.extract_tb(seen.__traceback__) if _is_users(frame.filename)]
        if frames:
            print("In your code:", *traceback.format_list(frames), sep="\n", end="", file=sys.stderr)
            return
        seen = seen.__cause__


def _is_memjax_at_fault(error: BaseException) -> bool:
    """Whether none of the user's code was running in memjax, of all of its frames, when it was raised."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    known = [_is_users(file) for file in files if _is_users(file) or is_memjax(file)]
    return not isinstance(error, SyntaxError) and not known[-1]


def _is_users(file: str) -> bool:
    """Whether a file is one of the user's program, and of no library."""
    return is_users(file) and not file.startswith(_STANDARD) and f"{os.sep}site-packages{os.sep}" not in file
