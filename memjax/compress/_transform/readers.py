"""Finds the equations of a pullback that multiply an encoded array with a cotangent into a gradient."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from memjax._core.arrays import is_float
from memjax._core.program.jaxpr import Program, consumers, is_literal, variables
from memjax._core.program.primitives import PRODUCTS, REPLICATIONS, VIEWS

# After these primitives a gradient is still that gradient; collectives add it up over devices.
_SAME = VIEWS | REPLICATIONS | {"rev", "add_any", "psum", "psum_invariant"}


@dataclasses.dataclass(frozen=True)
class Reader:
    """An equation of a pullback that multiplies an encoded array with a cotangent into the gradient of an input.

    Attributes:
      layer: index of the array.
      cotangent: the operand that is a cotangent, L.
      share: the share of the sum of all L^2 that changes one entry of the gradient: one channel of all, and the positions at
        which a convolution's window does not meet its padding.
      weight: index of the pullback's output that is the gradient.
    """

    layer: int
    cotangent: Any
    share: float
    weight: int


def readers(pullback: Program, cotangents: set[Any], origins: dict[Any, int]) -> dict[int, Reader]:
    """The readers among the equations of a pullback, by the `id` of the equation.

    Args:
      pullback: a program with calls in place.
      cotangents: its inputs that are cotangents.
      origins: the index of the encoded array that an input comes from.
    """
    late, origins = set(cotangents), dict(origins)
    consumer = consumers(pullback)
    outputs = {var: i for i, var in reversed(list(enumerate(pullback.outvars))) if not is_literal(var)}
    readers: dict[int, Reader] = {}
    for eqn in pullback.eqns:
        operands = variables(eqn.invars)
        cts = [var for var in operands if var in late]
        stored = [origins[var] for var in operands if var in origins]
        if cts:
            late.update(eqn.outvars)
            if eqn.primitive.name in PRODUCTS and stored:
                weight = _output(eqn.outvars[0], consumer, outputs)
                if weight is not None:
                    readers[id(eqn)] = Reader(stored[0], cts[0], _share(eqn, cts[0]), weight)
        elif stored and eqn.primitive.name in _SAME:
            origins[eqn.outvars[0]] = stored[0]
    return readers


def only_in_gradients(pullback: Program, cotangents: set[Any], origins: dict[Any, Any]) -> set[Any]:
    """The encoded arrays that a pullback reads in convolutions and matrix products with cotangents alone, whose results are added
    to outputs. Outputs are linear in them.

    Args:
      pullback, cotangents: see `readers`.
      origins: the encoded array that an input comes from.
    """
    late, stored, read_otherwise = set(cotangents), dict(origins), set()
    consumer = consumers(pullback)

    def ends_in_outputs(var):
        return all(
            eqn.primitive.name in _SAME and all(map(ends_in_outputs, eqn.outvars)) for eqn in consumer.get(var, [])
        )

    for eqn in pullback.eqns:
        operands, name = variables(eqn.invars), eqn.primitive.name
        arrays = [stored[var] for var in operands if var in stored]
        is_late = not late.isdisjoint(operands)
        if is_late:
            late.update(eqn.outvars)
        if is_late and name in PRODUCTS and ends_in_outputs(eqn.outvars[0]):
            continue
        if not is_late and name in _SAME and len(arrays) == len(operands) == 1 and is_float(eqn.outvars[0].aval):
            stored[eqn.outvars[0]] = arrays[0]
        else:
            read_otherwise.update(arrays)
    read_otherwise.update(stored[var] for var in variables(pullback.outvars) if var in stored)
    return set(origins.values()) - read_otherwise


def _share(eqn: Any, ct: Any) -> float:
    """See `Reader.share`."""
    side, shape = int(eqn.invars[0] is not ct), ct.aval.shape
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive.name == "conv_general_dilated":
        # The transposed convolution: channels stand where a convolution has examples, or a kernel its outputs.
        return _reach(eqn) / shape[numbers[side][0]]
    contracting, batch = numbers
    return 1 / math.prod(size for axis, size in enumerate(shape) if axis not in (*contracting[side], *batch[side]))


def _reach(eqn: Any) -> float:
    """The share of all pairs of an output and a tap of the convolution's kernel that meets a value and not padding."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    shapes = zip((eqn.invars[0], eqn.invars[1], eqn.outvars[0]), numbers, strict=True)
    sizes = [[atom.aval.shape[axis] for axis in spec[2:]] for atom, spec in shapes]
    windows = zip(
        params["window_strides"], params["lhs_dilation"], params["rhs_dilation"], params["padding"], strict=True
    )
    share = 1.0
    for values, taps, outputs, (stride, spread, dilation, (low, _)) in zip(*sizes, windows, strict=True):
        at = np.arange(outputs)[:, None] * stride + np.arange(taps) * dilation - low
        share *= np.mean((at >= 0) & (at <= (values - 1) * spread) & (at % spread == 0))
    return float(share)


def _output(var: Any, consumer: dict[Any, list[Any]], outputs: dict[Any, int]) -> int | None:
    """The index of the output that is `var`, or a sum with it."""
    while var not in outputs:
        following = [eqn for eqn in consumer.get(var, []) if eqn.primitive.name in _SAME]
        if not following:
            return None
        var = following[0].outvars[0]
    return outputs[var]
