"""Finds statistics: sums of a softmax, deviations of a norm, one for many values.

They are kept as they are, but for those of norms over features, such as layer norm, where the norm's input is there in the
backward pass: these are computed again from it. A statistic that is kept leaves the kernel that computes it and normalises,
and a compiler then makes two or three kernels of it, each of which reads the array.
"""

from __future__ import annotations

from typing import Any

from memjax._core.program.jaxpr import Walk, is_literal, producers, variables
from memjax._core.program.primitives import COMPARISONS, PRODUCTS, expensive
from memjax.compress._transform.keep.bodies import body_of
from memjax.compress._transform.keep.cut.smooth import is_smooth

_MANY = 16  # values for each of a statistic, at least
# What may be done to statistics, but not to single values, whose errors it might multiply.
_OF_STATISTICS = COMPARISONS | {"sqrt", "rsqrt", "integer_pow", "div"}


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


def follows_from_rows(var: Any, given: set[Any], producer: dict[Any, Any]) -> bool:
    """Whether a statistic is one of a norm's rows that are there: computed of variables in `given` by sums over the last axes,
    roots and operations that multiply no error.

    A sum of squares of rounded values is off by the square of their relative error, or by less where errors are independent:
    so a root of it may be taken.
    """
    walk, sums = Walk([var]), 0
    for current in walk:
        eqn = producer.get(current)
        if current in given:
            continue
        if eqn is None or expensive(eqn):
            return False
        if eqn.primitive.name == "reduce_sum":
            axes, ndim = eqn.params["axes"], eqn.invars[0].aval.ndim
            if sorted(axes) != list(range(ndim - len(axes), ndim)):
                return False
            sums += 1
        elif not (
            is_smooth(eqn, producer) or (eqn.primitive.name in _OF_STATISTICS and is_statistic(current, producer))
        ):
            return False
        walk.add(eqn.invars)
    return sums > 0
