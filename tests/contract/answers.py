"""What is compared: the gradients that questions ask for, and those of plain functions, each computed once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.contract.transforms import POSITIONS, Transform, examples, weights


def nothing(x: jax.Array) -> jax.Array:
    return x


def value(f: Any, inside: Any, w: Any, x: Any) -> jax.Array:
    """A sum in which every element has a weight of its own."""
    y = f(inside, w, x)
    return jnp.sum(y.astype(_wide(y.dtype)) ** 2) / POSITIONS


def _wide(dtype: Any) -> Any:
    return dtype if dtype == jnp.float64 else jnp.float32


def gradient(f: Any, inside: Any = nothing) -> Any:
    return jax.value_and_grad(functools.partial(value, f, inside), (0, 1))


def close(t: Transform, found: Any, expected: Any, rounding: float = 2e-5) -> None:
    """Relative errors of arrays, as vectors."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.all(np.isfinite(a))
        error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
        assert error <= t.error + rounding, f"relative error {error:.1e}"


_ANSWERS: dict[Any, Any] = {}


def plain_answer(question: str, t: Transform, run: Any) -> Any:
    """`run(t.plain)`, which several transforms share."""
    if (question, t.plain) not in _ANSWERS:
        _ANSWERS[question, t.plain] = jax.device_get(run(t.plain))
    return _ANSWERS[question, t.plain]


def of_all(question: str, run: Any) -> Any:
    """`run()`, the answer to a question that brings a function of its own for all transforms."""
    if question not in _ANSWERS:
        _ANSWERS[question] = jax.device_get(run())
    return _ANSWERS[question]


def with_aux(f: Any) -> Any:
    """What `gradient` gives, and the result of `f` beside the value."""

    def total(w: Any, x: Any) -> Any:
        y = f(nothing, w, x)
        return jnp.sum(y.astype(_wide(y.dtype)) ** 2) / POSITIONS, y

    return jax.value_and_grad(total, (0, 1), has_aux=True)


@functools.cache
def compiled_gradient(f: Any) -> Any:
    """For plain functions. What other questions expect follows from this one program, run several times."""
    return jax.jit(with_aux(f))


def plainly(f: Any, w: Any, x: Any) -> Any:
    (total, _), grads = compiled_gradient(f)(w, x)
    return jax.device_get((total, grads))


def expected(t: Transform) -> Any:
    return plain_answer("jit", t, lambda f: plainly(f, weights(), examples()))
