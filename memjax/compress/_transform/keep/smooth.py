"""Which operations may be applied to rounded values: their result is then off by about as much as their operands are."""

from __future__ import annotations

from typing import Any

from memjax._core.program.dataflow import Walk, is_literal, variables
from memjax._core.program.jaxpr import producers
from memjax._core.program.primitives import (
    AFFINE,
    COMPARISONS,
    POLES,
    PRODUCTS,
    REDUCTIONS,
    SMOOTH,
    VIEWS,
    expensive,
)
from memjax.compress._transform.keep.origins import MANY, body_of

_RECTIFIERS = frozenset(("max", "min"))


def is_smooth(eqn: Any, producer: dict[Any, Any]) -> bool:
    """Whether the equation's result is off by about as much as its operands are."""
    name = eqn.primitive.name
    if eqn.effects:
        return False
    if name == "integer_pow":
        return 1 <= eqn.params["y"] <= 3
    if name == "div":
        divisor = eqn.invars[1]
        return is_literal(divisor) or divisor.aval.size * MANY <= eqn.outvars[0].aval.size
    if name == "exp":  # the derivative of the normal distribution's integral has one
        return _is_at_most_zero(eqn.invars[0], producer)
    if is_rectifier(eqn):
        return _is_of_one_array(eqn.outvars[0], producer)
    return name in SMOOTH or name == "dot_general"


def is_rectifier(eqn: Any) -> bool:
    """Whether it is a ReLU or the like, or any other maximum or minimum of two values."""
    return eqn.primitive.name in _RECTIFIERS


def _is_of_one_array(var: Any, producer: dict[Any, Any]) -> bool:
    """Whether `var` is a norm, a ReLU or the like of one array, so that its value follows from that one alone.

    The ReLU of a sum of blocks would follow from all earlier ones, which would be recomputed at the same time.
    """
    while (eqn := producer.get(var)) is not None and eqn.primitive.name in AFFINE | VIEWS | _RECTIFIERS:
        large = [atom for atom in eqn.invars if not _is_repeated(atom, var, producer)]
        if len(large) != 1:
            return False
        var = large[0]
    return True


def _is_repeated(atom: Any, var: Any, producer: dict[Any, Any]) -> bool:
    """Whether the operand `atom` of what makes `var` is a literal, small, or one of these broadcast."""
    if is_literal(atom) or atom.aval.size * MANY <= var.aval.size:
        return True
    eqn = producer.get(atom)
    return eqn is not None and eqn.primitive.name == "broadcast_in_dim" and _is_repeated(eqn.invars[0], atom, producer)


def is_reduction(eqn: Any) -> bool:
    """Whether each result is a sum or the like of many values."""
    if eqn.primitive.name not in REDUCTIONS:
        return False
    return bool(eqn.invars[0].aval.size >= MANY * eqn.outvars[0].aval.size)


def operands_with_poles(eqn: Any) -> list[int]:
    """The operands near some value of which (zero, mostly) the result, or its derivative, has no bound."""
    name = eqn.primitive.name
    if name == "div":
        return [1]
    if name == "integer_pow":
        return [0] if eqn.params["y"] < 0 else []
    return list(range(len(eqn.invars))) if name in POLES else []


def _is_at_most_zero(atom: Any, producer: dict[Any, Any]) -> bool:
    """Whether `atom` is minus a square or minus an absolute value, or a positive multiple of that."""
    negative = False
    while not is_literal(atom) and (eqn := producer.get(atom)) is not None:
        name, first = eqn.primitive.name, eqn.invars[0]
        factor = next((other.val for other in eqn.invars if is_literal(other)), None)
        is_square = name == "mul" and len(eqn.invars) == 2 and first is eqn.invars[1]
        is_square |= name == "integer_pow" and eqn.params["y"] == 2
        if is_square or name in ("abs", "square"):
            return negative
        if name == "neg":
            negative = not negative
        elif name == "mul" and factor is not None:
            negative ^= bool(factor < 0)
            first = next(other for other in eqn.invars if not is_literal(other))
        elif name not in VIEWS:
            return False
        atom = first
    return False


# Statistics: sums of a softmax, deviations of a norm, one for many values.
#
# They are kept as they are, but for those of norms over features, such as layer norm, where the norm's input is there
# in the backward pass: these are recomputed from it. A statistic that is kept leaves the kernel that computes it
# and normalises, and a compiler then makes two or three kernels of it, each of which reads the array.

# What may be done to statistics, but not to single values, whose errors it might multiply.
_OF_STATISTICS = COMPARISONS | {"sqrt", "rsqrt", "integer_pow", "div"}


def is_statistic(var: Any, producer: dict[Any, Any]) -> bool:
    """Whether `var` is computed, value by value, of sums or maxima over many values of a larger array.

    An error of the sum of a softmax, or of a norm's deviation, becomes an error of all values that are divided by it, at least
    `MANY` times as many.

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
        many = MANY * max(current.aval.size, 1)
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
    """Whether a statistic is one of a norm's rows: computed of variables in `given` by sums over the last axes,
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
