"""Whether two programs, traced for different numbers of positions, are equal but for shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from memjax._core.compat import bodies, is_tracer, primitive_name
from memjax._core.jaxpr import is_literal
from memjax._core.positions.walk import Mixed, reason

_MOST_COMPARED = 4096  # elements of a constant


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
        inside, counterparts = bodies(eqn), bodies(other)
        if len(inside) != len(counterparts):
            raise reason(eqn, "depends on the number of positions")
        for body, counterpart in zip(inside, counterparts, strict=True):
            check_same(body, counterpart)


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
