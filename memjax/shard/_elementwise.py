"""The check that a function is elementwise, which reads its program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from memjax._core import check
from memjax._core.compat import bodies

_SHAPE = (3, 5)
_MIXING = (
    *("argm", "concatenate", "conv_general", "cum", "dot_general", "dynamic_slice", "fft", "gather", "iota", "rev"),
    *("reduce_and", "reduce_m", "reduce_or", "reduce_prod", "reduce_sum", "scatter", "slice", "sort", "top_k"),
    *("transpose", "psum", "pmax", "pmin", "all_gather", "all_to_all", "ppermute"),
)


def check_elementwise(name: str, f: Callable[..., Any]) -> None:
    """Raises unless `f` of an array gives one of its shape, each entry made of the entry at the same place."""
    check.function(name, f, "pass one such as jax.nn.gelu")
    wanted = "an elementwise function of one array"
    blocks = "it sees only blocks of rows and columns"
    struct = jax.ShapeDtypeStruct(_SHAPE, jnp.float32)
    try:
        jaxpr, out = jax.make_jaxpr(f, return_shape=True)(struct)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be {wanted}, got {check.shown(f)} that raises {error}") from error
    except (NameError, AssertionError) as error:  # what JAX raises of an axis that only the surrounding transform knows
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ValueError(
            f"{name} must be {wanted}, got {check.shown(f)} that raises {said}: collectives combine entries of different places"
        ) from error
    if not isinstance(out, jax.ShapeDtypeStruct) or out.shape != _SHAPE:
        raise ValueError(f"{name} must be {wanted}, got {check.shown(f)} that returns {out} for {_SHAPE}: {blocks}")
    if not jnp.issubdtype(out.dtype, jnp.floating):
        raise TypeError(
            f"{name} must be {wanted}, got {check.shown(f)} that returns {out.dtype}: return floating-point numbers"
        )
    for primitive in _mixing(jaxpr.jaxpr):
        raise ValueError(
            f"{name} must be {wanted}, got {check.shown(f)} that combines entries of different places ({primitive}): {blocks}"
        )


def _mixing(jaxpr: Any) -> Iterator[str]:
    """Names of the primitives that combine entries of different places, or ask where an entry is."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        arrays = [v.aval for v in (*equation.invars, *equation.outvars)]
        if name.startswith(_MIXING) and any(getattr(a, "shape", None) == _SHAPE for a in arrays):
            yield name
        if name != "pallas_call":
            for inner in bodies(equation):
                yield from _mixing(inner)
