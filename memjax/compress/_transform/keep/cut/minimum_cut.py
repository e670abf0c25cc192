"""The cheapest arrays to keep, so that wanted ones follow: a minimum cut of the program, in bytes.

Each array costs the bytes that keeping it takes, its code's where it can be encoded. Each equation that is run again costs bytes,
too: those that its time is worth. The smallest sum of both is a minimum cut. Of several the one nearest to the wanted arrays
is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from memjax._core.backward.min_cut import INFINITE, Flow
from memjax._core.program.jaxpr import Walk, variables


def cheapest(
    wanted: Iterable[Any],
    producer: dict[Any, Any],
    free: set[Any],
    bytes_of: Callable[[Any], int],
    again: Callable[[Any], int | None],
) -> list[Any]:
    """Variables to keep, from which with those in `free` every `wanted` one follows.

    Args:
      wanted: variables of a program.
      producer: the equation that makes each variable.
      free: variables that are there anyway.
      bytes_of: what keeping a variable costs.
      again: what running an equation again costs; None: it is never run again.
    """
    flow = Flow()
    wanted = [var for var in dict.fromkeys(variables(wanted)) if var not in free]
    walk, repeats, visited = Walk(wanted), dict[Any, Any](), list[Any]()
    for var in wanted:
        flow.edge("source", var, INFINITE)
    for var in walk:
        visited.append(var)
        eqn = producer.get(var)
        cost = None if eqn is None else again(eqn)
        if eqn is None or cost is None:
            flow.edge(var, "sink", bytes_of(var))
            continue
        repeats[var] = repeat = ("again", id(eqn))
        flow.edge(var, repeat, bytes_of(var))
        flow.edge(repeat, "sink", cost)
        for atom in variables(eqn.invars):
            if atom not in free:
                flow.edge(repeat, atom, INFINITE)
                walk.add([atom])
    near = flow.near_side("source", "sink")
    return [var for var in visited if var in near and repeats.get(var, "sink") not in near]
