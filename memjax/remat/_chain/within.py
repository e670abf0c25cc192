"""A chain within a budget: the blocks as one program, which is planned as any other, and cut between the blocks, too.

A plan recomputes a stretch once. Where the least such plan is too large, groups of blocks that hold groups to recompute take
less, by the schedule of `chain_schedule`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from memjax._core.arrays import is_float
from memjax._core.backward.passes import vjp
from memjax._core.compat import varying
from memjax._core.lists import Arrays, drop, merge, pick
from memjax._core.program.jaxpr import axis_sizes, nbytes, trace
from memjax._plan.acting import by_plan
from memjax._plan.blocks import end_of_block
from memjax._plan.budget.decide import TooLittleError, decide
from memjax._plan.budget.digest import digest
from memjax._plan.derivative import Derivative
from memjax._plan.differentiable import differentiable
from memjax._plan.layout import Layout, layout_of, warn_of_guess
from memjax._plan.result import Plan
from memjax._plan.run import KeepAll
from memjax.remat._chain.block import Block
from memjax.remat._chain.items import BlockCost
from memjax.remat._chain.schedule import ChainSchedule, chain_schedule, too_little

ByBlock = Callable[[ChainSchedule, Arrays], Arrays]
"""The outputs of a chain's program, differentiated by a schedule."""


class Whole(NamedTuple):
    """A chain as one program.

    Attributes:
      closed: from the parameters of all blocks and the input to the last output and what the blocks return besides, marked
        where a block ends.
      inputs: the values, after those of the program's constants.
      is_x: which of them are leaves of the chain's input.
      has_cotangent: which outputs are differentiated.
      costs: of the blocks, estimated when they are asked for.
      by_block: runs the chain by a schedule.
    """

    closed: Any
    inputs: Arrays
    is_x: list[bool]
    has_cotangent: list[bool]
    costs: Callable[[], list[BlockCost]]
    by_block: ByBlock


def whole(
    traced: Sequence[Block],
    values: Sequence[Arrays],
    x: Arrays,
    costs: Callable[[], list[BlockCost]],
    run: Callable[[ChainSchedule, Sequence[Arrays], Arrays], tuple[Arrays, list[Arrays]]],
) -> Whole:
    """The chain of these blocks, `run` being (schedule, values, x) to (y, aux of each block)."""

    def split(inputs):
        rest, found = list(inputs), []
        for p in values:
            found.append(rest[: len(p)])
            del rest[: len(p)]
        return found, rest

    def program(*inputs):
        of_blocks, y = split(inputs)
        every = []
        for block, p in zip(traced, of_blocks, strict=True):
            y, aux = block.run(p, y)
            y = end_of_block(y)
            every += aux
        return [*y, *every]

    arrays = [leaf for p in (*values, x) for leaf in p]
    closed = trace(program, arrays, {})
    n = len(closed.consts)

    def by_block(schedule, inputs):
        y, every = run(schedule, *split(inputs[n:]))
        return [*y, *(leaf for aux in every for leaf in aux)]

    last = traced[-1]
    has_cotangent = [*last.y_float, *[False] * (len(closed.out_avals) - len(last.y))]
    inputs = [*closed.consts, *arrays]
    is_x = [i >= len(inputs) - len(x) for i in range(len(inputs))]
    return Whole(closed, inputs, is_x, has_cotangent, costs, by_block)


def within(chain: Whole, budget: int | str | None, plan: Plan | None, forward_mode: str) -> Arrays:
    """The outputs of the chain, differentiated within `budget`, or by `plan`."""
    axes = axis_sizes(chain.closed)

    def act(types, wrt, outs, layout):
        if plan is not None:
            return by_plan(_planned_for(plan, chain, types, wrt, outs, axes), plan, layout, wrt)
        derivative = Derivative(chain.closed, types, wrt, outs, axes, of_blocks=True)
        found = _decided(chain, derivative, types, layout, budget)
        warn_of_guess(
            layout,
            "remat.chain",
            "make the plan ahead, with memjax.remat.chain_plan of sharded arrays, and give it",
        )
        if isinstance(found, Plan):
            return by_plan(derivative, found, layout)
        return KeepAll(_ByBlock(functools.partial(chain.by_block, found), wrt, outs))

    outs = differentiable(chain.closed, chain.has_cotangent, chain.inputs, act, "remat.chain", forward_mode)
    return merge(
        pick(outs, chain.has_cotangent), lax.stop_gradient(drop(outs, chain.has_cotangent)), chain.has_cotangent
    )


def ahead(chain: Whole, budget: int | str, argnums: Sequence[int]) -> Plan | ChainSchedule:
    """What `within` decides on where all floats of the parameters (0) and of the input (1) in `argnums` are differentiated."""
    types = [*map(jax.typeof, chain.closed.consts), *chain.closed.in_avals]
    wrt = _floats(chain, types, argnums)
    if not any(wrt):
        names = " and ".join(("params", "x")[one] for one in argnums)
        raise ValueError(f"argnums must choose float arrays to differentiate, got {tuple(argnums)}: {names} has none")
    derivative = Derivative(chain.closed, types, wrt, chain.has_cotangent, axis_sizes(chain.closed), of_blocks=True)
    return _decided(chain, derivative, types, layout_of(chain.closed, chain.inputs, wrt), budget)


def _floats(chain: Whole, types: Sequence[Any], argnums: Sequence[int]) -> list[bool]:
    return [is_float(aval) and int(mine) in argnums for aval, mine in zip(types, chain.is_x, strict=True)]


def _planned_for(
    plan: Plan, chain: Whole, types: Sequence[Any], wrt: Sequence[bool], outs: Sequence[bool], axes: dict[str, int]
) -> Derivative:
    """The derivative that the plan was made for, with respect to the inputs in `wrt` or to more.

    Raises:
      ValueError: the plan was made for another chain, or for fewer inputs.
    """
    every: dict[tuple[bool, ...], tuple[int, ...]] = {tuple(wrt): ()}
    for numbers in ((0, 1), (0,), (1,)):
        every.setdefault(tuple(_floats(chain, types, numbers)), numbers)
    for differentiated in every:
        if any(differentiated):
            derivative = Derivative(chain.closed, types, differentiated, outs, axes, of_blocks=True)
            if digest(derivative) == plan.program:
                break
    else:
        raise ValueError(
            f"schedule must be of these blocks, with params and x of these shapes and dtypes, got a plan of another program "
            f"({plan.program}): make it by memjax.remat.chain_plan(blocks, params, x, budget=...) of what you pass here"
        )
    argnums = every[differentiated]
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
    costs = [_of_a_device(cost, layout) for cost in chain.costs()]
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


class _ByBlock(NamedTuple):
    """A chain's program differentiated by a schedule, `run` being from inputs to outputs."""

    run: Callable[[Arrays], Arrays]
    wrt: Sequence[bool]
    outs: Sequence[bool]

    def vjp(self, inputs: Sequence[Any]) -> tuple[Arrays, Any]:
        return vjp(self.run, inputs, self.wrt, self.outs)
