"""Which operations may be applied to rounded values: their result is then off by about as much as their operands are."""

from __future__ import annotations

from typing import Any

from memjax._core.program.jaxpr import is_literal
from memjax._core.program.primitives import EXPONENTIALS, POLES, REDUCTIONS, SMOOTH, VIEWS

_MANY = 16  # values for each of a divisor that is a statistic, at least


def is_smooth(eqn: Any, producer: dict[Any, Any]) -> bool:
    """Whether the equation's result is off by about as much as its operands are."""
    name = eqn.primitive.name
    if eqn.effects:
        return False
    if name == "integer_pow":
        return 1 <= eqn.params["y"] <= 3
    if name == "div":
        divisor = eqn.invars[1]
        return is_literal(divisor) or divisor.aval.size * _MANY <= eqn.outvars[0].aval.size
    if name == "exp":  # the derivative of the normal distribution's integral has one
        return _is_at_most_zero(eqn.invars[0], producer)
    return name in SMOOTH or name == "dot_general"


def is_exponential(eqn: Any) -> bool:
    """Whether an error in the operand becomes a factor of the result."""
    return eqn.primitive.name in EXPONENTIALS


def is_reduction(eqn: Any) -> bool:
    """Whether each result is a sum or the like of many values."""
    if eqn.primitive.name not in REDUCTIONS:
        return False
    return bool(eqn.invars[0].aval.size >= _MANY * eqn.outvars[0].aval.size)


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
