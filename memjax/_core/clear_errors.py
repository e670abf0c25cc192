"""Errors of tracing and compiling a user's function, reworded so that they say what to change."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import flax
import jax

from memjax._core import check

_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_SHAPES = "Shapes must be 1D sequences of concrete values"
_WANTED = "a function that JAX can trace"
_LEAK_FIX = "it uses an array that an earlier trace left in a list, an attribute or a global; return it instead"
_VALUE_FIX = (
    "it needs the value of an array for `if`, float(), np.asarray or a shape; use jax.numpy and jax.lax, or "
    "give the value as a Python number (of a jitted function as a static argument)"
)


@contextlib.contextmanager
def value_errors(name: str, fn: Any) -> Iterator[None]:
    """Explains errors of tracing that come from needing the value of an array. `fn` is the value of the argument `name`."""
    try:
        yield
    except (TypeError, ValueError, IndexError) as error:  # which those of `_NEEDS_VALUES` are
        said = str(error)
        is_unhashable = "unhashable type" in said and "Tracer" in said
        if not (isinstance(error, _NEEDS_VALUES) or is_unhashable or said.startswith(_SHAPES)):
            raise
        raise _because(error, check.fail(TypeError, name, _WANTED, fn, _VALUE_FIX)) from error


@contextlib.contextmanager
def trace_errors(fn: Callable) -> Iterator[None]:
    """Says why `fn` cannot be traced, where the user can change that."""
    try:
        with value_errors("fn", fn):
            yield
    except flax.errors.TraceContextError as error:
        fix = "it changes a Flax NNX object that it closes over; make the object an argument"
        raise _because(error, check.fail(TypeError, "fn", _WANTED, fn, fix)) from error
    except jax.errors.UnexpectedTracerError as error:
        raise _because(error, check.fail(TypeError, "fn", _WANTED, fn, _LEAK_FIX)) from error
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
