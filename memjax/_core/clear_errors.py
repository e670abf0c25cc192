"""Errors of tracing and compiling a user's function, reworded so that they say what to change."""

import contextlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax
import jax

from memjax._core import check
from memjax._core.compat import is_memjax

_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_NEEDS_VALUES_TOO = re.compile(
    r"(unhashable type|format string|'(list|tuple|str)' and|must be static integers|must have static start).*Tracer"
)  # of errors of Python's types
_OWN = re.compile(
    r"[\w.\[\]']+ (must|cannot) |(budget is|give exactly one of|arguments of) "
)  # how memjax's own errors begin
_SHAPES = "Shapes must be 1D sequences of concrete values"
_WANTED = "a function that JAX can trace"
_LEAK_FIX = "it uses an array that an earlier trace left in a list, an attribute or a global; return it instead"
_VALUE_FIX = (
    "it needs the value of an array or a number for `if`, range(), float(), np.asarray or a shape; use jax.numpy and "
    "jax.lax, or bind the value with functools.partial (where static_argnums can be given: name it there)"
)


def is_own(error: BaseException) -> bool:
    """Whether an error is one of memjax's own, which says what to change: memjax has raised it, and it begins as these do."""
    raised = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return _OWN.match(str(error)) is not None and is_memjax(raised[-1])


@contextlib.contextmanager
def value_errors(name: str, fn: Any) -> Iterator[None]:
    """Explains errors of tracing that come from needing the value of an array. `fn` is the value of the argument `name`."""
    try:
        yield
    except (TypeError, ValueError, IndexError) as error:  # which those of `_NEEDS_VALUES` are
        said = str(error)
        says_so = _NEEDS_VALUES_TOO.search(said) or said.startswith(_SHAPES)
        if not (isinstance(error, _NEEDS_VALUES) or says_so):
            raise
        raise _because(error, check.fail(TypeError, name, _WANTED, fn, _VALUE_FIX)) from error


@contextlib.contextmanager
def call_errors(name: str, f: Any, given: dict[str, Any]) -> Iterator[None]:
    """Says of the argument `name`, which is `f`, that it was called with what is `given`, and why it failed.

    What JAX has a type of error for, and what memjax refuses, is said well enough already.
    """
    try:
        with value_errors(name, f):
            yield
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        said = str(error)
        if type(error) not in (TypeError, ValueError, AttributeError, IndexError) or is_own(error):
            raise
        kind = ValueError if isinstance(error, ValueError) else TypeError
        takes = " and ".join(f"{what} of {_types(value)}" for what, value in given.items())
        raise kind(
            f"{name} must take {takes}, got {check.shown(f)} that raises {type(error).__name__}: {said}"
        ) from error


def _types(tree: Any) -> str:
    short = lambda leaf: jax.typeof(leaf).str_short() if check.is_array(leaf) else check.shown(leaf)
    text = " ".join(
        str(jax.tree.map(lambda leaf: leaf.str_short() if hasattr(leaf, "str_short") else short(leaf), tree)).split()
    )
    return text if len(text) <= 200 else f"{text[:197]}..."


@contextlib.contextmanager
def argument_errors(f: Any, args: Sequence, fix: str) -> Iterator[None]:
    """Names the argument of `f` that has a leaf which is neither array nor number, if that is what JAX refuses."""
    try:
        yield
    except TypeError as error:
        names = [*inspect.signature(f).parameters] if callable(f) else []
        named = {names[i] if i < len(names) else f"argument {i}": arg for i, arg in enumerate(args)}
        for path, leaf in jax.tree_util.tree_leaves_with_path(named):
            if not (check.is_number_or_array(leaf) or hasattr(leaf, "__jax_array__")):
                name = f"{path[0].key}{jax.tree_util.keystr(path[1:])}"
                raise check.fail(TypeError, name, "an array or a number", leaf, fix) from error
        raise


@contextlib.contextmanager
def trace_errors(name: str, fn: Callable) -> Iterator[None]:
    """Says why `fn`, the value of the argument `name`, cannot be traced, where the user can change that."""
    try:
        with value_errors(name, fn):
            yield
    except flax.errors.TraceContextError as error:
        fix = "it changes a Flax NNX object that it closes over; make the object an argument"
        raise _because(error, check.fail(TypeError, name, _WANTED, fn, fix)) from error
    except jax.errors.UnexpectedTracerError as error:
        raise _because(error, check.fail(TypeError, name, _WANTED, fn, _LEAK_FIX)) from error
    except TypeError as error:
        said = str(error)
        if not said.startswith(("Error interpreting argument to", "Cannot interpret value of type")):
            raise
        raise TypeError(
            f"arguments of a jitted function must be arrays: {said.splitlines()[0]} "
            "Name others in static_argnames, or bind them with functools.partial before jax.jit."
        ) from error


def refuse_leaks(fn: Callable, traced: Any) -> None:
    """Raises if `fn` uses values of other traces. JAX makes them additional inputs, and complains only when the program runs."""
    if len(traced.jaxpr.in_avals) > traced.in_tree.num_leaves:
        raise check.fail(TypeError, "fn", _WANTED, fn, _LEAK_FIX)


def _because(error: Exception, clear: Exception) -> Exception:
    return type(clear)(f"{clear}. JAX says: {str(error).strip().splitlines()[0]}")


@contextlib.contextmanager
def option_errors(options: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not options or "INVALID_ARGUMENT" not in str(error):
            raise
        fix = f"the compiler says {str(error).splitlines()[0]!r}"
        raise check.fail(ValueError, "compiler_options", "options that the compiler knows", options, fix) from error
