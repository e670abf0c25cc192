"""A chain within a budget: the blocks as one program, which is planned as any other, and cut between the blocks, too.

A plan recomputes a stretch once. Where the least such plan is too large, groups of blocks that hold groups to recompute take
less, by the schedule of `chain_schedule`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
from jax import lax

from memjax._core.arrays import is_float
from memjax._core.backward.passes import vjp
from memjax._core.compat import varying
from memjax._core.lists import Arrays, pick
from memjax._core.program.jaxpr import axis_sizes, nbytes, trace
from memjax._plan.acting import by_plan
from memjax._plan.blocks import end_of_block
from memjax._plan.budget.decide import TooLittleError, decide
from memjax._plan.budget.digest import digest
from memjax._plan.derivative import Derivative
from memjax._plan.differentiable import differentiable
from memjax._plan.memory.layout import Layout, layout_of, warn_of_guess
from memjax._plan.result import Plan
from memjax._plan.run import KeepAll
from memjax.remat._chain.block import Block, estimates, run_items
from memjax.remat._chain.schedule import ChainSchedule, chain_schedule, too_little
from memjax.remat._chain.solvers import BlockCost


class Whole:
    """A chain as one program: blocks, the values of the `p` of each, and the leaves of the input.

    Attributes:
      blocks: as given.
      closed: from the parameters of all blocks and the input to the last output and what the blocks return besides, marked
        where a block ends.
      inputs: the values, after those of the program's constants.
      is_x: which of them are leaves of the chain's input.
      has_cotangent: which outputs are differentiated.
    """

    def __init__(self, blocks: Sequence[Block], values: Sequence[Arrays], x: Arrays):
        def program(*inputs):
            of_blocks, y = self._by_block(inputs)
            every = []
            for block, p in zip(blocks, of_blocks.values(), strict=True):
                y, aux = block.run(p, y)
                y = end_of_block(y)
                every += aux
            return [*y, *every]

        self.blocks = blocks
        arrays = [leaf for p in (*values, x) for leaf in p]
        self.closed: Any = trace(program, arrays, {})
        self.inputs = [*self.closed.consts, *arrays]
        self.is_x = [i >= len(self.inputs) - len(x) for i in range(len(self.inputs))]
        y_float = blocks[-1].y_float
        self.has_cotangent = [*y_float, *[False] * (len(self.closed.out_avals) - len(y_float))]

    def _by_block(self, inputs: Sequence[Any]) -> tuple[dict[int, Arrays], Arrays]:
        """The `p` of each block, and the chain's input."""
        rest = list(inputs)
        return {i: [rest.pop(0) for _ in block.p] for i, block in enumerate(self.blocks)}, rest

    def derivative(self, types: Sequence[Any], wrt: Sequence[bool], outs: Sequence[bool]) -> Derivative:
        return Derivative(self.closed, types, wrt, outs, axis_sizes(self.closed), of_blocks=True)

    def scheduled(self, schedule: ChainSchedule, inputs: Sequence[Any]) -> Arrays:
        """The outputs, differentiated by the schedule."""
        y, every = run_items(schedule.items, self.blocks, *self._by_block(inputs[len(self.closed.consts) :]))
        return [*y, *(leaf for aux in every for leaf in aux)]


def within(chain: Whole, budget: int | str | None, schedule: Plan | ChainSchedule | None, forward_mode: str) -> Arrays:
    """The outputs of the chain, differentiated within `budget`, or by `schedule`."""

    def act(types, wrt, outs, layout):
        found = schedule
        if isinstance(found, Plan):
            return by_plan(_planned_for(found, chain, types, wrt, outs), found, layout, wrt)
        if found is None:
            derivative = chain.derivative(types, wrt, outs)
            found = _decided(chain, derivative, types, layout, budget)
            fix = "make the plan ahead, with memjax.remat.chain_plan of sharded arrays, and give it"
            warn_of_guess(layout, "remat.chain", fix)
            if isinstance(found, Plan):
                return by_plan(derivative, found, layout)
        run = functools.partial(chain.scheduled, found)
        return KeepAll(SimpleNamespace(vjp=lambda inputs: vjp(run, inputs, wrt, outs)))

    outs = differentiable(chain.closed, chain.has_cotangent, chain.inputs, act, "remat.chain", forward_mode)
    return [out if has else lax.stop_gradient(out) for out, has in zip(outs, chain.has_cotangent, strict=True)]


