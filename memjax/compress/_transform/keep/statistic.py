"""Finds statistics: sums of a softmax, deviations of a norm, one for many values. They are kept as they are."""

from __future__ import annotations

from typing import Any

from memjax._core.program.jaxpr import Walk, is_literal, producers, variables
from memjax._core.program.primitives import PRODUCTS
from memjax.compress._transform.keep.bodies import body_of

_MANY = 16  # values for each of a statistic, at least


def is_statistic(var: Any, producer: dict[Any, Any]) -> bool:
    """Whether `var` is computed, value by value, of sums or maxima over many values of a larger array.

    An error of the sum of a softmax, or of a norm's deviation, becomes an error of all values that are divided by it, at least
    `_MANY` times as many.

    Args:
      var: a variable of a program.
      producer: the equation that makes each variable of that program.
    """
    walk = Walk([var])
    for current in walk:
        eqn = producer.get(current)
        if eqn is None or eqn.primitive.name in PRODUCTS:
            continue
        operands = variables(eqn.invars)
        many = _MANY * max(current.aval.size, 1)
        if eqn.primitive.name.startswith(("reduce_", "arg")) and any(atom.aval.size >= many for atom in operands):
            return True
        if (body := body_of(eqn)) is not None:
            inner = body.outvars[eqn.outvars.index(current)]
            if not is_literal(inner) and is_statistic(inner, producers(body)):
                return True
        elif any(out.aval.size >= many for out in eqn.outvars):  # a kernel that gives a log-sum-exp beside its result
            return True
        elif all(atom.aval.size <= current.aval.size for atom in operands):
            walk.add(atom for atom in operands if atom.aval.size == current.aval.size)
    return False
