"""What to keep at one price of memory: the least of seconds to compute again plus price times bytes kept, by a minimum cut.

A value can be had if it is kept, or if the equation that makes it runs again, which needs the equation's operands. Let
a value be on the source's side if it can be had, an equation if it runs again. Then cutting the edge from a value to its
equation is keeping it, cutting the edge from an equation to the sink is running it again, and an equation pulls its operands
to its own side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from memjax._core.program.jaxpr import variables

_WHOLE = 1 << 29  # the finite capacities together: the flow is counted in 32 bits


def kept_at(
    price: float,
    eqns: Sequence[Any],
    wanted: Iterable[Any],
    known: set[Any],
    seconds: Callable[[Any], float],
    nbytes: Callable[[Any], int],
    to_keep: Callable[[Any], float],
    never_again: Callable[[Any], bool],
) -> list[Any]:
    """The variables to keep.

    Args:
      price: seconds that a byte is worth.
      eqns: what can run again.
      wanted: what has to be had.
      known: values that are in memory whatever is kept.
      seconds: of an equation.
      nbytes: of a variable.
      to_keep: seconds that keeping a variable takes, however cheap memory is.
      never_again: equations that may not run again.
    """
    wanted = [var for var in dict.fromkeys(variables(wanted)) if var not in known]
    cost = lambda var: price * max(nbytes(var), 1) + to_keep(var)
    number: dict[Any, int] = {}
    node = lambda key: number.setdefault(key, len(number) + 2)
    edges: list[tuple[int, int, float]] = [(0, node(var), np.inf) for var in wanted]
    for eqn in eqns:
        itself = node(id(eqn))
        edges += [(node(out), itself, cost(out)) for out in eqn.outvars if out not in known]
        edges.append((itself, 1, np.inf if never_again(eqn) else seconds(eqn)))
        edges += [(itself, node(var), np.inf) for var in dict.fromkeys(variables(eqn.invars)) if var not in known]
    made = {out for eqn in eqns for out in eqn.outvars}
    # An operand that no equation makes here can only be kept.
    edges += [(i, 1, cost(var)) for var, i in number.items() if not isinstance(var, int) and var not in made]
    if not wanted:
        return []
    tails, heads, weights = (np.array(column) for column in zip(*edges, strict=True))
    finite = np.isfinite(weights)
    scale = _WHOLE / max(weights[finite].sum(), 1e-30)
    # Ties go to what needs no time: an equation costs one unit at least.
    capacities = np.where(finite, np.maximum(np.rint(np.where(finite, weights, 0) * scale), 1), _WHOLE * 2).astype(
        np.int32
    )
    graph = csr_array((capacities, (tails, heads)), shape=(len(number) + 2,) * 2)
    graph.sum_duplicates()
    flow = maximum_flow(graph, 0, 1).flow
    left = graph - flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    near = set(breadth_first_order(left, 0, return_predecessors=False).tolist())
    by_output = {out: id(eqn) for eqn in eqns for out in eqn.outvars}
    return [
        var
        for var, i in number.items()
        if not isinstance(var, int) and i in near and (var not in by_output or number[by_output[var]] not in near)
    ]
