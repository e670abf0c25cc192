"""Whether two programs, traced for different numbers of positions, are equal but for shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from memjax._core.compat import bodies, is_tracer, parameters, primitive_name
from memjax._core.positions.walk import Mixed, Seen, reason
from memjax._core.program.dataflow import is_literal

_MOST_COMPARED = 4096  # elements of a constant


_OF_SHAPES = {"shape", "new_sizes", "slice_sizes", "limit_indices", "sizes", "sharding", "out_sharding", "name"}
"""Parameters that may differ with the number of positions: what they say is seen in the shapes of results, too."""
_SIMPLE = bool | int | float | complex | str | np.dtype | None


def check_alike(first: Seen, second: Seen) -> None:
    """Raises Mixed if what walks for two lengths have seen depends on the number of positions."""
    for eqn, other in zip(first.made, second.made, strict=True):
        # What a gather reads from is in its result whole or not at all; where it reads, once for each result.
        count = 1 if primitive_name(eqn) == "gather" else len(eqn.invars)
        if any(a.aval.shape != b.aval.shape for a, b in list(zip(eqn.invars, other.invars, strict=True))[:count]):
            raise reason(
                eqn,
                f"makes from what is as long as the positions ({_shapes(eqn)}) a value that depends on their number",
            )
    for one, two in zip(first.backward, second.backward, strict=True):
        check_same(one, two)


def check_same(first: Any, second: Any) -> None:
    """Raises Mixed unless the programs have the same equations and numbers."""
    if [primitive_name(eqn) for eqn in first.eqns] != [primitive_name(eqn) for eqn in second.eqns]:
        raise Mixed("the program itself depends on the number of positions")
    for eqn, other in zip(first.eqns, second.eqns, strict=True):
        for one, two in zip(map(_number, eqn.invars), map(_number, other.invars), strict=True):
            if not _equal(one, two):
                raise reason(
                    eqn,
                    f"has the number of positions among its operands ({one} for one length, {two} for another): a mean over "
                    "positions, say, which tiles cannot take: sum here, and divide afterwards",
                )
        _check_parameters(eqn, other)
        inside, counterparts = bodies(eqn), bodies(other)
        if len(inside) != len(counterparts):
            raise reason(eqn, "depends on the number of positions")
        for body, counterpart in zip(inside, counterparts, strict=True):
            check_same(body, counterpart)


def _check_parameters(eqn: Any, other: Any) -> None:
    mine, others = parameters(eqn), parameters(other)
    for name in mine.keys() & others.keys() - _OF_SHAPES:
        if _is_simple(mine[name]) and _is_simple(others[name]) and repr(mine[name]) != repr(others[name]):
            raise reason(
                eqn, f"depends on the number of positions ({name} is {mine[name]} for one, {others[name]} for another)"
            )


def _is_simple(value: Any) -> bool:
    return all(map(_is_simple, value)) if isinstance(value, tuple) else isinstance(value, _SIMPLE)


def _shapes(eqn: Any) -> str:
    return ", ".join(str(atom.aval.shape) for atom in eqn.invars)


def check_same_constants(first: Sequence[Any], second: Sequence[Any]) -> None:
    """Raises Mixed if constants of the programs have equal shapes and different values."""
    for one, two in zip(first, second, strict=False):
        if one is two or is_tracer(one) or is_tracer(two) or np.shape(one) != np.shape(two):
            continue
        if np.size(one) <= _MOST_COMPARED and not _equal(one, two):
            raise Mixed(f"a constant of shape {np.shape(one)} depends on the number of positions")


def _number(atom: Any) -> Any:
    return atom.val if is_literal(atom) else "a variable"


def _equal(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
