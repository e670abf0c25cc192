"""Which modules treat each position of a sequence alone, as `memjax.remat.tiled` wants them.

Not the regions that plans look for (`memjax._core.positions.regions`): those need a result much larger than what goes in and
comes out, which gated feed-forward layers of up to four times their width do not have, while tiles save there, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memjax._core.compat import primitive_name
from memjax._core.program.primitives import ALIASES, ELEMENTWISE, RANDOM, REDUCTIONS, SOURCES
from memjax._residuals import Equation, Value

_LEAST_DIMS = 3  # batch, positions, features
_ALONE = (ELEMENTWISE - RANDOM) | ALIASES | SOURCES


def by_position(equations: Iterable[Equation]) -> bool:
    """Whether no equation mixes positions: products with weights, operations on elements, sums over features.

    A quick look: `memjax.remat.tiled` itself checks the function, and refuses what mixes.
    """
    weights: set[Value] = set()
    has_products = False
    for equation in equations:
        eqn, name = equation.eqn, primitive_name(equation.eqn)
        if all(not isinstance(read, Value) or read in weights for read in equation.inputs):
            outputs = [value for value in equation.outputs if isinstance(value, Value)]
            weights.update(value for value in outputs if value.aval.ndim < _LEAST_DIMS)
        if name == "dot_general":
            has_products = True
            if not _of_weights(equation, weights):
                return False
        elif name in REDUCTIONS:
            if tuple(eqn.params["axes"]) != (eqn.invars[0].aval.ndim - 1,):
                return False
        elif name not in _ALONE:
            return False
    return has_products


def _of_weights(equation: Equation, weights: set[Value]) -> bool:
    """Whether a product sums over features alone, and one operand is the same for all positions."""
    contracted, batch = equation.eqn.params["dimension_numbers"]
    fixed = lambda read: not isinstance(read, Value) or read in weights
    sides: list[tuple[Any, Any, Any]] = list(
        zip(equation.inputs, (atom.aval for atom in equation.eqn.invars), contracted, strict=True)
    )
    for (_, aval, axes), (other, *_) in (sides, sides[::-1]):
        if aval.ndim >= _LEAST_DIMS and tuple(axes) == (aval.ndim - 1,) and fixed(other):
            return not any(batch)
    return False
