"""Values that products read transposed, and XLA:CPU would compute within that copy, for each of its elements out of order.

Copies of what lies in memory are faster. A value that others read, too, takes no more memory if it is written first: what it is
made of is gone then.
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
