"""Chooses which values to keep so that all wanted values can be obtained at the least total cost: a minimum cut.

Nodes are values and equations. The source has infinite edges to the wanted values. The edge from a value to its equation costs
what keeping the value costs. The edge from an equation to the sink costs what rerunning it costs. Infinite edges lead from an
equation to those of its operands that are not available anyway. A value that cannot be recomputed has an edge to the sink at its
cost of keeping. Cutting an edge means paying its cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

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
    """Chooses variables to keep so that all wanted variables can be computed from these and those in `available`.

    Wanted variables come first in the result, then the others in the program's order.

    Args:
      wanted: variables of a program.
      producer: the equation that computes each variable, in the program's order. A variable without one can only be kept.
      available: variables that are in memory in any case.
      to_keep: the cost of keeping a variable.
      to_recompute: the cost of rerunning an equation; None: it must not be rerun.
      late: of several cuts of the same cost, take the one nearest to the wanted variables, or else nearest to the inputs.
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
    """The nodes on the source's side of a minimum cut; of several cuts, the smallest side if `small`, else the largest.

    No edge is given twice."""
    # Not before the first cut: these take an eighth of the time to import memjax.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    tails, heads, weights = (np.array(column) for column in zip(*sorted(edges), strict=True))
    capacities = _integers(weights)
    starts = np.searchsorted(tails, np.arange(nodes + 1)).astype(np.int32)
    flow = maximum_flow(csr_array((capacities, heads.astype(np.int32), starts), (nodes, nodes)), _SOURCE, _SINK).flow
    # In plain Python: planning cuts thousands of small graphs, for which sparse matrices take most of the time.
    left = dict(zip(zip(tails.tolist(), heads.tolist(), strict=True), capacities.tolist(), strict=True))
    rows = np.repeat(np.arange(nodes), np.diff(flow.indptr)).tolist()
    for tail, head, amount in zip(rows, flow.indices.tolist(), flow.data.tolist(), strict=True):
        left[tail, head] = left.get((tail, head), 0) - amount
    following: list[list[int]] = [[] for _ in range(nodes)]
    for (tail, head), capacity in left.items():
        if capacity > 0:
            one, other = (tail, head) if small else (head, tail)
            following[one].append(other)
    reached = {_SOURCE if small else _SINK}
    pending = [*reached]
    while pending:
        new = [node for node in following[pending.pop()] if node not in reached]
        reached.update(new)
        pending += new
    return reached if small else set(range(nodes)) - reached


def _integers(weights: Any) -> Any:
    """Scales weights to 32-bit integer capacities. Integer weights keep their exact ratios if their common divisor allows it."""
    finite = weights[np.isfinite(weights)]
    if np.all(finite == np.rint(finite)) and finite.max(initial=0) < 2**53:
        divisor = max(np.gcd.reduce(finite.astype(np.int64)), 1)
    else:
        divisor = 0
    if divisor and finite.sum() / divisor <= _WHOLE:
        scaled = np.where(np.isfinite(weights), weights, 0) / divisor
    else:
        # A positive weight becomes at least 1, so that a free edge is always cheaper.
        scaled = np.where(np.isfinite(weights), weights, 0) * (_WHOLE / finite.sum())
        scaled = np.where((weights > 0) & (scaled < 1), 1, scaled)
    return np.where(np.isfinite(weights), np.rint(scaled), 2 * _WHOLE).astype(np.int32)
