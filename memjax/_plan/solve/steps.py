"""A turn of the backward pass in steps: an order in which it needs little memory, and what makes the compiler follow it.

A compiler for GPUs makes one kernel of elementwise operations that read the same arrays, with several results. Such a kernel
does not write over what it reads: the derivative of a gated layer, of three arrays two others, takes five of them, or six with
the gated product, where one result after the other takes four. So before a step what it reads passes a barrier together with
what the step before has made.

What moves arrays to the host or from there does not wait: it takes time, and no kernel. Nor do numbers, such as that of a slice:
XLA copies a slice of an array on the host without a kernel if it sees that its number counts turns of a loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from memjax._core.arrays import is_on_host
from memjax._core.barriers import barrier
from memjax._core.program.costs import array_bytes, stored
from memjax._core.program.dataflow import Dataflow, is_literal, read_by
from memjax._core.program.jaxpr import bind, read
from memjax._core.program.working import peak_bytes
from memjax._plan.solve.order import freeing_first, results_first

_WIDE = 0.5  # of the largest array: smaller ones are left to the compiler


class Step(NamedTuple):
    """Equations that are run together.

    Attributes:
      waits: variables that pass a barrier before: what the step reads, and what was made before.
      eqns: in order. All but the last may be run again in other steps: what they make is in no memory.
    """

    waits: Sequence[Any]
    eqns: Sequence[Any]


def in_steps(eqns: Sequence[Any], results: Iterable[Any], stays: Iterable[Any], platform: str) -> list[Step]:
    """The equations in steps.

    Args:
      eqns: in an order in which they can run.
      results: what takes no temporary memory.
      stays: what is needed afterwards.
      platform: what is compiled for.
    """
    flow = Dataflow(eqns)
    outside = flow.outside
    results = [var for var in results if var in flow.place]
    stays = [var for var in stays if var in flow.place]
    given = flow, Dataflow(results_first(eqns, results))
    orders = [freeing_first(order, results, stays, platform) for order in given]
    flow = min(orders, key=lambda order: peak_bytes(order, [], outside, stays, results, platform))
    names, needed = flow.names, {*results, *stays}
    written = stored(flow, [*outside, *needed], platform) - names.keys()
    in_memory = written | outside.keys()
    wide = _WIDE * max((array_bytes(var) for var in written - needed), default=0)
    steps: list[Step] = []
    before: list[Any] = []  # what the last step with wide arrays has made, if it is needed again
    for eqn, own in zip(flow.eqns, flow.reads, strict=True):
        outs = [out for out in eqn.outvars if out in written or out in needed]
        if not outs and not eqn.effects:
            continue
        inner = [*flow.needed(own, in_memory), eqn]
        reads = [var for var in read_by(inner) if var in in_memory]
        waits: list[Any] = []
        moves = any(is_on_host(var.aval) for var in (*reads, *outs))
        if not moves and eqn.outvars[0] not in names and any(array_bytes(var) >= wide for var in (*reads, *outs)):
            # What is in no memory would be taken from a step before otherwise, and be kept from there on.
            computes = any(one.outvars[0] not in names for one in inner[:-1])
            if before and (computes or not set(before).intersection(reads)):
                arrays = [var for var in reads if var.aval.shape]
                waits = list(dict.fromkeys([*(arrays or reads), *before]))
            before = [out for out in outs if out in flow.read or out in needed] or before
        steps.append(Step(waits, inner))
    return steps


def run_steps(steps: Sequence[Step], values: dict[Any, Any], wanted: Iterable[Any]) -> dict[Any, Any]:
    """The values of the `wanted` variables, as far as they are there, after the steps, which start from `values`."""
    env = dict(values)
    for step in steps:
        env |= zip(step.waits, barrier(read(env, step.waits)), strict=True)
        inner = dict[Any, Any]()
        for eqn in step.eqns:
            made = bind(eqn, [atom.val if is_literal(atom) else inner.get(atom, env.get(atom)) for atom in eqn.invars])
            inner |= zip(eqn.outvars, made, strict=True)
        for var in step.eqns[-1].outvars:
            env.setdefault(var, inner[var])  # a known value is not replaced by its recomputation
    return {var: env[var] for var in wanted if var in env}
