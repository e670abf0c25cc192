"""Pools and gradients of convolutions in the parts that XLA:CPU compiles them to, each of which runs as early as it can.

* The gradient of a maximum pool: where the largest element of each window is, in each dimension, by the pool's operand and the
  place of each of its elements; then what is scattered to these. That is found in the forward pass and kept.
* The gradient of a sum over windows is a sum over windows of a padded array, which is not written.
* The gradient of a kernel of a convolution reads its operands transposed. The copy of what the forward pass made is made there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from memjax._core.program.dataflow import Dataflow, is_literal
from memjax._core.program.primitives import COPIED, WINDOW_INDICES

_copied, _indices = core.Primitive(COPIED), core.Primitive(WINDOW_INDICES)


def lowered(eqns: Sequence[Any]) -> list[Any]:
    """The equations in these parts."""
    flow = Dataflow(eqns)
    copies: dict[Any, Any] = {}
    found: list[Any] = []
    for eqn in eqns:
        name = eqn.primitive.name
        if name == "select_and_scatter_add":
            found += _gradient_of_maximum(eqn)
            continue
        elif name == "reduce_window_sum":
            pad = None if is_literal(eqn.invars[0]) else flow.makers.get(eqn.invars[0])
            if pad is not None and pad.primitive.name == "pad" and len(flow.readers[pad.outvars[0]]) == 1:
                eqn = eqn.replace(invars=[pad.invars[0]])
        elif is_gradient_of_kernel(eqn):
            for atom in eqn.invars:
                if atom not in copies:
                    copies[atom] = core.Var(atom.aval)
                    found.append(eqn.replace(primitive=_copied, invars=[atom], outvars=[copies[atom]], params={}))
            dims = eqn.params["dimension_numbers"]
            dims = dims._replace(lhs_spec=tuple(range(len(dims.lhs_spec))))
            eqn = eqn.replace(
                invars=[copies[atom] for atom in eqn.invars], params=eqn.params | {"dimension_numbers": dims}
            )
        found.append(eqn)
    return found


def _gradient_of_maximum(eqn: Any) -> list[Any]:
    source, operand = eqn.invars
    of = lambda shape, dtype="int32": core.Var(source.aval.update(shape=shape, dtype=jnp.dtype(dtype), sharding=None))
    sizes = zip(operand.aval.shape, eqn.params["padding"], strict=True)
    padded = tuple(size + low + high for size, (low, high) in sizes)
    places, zeros = of((operand.aval.ndim, *padded)), of(padded, operand.aval.dtype)
    largest, apart, indices = core.Var(source.aval), *(of((operand.aval.ndim, *source.aval.shape)) for _ in range(2))
    return [
        eqn.replace(primitive=_copied, invars=[], outvars=[places], params={}),
        eqn.replace(primitive=_copied, invars=[], outvars=[zeros], params={}),
        eqn.replace(primitive=_indices, invars=[operand, places], outvars=[largest, apart], params={}),
        eqn.replace(primitive=_indices, invars=[apart], outvars=[indices], params={}),
        eqn.replace(invars=[source, indices, zeros]),
    ]


def is_gradient_of_kernel(eqn: Any) -> bool:
    """Whether it is a convolution that sums over examples."""
    return eqn.primitive.name == "conv_general_dilated" and eqn.params["dimension_numbers"].lhs_spec[0] != 0
