"""What it costs to compute a value again, in bytes: those that the time is worth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memjax._core.program.jaxpr import Program, nbytes, variables
from memjax._core.program.primitives import expensive, flops_of_product
from memjax.compress._transform.keep.cut.smooth import is_smooth
from memjax.compress._transform.keep.origins import Origins

Again = Callable[[Any], int | None]

# At these bits per value a product is repeated if it saves as many bytes for its FLOPs as products write on average.
_BITS = 6
_MOST = 1.2  # times as many FLOPs for a byte, at most
_PASSES = 8  # a pass over memory costs an eighth of what is read
_FUSED = 512  # an elementwise operation costs next to nothing: it is fused into what reads its result


def flops_per_byte(program: Program, bits: float) -> float:
    """The FLOPs that are worth spending for a byte less, if codes have so many bits per value.

    With six bits those that the program's products take for each byte that they write. With eight fewer, by their square, and
    with less than six a few more: then the rest of the memory is as small, and what is kept exactly weighs more.
    """
    products = [eqn for eqn in program.eqns if flops_of_product(eqn)]
    written = sum(nbytes(eqn.outvars[0].aval) for eqn in products)
    return min((_BITS / bits) ** 2, _MOST) * sum(map(flops_of_product, products)) / max(written, 1)


def again_exactly(price: float) -> Again:
    """What running an equation again costs, its operands being exact."""

    def cost(eqn: Any) -> int | None:
        if eqn.primitive.name == "dot_general":
            return _of_product(eqn, price)
        return None if expensive(eqn) else _of_pass(eqn)

    return cost


def again_rounded(program: Program, origins: Origins, free: set[Any], price: float) -> Again:
    """What running an equation again costs, operands that do not follow from `free` being decoded; None where it would
    multiply their errors.
    """
    exactly, there = again_exactly(price), set(free)
    for eqn in program.eqns:
        if there.issuperset(variables(eqn.invars)) and not expensive(eqn):
            there.update(eqn.outvars)

    def cost(eqn: Any) -> int | None:
        is_exact = there.issuperset(variables(eqn.invars))
        return exactly(eqn) if is_exact or is_smooth(eqn, origins.producer) else None

    return cost


def again_linear(origins: Origins) -> Again:
    """What running an equation again costs that scales, shifts or moves one large operand; None for any other."""
    return lambda eqn: None if origins.parent(eqn.outvars[0]) is None else _of_pass(eqn)


def _of_product(eqn: Any, price: float) -> int | None:
    return int(flops_of_product(eqn) / price) if price else None


def _of_pass(eqn: Any) -> int:
    out = sum(nbytes(var.aval) for var in eqn.outvars)
    read = sum(nbytes(var.aval) for var in variables(eqn.invars))
    return 1 + (read // _PASSES if read > 4 * out else out // _FUSED)
