"""Which operand a maximum or a minimum is, as plans ask it: by comparing the operands.

As JAX before 0.11 differentiates them, an operand is compared with the result for equality. Where a plan computes both again,
XLA may compute the operand once for the result and once more for the comparison, in another kernel that rounds otherwise.
Then neither operand is equal to the result, and the gradient is lost. One operand is always at least the other, however they
are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax import lax

from memjax._core.program.dataflow import is_literal
from memjax._core.program.jaxpr import Program

_ORDERS = {"max": lax.ge_p, "min": lax.le_p}


def with_orders(forward: Program, backward: Program) -> tuple[Program, Program]:
    """The two passes of a derivative; themselves where they compare no operand with a maximum or a minimum."""
    makers = {**forward.flow.makers, **backward.flow.makers}
    return _ordered(forward, makers), _ordered(backward, makers)


def _ordered(program: Program, makers: Mapping[Any, Any]) -> Program:
    eqns = [_order(eqn, makers) for eqn in program.eqns]
    if all(new is old for new, old in zip(eqns, program.eqns, strict=True)):
        return program
    return Program(program.constvars, program.consts, program.invars, program.outvars, eqns)


def _order(eqn: Any, makers: Mapping[Any, Any]) -> Any:
    if eqn.primitive.name != "eq" or eqn.invars[0].aval.dtype.kind == "c":  # complex numbers have no order
        return eqn
    for operand, result in (eqn.invars, eqn.invars[::-1]):
        maker = None if is_literal(result) else makers.get(result)
        if maker is None or maker.primitive.name not in _ORDERS:
            continue
        for one, other in (maker.invars, maker.invars[::-1]):
            if _is_same(operand, one):
                return eqn.replace(primitive=_ORDERS[maker.primitive.name], invars=[operand, other])
    return eqn


def _is_same(one: Any, other: Any) -> bool:
    if is_literal(one) or is_literal(other):
        return is_literal(one) and is_literal(other) and one.aval == other.aval and bool(one.val == other.val)
    return one is other
