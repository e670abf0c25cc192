"""Loops that end early inside of a turn of a loop that does: the stages of a solver's step.

They are written as they run before the turn around them is planned, by the plan of the least memory. What they keep are values of
the turn around them like any others, to be kept there or made again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from memjax._core.lists import Arrays
from memjax._core.program import costs
from memjax._plan.derivative import LoopPair, Passes, loop_pairs
from memjax._plan.early.ended import in_place, with_ends
from memjax._plan.early.loop import EarlyLoop
from memjax._plan.early.options import early_options
from memjax._plan.solve.loops import turn_of
from memjax._plan.solve.phases import available_anywhere
from memjax._plan.solve.segment import options


class _Turns(Passes):
    """A turn of a loop and the turn of its backward pass, as two passes."""

    def __init__(self, pair: LoopPair):
        self.forward, self.backward = pair.program, pair.pull
        outs = pair.program.outvars
        self.outputs = [out for i, out in enumerate(outs) if i not in set(pair.residuals)]


def loops_of(passes: Passes) -> list[LoopPair]:
    """The pairs of loops of two passes, with the loops in their turns. They are found once."""
    passes.loops = [with_loops_inside(pair, passes.axes) for pair in passes.loops]
    return passes.loops


def with_loops_inside(pair: LoopPair, axes: Mapping[str, int]) -> LoopPair:
    """The pair whose turns run the loops inside of them so, if it ends early; named axes around it have the sizes `axes`."""
    if pair.early is None:
        return pair
    for inner in loop_pairs(_Turns(pair)):
        if inner.early is not None:
            pair = _with(pair, with_loops_inside(inner, axes), axes)
    paired = {id(inner.forward) for inner in loop_pairs(_Turns(pair))}
    return pair._replace(program=with_ends(pair.program, paired, axes))


def _with(pair: LoopPair, inner: LoopPair, axes: Mapping[str, int]) -> LoopPair:
    # The same for all devices: a plan numbers the equations that come of it.
    rates, free = costs.device(jax.devices("cpu")[0]), available_anywhere(inner.program, inner.free)
    turns = options(turn_of(inner, free), rates, free, is_loop=True)
    option = min(early_options(inner, turns, 0, 0, 0.0), key=lambda one: (one.working, one.seconds))
    loop = EarlyLoop(inner, option.parts, in_blocks=option.in_blocks)
    stays = [out for i, out in enumerate(inner.forward.outvars) if i not in set(inner.residuals)]

    def forward(env: dict[Any, Any]) -> Arrays:
        kept = loop.forward(env)
        return [*(env[out] for out in stays), *kept]

    program, made = in_place(pair.program, inner.forward, forward, stays, axes, inner.forward.invars)
    kept = made[len(stays) :]

    def backward(env: dict[Any, Any]) -> Arrays:
        loop.backward(env, env, [env[var] for var in kept])
        return [env[out] for out in inner.backward.outvars]

    reads = [*loop.read_by_mirror, *kept]
    pull, _ = in_place(pair.pull, inner.backward, backward, inner.backward.outvars, axes, reads)
    return pair._replace(program=program, pull=pull)
