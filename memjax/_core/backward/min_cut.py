"""The fewest bytes to keep from a step so that its residuals follow without its expensive operations.

The residuals of reverse-mode differentiation are redundant. An LSTM keeps gates, their derivatives and tanh of the state,
where the sum that goes into the gates gives them all. The smallest sufficient set of values is a minimum cut of the program,
between the residuals and what is lost: the carry, and outputs of expensive operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from memjax._core.program.jaxpr import variables
from memjax._core.program.primitives import expensive

INFINITE = 1 << 62


def smallest_kept(
    jaxpr: Any,
    invariant: Iterable[Any],
    again: Iterable[Any],
    wanted: Iterable[Any],
    nbytes: Callable[[Any], int],
) -> list[Any]:
    """Variables of `jaxpr`, fewest bytes in all, from which every `wanted` one follows cheaply.

    Args:
      jaxpr: straight-line equations. Inputs that are not named below (the carry) are lost unless they are kept.
      invariant: inputs that are the same for every step; what depends on them alone is never kept.
      again: inputs that are there again in the backward pass; what follows from them cheaply is never kept.
      wanted: what has to be recomputable.
      nbytes: bytes of a variable.
    """
    invariant = set(invariant)
    free = invariant | set(again)
    graph = Flow()
    for var in (*jaxpr.invars, *jaxpr.constvars):
        if var not in free:
            graph.edge("source", (var, "in"), INFINITE)
            graph.edge((var, "in"), (var, "out"), nbytes(var))
    for eqn in jaxpr.eqns:
        inputs = set(variables(eqn.invars))
        if not eqn.effects and inputs <= invariant:
            invariant.update(eqn.outvars)
            free.update(eqn.outvars)
        elif inputs <= free and not expensive(eqn):
            free.update(eqn.outvars)
        else:
            for var in eqn.outvars:
                graph.edge((var, "in"), (var, "out"), nbytes(var))
                if expensive(eqn):
                    graph.edge("source", (var, "in"), INFINITE)
                for atom in inputs - free:
                    graph.edge((atom, "out"), (var, "in"), INFINITE)
    for var in variables(wanted):
        if var not in free:
            graph.edge((var, "out"), "sink", INFINITE)
    near = graph.near_side("source", "sink")
    return [node[0] for node in near if node[-1] == "in" and (node[0], "out") not in near]


class Flow:
    """Maximum flow by Dinic's algorithm."""

    def __init__(self) -> None:
        self.room: dict[Any, dict[Any, int]] = {}

    def edge(self, tail: Any, head: Any, capacity: int) -> None:
        self.room.setdefault(tail, {})[head] = capacity
        self.room.setdefault(head, {}).setdefault(tail, 0)

    def near_side(self, source: Any, sink: Any) -> dict[Any, int]:
        """Nodes on the source's side of a minimum cut, in the order of their distance."""
        self.room.setdefault(source, {})
        while True:
            level = self._levels(source)
            if sink not in level:
                return level
            untried = {node: list(heads) for node, heads in self.room.items()}
            while path := self._path(source, sink, level, untried):
                flow = min(self.room[tail][head] for tail, head in pairwise(path))
                for tail, head in pairwise(path):
                    self.room[tail][head] -= flow
                    self.room[head][tail] += flow

    def _levels(self, source: Any) -> dict[Any, int]:
        level, queue = {source: 0}, deque([source])
        while queue:
            tail = queue.popleft()
            for head, room in self.room[tail].items():
                if room and head not in level:
                    level[head] = level[tail] + 1
                    queue.append(head)
        return level

    def _path(self, source: Any, sink: Any, level: dict[Any, int], untried: dict[Any, list[Any]]) -> list[Any]:
        path = [source]
        while path and path[-1] != sink:
            tail = path[-1]
            while untried[tail]:
                head = untried[tail][-1]
                if self.room[tail][head] and level.get(head) == level[tail] + 1:
                    path.append(head)
                    break
                untried[tail].pop()
            else:
                path.pop()
                if path:
                    untried[path[-1]].pop()
        return path
