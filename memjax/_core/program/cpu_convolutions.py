"""Convolutions as loops run them fast on CPUs.

XLA:CPU puts the dimensions of a convolution into the order that its library takes, but not within the bodies of loops. There it
runs other orders element by element, which takes many times as long. So here the operands and the result are transposed.
"""

from __future__ import annotations

from typing import Any

from jax import lax


def is_slow_in_loops(eqn: Any) -> bool:
    """Whether an equation is a convolution with another order. What has groups of features is faster element by element."""
    if eqn.primitive.name != "conv_general_dilated" or eqn.params["feature_group_count"] > 1:
        return False
    return eqn.params["dimension_numbers"] != _order(eqn.invars[0].aval.ndim)


def convolution_for_loops(eqn: Any, x: Any, kernel: Any) -> Any:
    """The result of a convolution, computed in the order that the library takes."""
    of_x, of_kernel, of_out = eqn.params["dimension_numbers"]
    x = lax.transpose(x, (of_x[0], *of_x[2:], of_x[1]))
    kernel = lax.transpose(kernel, (*of_kernel[2:], of_kernel[1], of_kernel[0]))
    out = eqn.primitive.bind(x, kernel, **eqn.params | {"dimension_numbers": _order(x.ndim)})
    here = of_out[0], *of_out[2:], of_out[1]  # where the batch, the places and the features have to go
    return lax.transpose(out, tuple(here.index(dim) for dim in range(out.ndim)))


def _order(ndim: int) -> lax.ConvDimensionNumbers:
    """Batch, places, features; of the kernel places, features in, features out."""
    places = range(1, ndim - 1)
    rows = 0, ndim - 1, *places
    return lax.ConvDimensionNumbers(rows, (ndim - 1, ndim - 2, *(dim - 1 for dim in places)), rows)
