"""Values that a product reads transposed, and that are written to memory first.

XLA:CPU copies such an operand for the product. It computes an elementwise value within this copy, element by element and out of
order. To copy an array that is in memory is faster. If others read the value as well, this takes no more memory: the arrays that
it is computed from are freed once it is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memjax._core.program.costs import is_fusible
from memjax._core.program.dataflow import Dataflow, is_literal


def read_transposed(flow: Dataflow) -> set[Any]:
    """What equations make that the compiler could fuse, that several read, and of these a product transposed."""
    found = {atom for eqn in flow.eqns for atom in _copied(eqn)}
    readers, makers = flow.readers, flow.makers
    return {var for var in found if var in makers and len(readers[var]) > 1 and is_fusible(makers[var])}


def _copied(eqn: Any) -> Iterator[Any]:
    """The operands of a product that are copied for it with another last dimension.

    Products sum over the first or the last dimension of a matrix, or of a stack of matrices.
    """
    if eqn.primitive.name != "dot_general":
        return
    summed, stacked = eqn.params["dimension_numbers"]
    for atom, over, batch in zip(eqn.invars, summed, stacked, strict=True):
        others = [dim for dim in range(atom.aval.ndim) if dim not in {*over, *batch}]
        is_last_free = others[-1:] == [atom.aval.ndim - 1]
        is_in_order = len(over) == 1 and [*batch, *over, *others] == sorted([*batch, *over, *others])
        if not is_literal(atom) and is_last_free and not is_in_order:
            yield atom
