"""Chooses which values to keep so that all wanted values can be obtained at the least total cost: a minimum cut.

Nodes are values and equations. The source has infinite edges to the wanted values. The edge from a value to its equation costs
what keeping the value costs. The edge from an equation to the sink costs what rerunning it costs. Infinite edges lead from an
equation to those of its operands that are not available anyway. A value that cannot be recomputed has an edge to the sink at its
cost of keeping. Cutting an edge means paying its cost.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from memjax._core.program.dataflow import Walk, variables

_WHOLE = 1 << 29  # the finite capacities together: flows are counted in 32 bits
_SOURCE, _SINK = 0, 1
_FEW = 256  # edges up to which plain Python takes less time than SciPy, most of which goes into making its matrices


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
    graph = Graph(wanted, producer, available, lambda eqn: to_recompute(eqn) is not None)
    return graph.cheapest(to_keep, to_recompute, late=late)


class Graph:
    """What can be kept and what can run again, of which `cheapest` chooses for any costs.

    Args:
      wanted, producer, available: as for the function.
      reruns: whether an equation may be rerun.

    Attributes:
      variables: those among which is chosen.
    """

    def __init__(
        self,
        wanted: Iterable[Any],
        producer: Mapping[Any, Any],
        available: set[Any],
        reruns: Callable[[Any], bool],
    ):
        wanted = [var for var in dict.fromkeys(variables(wanted)) if var not in available]
        number: dict[Any, int] = {}
        node = lambda key: number.setdefault(key, len(number) + 2)
        kept, rerun, free = list[tuple[int, int]](), list[tuple[int, int]](), [(_SOURCE, node(var)) for var in wanted]
        walk, visited = Walk(wanted), list[Any]()
        self._eqns: list[Any] = []
        for var in walk:
            visited.append(var)
            eqn = producer.get(var)
            if eqn is None or not reruns(eqn):
                kept.append((node(var), _SINK))
                continue
            is_new = id(eqn) not in number
            itself = node(id(eqn))
            kept.append((node(var), itself))
            if is_new:
                self._eqns.append(eqn)
                rerun.append((itself, _SINK))
                operands = [atom for atom in dict.fromkeys(variables(eqn.invars)) if atom not in available]
                free += [(itself, node(atom)) for atom in operands]
                walk.add(operands)
        self.variables = visited
        self._edges, self._nodes = [*kept, *rerun, *free], len(number) + 2
        # In the order of the result, with the node of each and that of its equation, if it has one.
        there = set(visited)
        self._ends = [
            (var, number[var], number.get(id(producer[var])) if var in producer else None)
            for var in dict.fromkeys([*wanted, *producer, *visited])
            if var in there
        ]

    def cheapest(
        self, to_keep: Callable[[Any], float], to_recompute: Callable[[Any], float | None], *, late: bool = True
    ) -> list[Any]:
        """The variables to keep at these costs."""
        if not self.variables:
            return []
        costs = [*map(to_keep, self.variables), *map(to_recompute, self._eqns)]
        capacities = _integers(np.array(costs + [math.inf] * (len(self._edges) - len(costs))))
        left = self._left_in_few(capacities) if len(self._edges) <= _FEW else self._left_in_many(capacities)
        near = self._near_side(left, late)
        return [var for var, at, eqn in self._ends if at in near and eqn not in near]

    def _near_side(self, left: Sequence[int], small: bool) -> set[int]:
        """The nodes on the source's side of a minimum cut; of several cuts, the smallest side if `small`, else the largest.

        `left`: what a maximum flow leaves of the capacity of each arc."""
        heads, leaving = self._arcs
        reached = {_SOURCE if small else _SINK}
        pending = [*reached]
        while pending:
            for arc in leaving[pending.pop()]:
                if left[arc if small else arc ^ 1] and heads[arc] not in reached:
                    reached.add(heads[arc])
                    pending.append(heads[arc])
        return reached if small else set(range(self._nodes)) - reached

    @functools.cached_property
    def _arcs(self) -> tuple[list[int], list[list[int]]]:
        """Where arcs lead, and those that leave each node. Edge `i` is arc `2 i`; arc `2 i + 1` takes back what flows there."""
        heads: list[int] = []
        leaving: list[list[int]] = [[] for _ in range(self._nodes)]
        for tail, head in self._edges:
            leaving[tail].append(len(heads))
            leaving[head].append(len(heads) + 1)
            heads += [head, tail]
        return heads, leaving

    def _left_in_few(self, capacities: Any) -> Sequence[int]:
        """By Dinic's algorithm."""
        heads, leaving = self._arcs
        left = [0] * len(heads)
        left[::2] = capacities.tolist()
        while True:
            # How many arcs away from the source each node is.
            level, order = [-1] * self._nodes, [_SOURCE]
            level[_SOURCE] = 0
            for node in order:
                for arc in leaving[node]:
                    if left[arc] and level[heads[arc]] < 0:
                        level[heads[arc]] = level[node] + 1
                        order.append(heads[arc])
            if level[_SINK] < 0:
                return left
            # Paths on which each arc leads further away, until one is full on each.
            ahead, path, node = [iter(arcs) for arcs in leaving], list[int](), _SOURCE
            while True:
                if node == _SINK:
                    amount = min(left[arc] for arc in path)
                    for arc in path:
                        left[arc] -= amount
                        left[arc ^ 1] += amount
                    full = next(i for i, arc in enumerate(path) if not left[arc])
                    node = heads[path[full] ^ 1]
                    del path[full:]
                for arc in ahead[node]:
                    if left[arc] and level[heads[arc]] == level[node] + 1:
                        path.append(arc)
                        node = heads[arc]
                        break
                else:
                    if not path:
                        break
                    node = heads[path.pop() ^ 1]

    def _left_in_many(self, capacities: Any) -> Sequence[int]:
        # Not before the first cut of many: these take an eighth of the time to import memjax.
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import maximum_flow

        ends = np.array(self._edges, np.int32)
        order = np.lexsort((ends[:, 1], ends[:, 0]))
        starts = np.searchsorted(ends[order, 0], np.arange(self._nodes + 1)).astype(np.int32)
        matrix = csr_array((capacities[order], ends[order, 1], starts), (self._nodes, self._nodes))
        flow = maximum_flow(matrix, _SOURCE, _SINK).flow
        amounts = np.asarray(flow[ends[:, 0], ends[:, 1]]).ravel()
        # What flows back is counted as less than nothing there.
        return np.stack([capacities - amounts, amounts], 1).ravel().tolist()


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
