"""Finds the sums over the channels of an array, and of its squares, that a program computes in float32, as batch norms do."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from memjax._core.program.jaxpr import is_literal


def channel_sums(root: Any, consumers: dict[Any, list[Any]]) -> dict[Any, int]:
    """The variables that are sums of `root` over all axes but the last: 0 for sums of its values, 1 for those of squares.

    Args:
      root: a variable.
      consumers: the equations that read each variable.
    """
    wide = [root] if root.aval.dtype == jnp.float32 else []
    for eqn in consumers.get(root, []):
        if eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.dtype == jnp.float32:
            wide.append(eqn.outvars[0])
    squares = [eqn.outvars[0] for var in wide for eqn in consumers.get(var, []) if _is_square(eqn)]
    axes = tuple(range(root.aval.ndim - 1))
    found = {}
    for power, summed in enumerate((wide, squares)):
        for eqn in (eqn for var in summed for eqn in consumers.get(var, [])):
            if eqn.primitive.name == "reduce_sum" and tuple(eqn.params["axes"]) == axes:
                found[eqn.outvars[0]] = power
    return found


def _is_square(eqn: Any) -> bool:
    name, operands = eqn.primitive.name, eqn.invars
    if name == "mul":
        return not any(map(is_literal, operands)) and operands[0] is operands[1]
    return name == "square" or (name == "integer_pow" and eqn.params["y"] == 2)
