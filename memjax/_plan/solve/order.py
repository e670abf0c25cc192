"""The order in which equations run: as late as they are needed, what frees memory first, or what leads to results first."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from memjax._core.program.costs import array_bytes, stored
from memjax._core.program.dataflow import Dataflow, is_literal, variables


def in_time(again: Sequence[Any], backward: Sequence[Any]) -> list[Any]:
    """The equations of `again` and `backward`, each of the former no earlier than the latter need it."""
    found = _Found(again)
    for eqn in backward:
        found.add_makers(variables(eqn.invars))
        found.order.append(eqn)
    return found.order


def results_first(eqns: Sequence[Any], results: Iterable[Any]) -> list[Any]:
    """The equations in an order in which each that makes one of the results runs as early as it can, in their order.

    What is read for a result and for nothing afterwards takes no memory then while the others run.
    """
    found, wanted = _Found(eqns), set(results)
    for eqn in [*(eqn for eqn in eqns if not wanted.isdisjoint(eqn.outvars)), *eqns]:
        found.add(eqn)
    return found.order


class _Found:
    """An order of equations to which one is added after those that make what it reads, as far as these are among `eqns`."""

    def __init__(self, eqns: Sequence[Any]):
        self.order: list[Any] = []
        self._makers = Dataflow(eqns).makers
        self._done: set[int] = set()

    def add(self, eqn: Any) -> None:
        stack = [(eqn, False)]
        while stack:
            eqn, ready = stack.pop()
            if ready:
                self.order.append(eqn)
            elif id(eqn) not in self._done:
                self._done.add(id(eqn))
                stack.append((eqn, True))
                stack.extend((self._makers[var], False) for var in variables(eqn.invars) if var in self._makers)

    def add_makers(self, read: Iterable[Any]) -> None:
        for var in read:
            if var in self._makers:
                self.add(self._makers[var])


def as_compiled(eqns: Sequence[Any], platform: str) -> list[Any]:
    """The equations as compilers for a platform change them, as far as that tells which arrays there are."""
    return _transposed_products(_scattered_into_sums(eqns), platform)


def _transposed_products(eqns: Sequence[Any], platform: str) -> list[Any]:
    """The equations; a product of matrices that is only read to be transposed, as gradients of weights are, is one with factors
    swapped. On CPUs one of narrow floats is of wider ones, which are converted first."""
    flow = Dataflow(eqns)
    gone: set[int] = set()
    instead: dict[int, Any] = {}
    for eqn in eqns:
        if eqn.primitive.name != "transpose" or len(eqn.outvars[0].aval.shape) != 2 or is_literal(eqn.invars[0]):
            continue
        product = flow.makers.get(eqn.invars[0])
        if product is None or product.primitive.name != "dot_general" or len(flow.readers[eqn.invars[0]]) > 1:
            continue
        if platform != "cpu" or eqn.outvars[0].aval.dtype.itemsize >= 4:
            gone.add(id(eqn))
            instead[id(product)] = product.replace(outvars=eqn.outvars)
    return [instead.get(id(eqn), eqn) for eqn in eqns if id(eqn) not in gone]


def _scattered_into_sums(eqns: Sequence[Any]) -> list[Any]:
    """The equations; what is scattered into zeros and added to an array is scattered into that array, as compilers do."""
    flow = Dataflow(eqns)
    gone: set[int] = set()
    instead: dict[int, Any] = {}
    for eqn in eqns:
        if eqn.primitive.name not in ("scatter-add", "scatter_add"):
            continue
        found = [eqns[i] for i in flow.readers.get(eqn.outvars[0], [])]
        zeros = None if is_literal(eqn.invars[0]) else flow.makers.get(eqn.invars[0])
        if len(found) != 1 or found[0].primitive.name not in ("add", "add_any") or zeros is None:
            continue
        if zeros.primitive.name != "broadcast_in_dim" or not is_literal(zeros.invars[0]) or zeros.invars[0].val != 0:
            continue
        [total] = found
        others = [atom for atom in total.invars if atom is not eqn.outvars[0]]
        if id(total) not in instead and len(others) == 1 and not is_literal(others[0]):
            gone.add(id(eqn))
            instead[id(total)] = eqn.replace(invars=[*others, *eqn.invars[1:]], outvars=total.outvars)
    return [instead.get(id(eqn), eqn) for eqn in eqns if id(eqn) not in gone]


def freeing_first(flow: Dataflow, results: Iterable[Any], stays: Iterable[Any], platform: str) -> Dataflow:
    """The equations in an order in which one that frees no less than it needs runs as soon as it can.

    Args:
      flow: of equations in an order in which they can run.
      results: what takes no temporary memory.
      stays: what is needed afterwards.
      platform: what is compiled for.
    """
    root = lambda var: flow.names.get(var, var)
    outside, needed = set(map(root, results)), set(map(root, stays))
    written = stored(flow, [*outside, *needed], platform)
    needs = [
        sum(array_bytes(out) for out in eqn.outvars if out in written and root(out) not in outside) for eqn in flow.eqns
    ]
    reads: list[set[Any]] = []
    through: dict[Any, set[Any]] = {}  # what is read to compute a value that is not written
    for eqn, roots in zip(flow.eqns, flow.roots, strict=True):
        found: set[Any] = set().union(*(through.get(var, {var}) for var in roots))
        inside = {root(out) for out in eqn.outvars if out not in written}
        through |= dict.fromkeys(inside, found)
        reads.append(set() if len(inside) == len(eqn.outvars) else found)
    left: dict[Any, int] = {}
    for var in (var for inputs in reads for var in inputs):
        left[var] = left.get(var, 0) + 1

    def frees(i: int) -> int:
        return sum(array_bytes(var) for var in reads[i] if left[var] == 1 and var not in needed and var not in outside)

    def choose(ready: list[int]) -> int:
        i = ready.pop(next((k for k, i in enumerate(ready) if needs[i] <= frees(i)), 0))
        for var in reads[i]:
            left[var] -= 1
        return i

    return flow.reordered(_topological(flow, choose))


def _topological(flow: Dataflow, choose: Callable[[list[int]], int]) -> list[int]:
    """The numbers of the equations, of those that are ready always the one that `choose` takes out."""
    before = [{flow.place[var] for var in reads if var in flow.place} for reads in flow.reads]
    after: list[list[int]] = [[] for _ in flow.eqns]
    for i, found in enumerate(before):
        for j in found:
            after[j].append(i)
    waits = list(map(len, before))
    ready = [i for i, count in enumerate(waits) if not count]
    order = []
    while ready:
        i = choose(ready)
        order.append(i)
        for j in after[i]:
            waits[j] -= 1
            if not waits[j]:
                insort(ready, j)
    return order
