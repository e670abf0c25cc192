"""The cheapest values to keep, so that wanted ones follow: a minimum cut of a program.

A value can be had if it is kept, or if the equation that makes it runs again, which needs the equation's operands. Keeping has
a price, running again has one, too. Let a value be on the source's side if it has to be had, an equation if it runs again. Then
cutting the edge from a value to its equation is keeping it, cutting the edge from an equation to the sink is running it
again, and an equation pulls its operands to its own side. The least price in all is a minimum cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from memjax._core.program.dataflow import Walk, variables

_WHOLE = 1 << 29  # the finite capacities together: flows are counted in 32 bits
_SOURCE, _SINK = 0, 1


def cheapest(
    wanted: Iterable[Any],
    producer: Mapping[Any, Any],
    available: set[Any],
    to_keep: Callable[[Any], float],
    to_recompute: Callable[[Any], float | None],
    *,
    late: bool = True,
) -> list[Any]:
    """Variables to keep, so that with those in `available` every wanted one follows.

    The wanted ones among them come first, then the others in the program's order.

    Args:
      wanted: variables of a program.
      producer: the equation that makes each variable, in the program's order. One that no equation makes can only be kept.
      available: variables that are in memory whatever is kept.
      to_keep: the price of keeping a variable.
      to_recompute: the price of running an equation again; None: it never runs again.
      late: of several cuts of the same price, the one nearest to what is wanted, or the one nearest to where it comes from.
    """
    wanted = [var for var in dict.fromkeys(variables(wanted)) if var not in available]
    number: dict[Any, int] = {}
    node = lambda key: number.setdefault(key, len(number) + 2)
    edges = [(_SOURCE, node(var), math.inf) for var in wanted]
    walk, visited = Walk(wanted), list[Any]()
    for var in walk:
        visited.append(var)
        eqn = producer.get(var)
        price = None if eqn is None else to_recompute(eqn)
        if eqn is None or price is None:
            edges.append((node(var), _SINK, to_keep(var)))
            continue
        is_new = id(eqn) not in number
        itself = node(id(eqn))
        edges.append((node(var), itself, to_keep(var)))
        if is_new:
            edges.append((itself, _SINK, price))
            operands = [atom for atom in dict.fromkeys(variables(eqn.invars)) if atom not in available]
            edges += [(itself, node(atom), math.inf) for atom in operands]
            walk.add(operands)
    if not visited:
        return []
    near = _near_side(edges, len(number) + 2, late)
    runs_again = lambda var: var in producer and number.get(id(producer[var])) in near
    kept = {var for var in visited if number[var] in near and not runs_again(var)}
    return [var for var in dict.fromkeys([*wanted, *producer, *visited]) if var in kept]


def _near_side(edges: list[tuple[int, int, float]], nodes: int, small: bool) -> set[int]:
    """Nodes on the source's side of a minimum cut: the smallest such side, or the largest."""
    tails, heads, weights = (np.array(column) for column in zip(*edges, strict=True))
    capacities = _integers(weights)
    graph = csr_array((capacities, (tails, heads)), shape=(nodes, nodes))
    graph.sum_duplicates()
    left = graph - maximum_flow(graph, _SOURCE, _SINK).flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    if small:
        return set(breadth_first_order(left, _SOURCE, return_predecessors=False).tolist())
    return set(range(nodes)).difference(breadth_first_order(left.T.tocsr(), _SINK, return_predecessors=False).tolist())


def _integers(weights: Any) -> Any:
    """Capacities in 32 bits, in the ratios of the weights. Integers stay exact where their common divisor allows it."""
    finite = weights[np.isfinite(weights)]
    if np.all(finite == np.rint(finite)) and finite.max(initial=0) < 2**53:
        divisor = max(np.gcd.reduce(finite.astype(np.int64)), 1)
    else:
        divisor = 0
    if divisor and finite.sum() / divisor <= _WHOLE:
        scaled = np.where(np.isfinite(weights), weights, 0) / divisor
    else:
        # What costs anything costs a unit at least, so that ties go to what is free.
        scaled = np.where(np.isfinite(weights), weights, 0) * (_WHOLE / finite.sum())
        scaled = np.where((weights > 0) & (scaled < 1), 1, scaled)
    return np.where(np.isfinite(weights), np.rint(scaled), 2 * _WHOLE).astype(np.int32)