def ahead(chain: Whole, budget: int | str, argnums: Sequence[int]) -> Plan | ChainSchedule:
    """What `within` decides on where all floats of the parameters (0) and of the input (1) in `argnums` are differentiated."""
    types = [*map(jax.typeof, chain.closed.consts), *chain.closed.in_avals]
    wrt = _floats(chain, types, argnums)
    if not any(wrt):
        names = " and ".join(("params", "x")[one] for one in argnums)
        raise ValueError(f"argnums must choose float arrays to differentiate, got {tuple(argnums)}: {names} has none")
    derivative = chain.derivative(types, wrt, chain.has_cotangent)
    return _decided(chain, derivative, types, layout_of(chain.closed, chain.inputs, wrt), budget)


def _floats(chain: Whole, types: Sequence[Any], argnums: Sequence[int]) -> list[bool]:
    return [is_float(aval) and int(mine) in argnums for aval, mine in zip(types, chain.is_x, strict=True)]


def _planned_for(
    plan: Plan, chain: Whole, types: Sequence[Any], wrt: Sequence[bool], outs: Sequence[bool]
) -> Derivative:
    """The derivative that the plan was made for, with respect to the inputs in `wrt` or to more.

    Raises:
      ValueError: the plan was made for another chain, or for fewer inputs.
    """
    for argnums in ((), (0, 1), (0,), (1,)):
        differentiated = _floats(chain, types, argnums) if argnums else wrt
        if any(differentiated):
            derivative = chain.derivative(types, differentiated, outs)
            if digest(derivative) == plan.program:
                break
    else:
        raise ValueError(
            f"schedule must be of these blocks, with params and x of these shapes and dtypes, got a plan of another program "
            f"({plan.program}): make it by memjax.remat.chain_plan(blocks, params, x, budget=...) of what you pass here"
        )
    if any(one and not mine for one, mine in zip(wrt, differentiated, strict=True)):
        raise ValueError(
            f"schedule must be a plan for all that is differentiated, got one of chain_plan(..., argnums={argnums}): "
            "differentiate that alone, or make the plan with argnums=(0, 1), for params and x"
        )
    return derivative


def _decided(
    chain: Whole, derivative: Derivative, types: Sequence[Any], layout: Layout, budget: int | str | None
) -> Plan | ChainSchedule:
    """The plan for the budget; the schedule of groups of blocks where that alone fits, or takes the least memory.

    Raises:
      ValueError: neither fits.
    """
    assert budget is not None
    aside = _held_by_sums(types, derivative.wrt)
    if isinstance(budget, int):
        try:
            return decide(derivative, types, layout, budget - aside)
        except TooLittleError:
            pass
    plan = decide(derivative, types, layout, "min")
    costs = [_of_a_device(cost, layout) for cost in estimates(chain.blocks)]
    schedule = chain_schedule(costs, "min")
    fewest = min(plan.nbytes + aside, schedule.nbytes)
    least: Plan | ChainSchedule = schedule if fewest == schedule.nbytes else plan
    if budget == "min":
        return least
    assert isinstance(budget, int)
    if schedule.nbytes <= budget:
        return chain_schedule(costs, budget)
    raise ValueError(too_little(budget, fewest, least.seconds / (least.plain_seconds or 1.0), schedule.plain_nbytes))


def _of_a_device(cost: BlockCost, layout: Layout) -> BlockCost:
    """The cost of a device's share of the block."""
    sizes = {name: layout.local(getattr(cost, name)) for name in BlockCost._fields[2:]}
    return cost._replace(forward=cost.forward / layout.devices, backward=cost.backward / layout.devices, **sizes)


def _held_by_sums(types: Sequence[Any], wrt: Sequence[bool]) -> int:
    """Bytes of gradients that are summed over the devices of `shard_map`, before and after: XLA:CPU holds both until the end.

    Compiled by itself the chain does not show them.
    """
    summed = 0
    for aval in pick(types, wrt):
        kinds = zip(aval.sharding.mesh.axis_names, aval.sharding.mesh.axis_types, strict=True)
        manual = {name for name, kind in kinds if kind == jax.sharding.AxisType.Manual}
        summed += nbytes(aval) if manual - varying(aval) else 0
    return 2 * summed
