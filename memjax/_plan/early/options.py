"""The ways to keep or run again what the turns of a loop make that ends early."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from memjax._core.compat import scan_counts
from memjax._core.program.costs import array_bytes
from memjax._plan.derivative import LoopPair
from memjax._plan.early.turns import states_again
from memjax._plan.schedule.execute import LoopPlan
from memjax._plan.solve.segment import Option

_MOST_LEVELS = 4
_STEP = 1.1  # from one number of rows to the next


def early_options(pair: LoopPair, turns: Sequence[Option], crossing: int, around: int, forward: float) -> list[Option]:
    """The options for the loop.

    How many turns it has nobody knows. Their logarithm is taken to be even between 0 and that of their bound.

    Args:
      pair: the loop.
      turns: the options for a turn.
      crossing: bytes that later stretches read.
      around: bytes of what else is there in the backward pass.
      forward: seconds of a turn of the forward pass.
    """
    length = pair.forward.params["length"]
    state = sum(map(array_bytes, states_of(pair)))
    found = []
    for option in turns:
        for plan in _plans(length):
            rows = sum(plan.levels) + 2 * len(plan.levels)  # a row that nobody reads, and the state itself
            inside = plan.block * option.kept_nbytes if plan.block > 1 else 0
            held = crossing + plan.levels[0] * state
            peak = crossing + rows * state + inside + option.working + around
            seconds = length * (option.seconds + _runs(plan) * forward)
            found.append(
                Option((), held, seconds, peak, ((length, option),), in_blocks=plan, states_nbytes=held - crossing)
            )
        kept, seconds = crossing + length * option.kept_nbytes, length * option.seconds
        plan = LoopPlan(length, 1, length)
        found.append(Option((), kept, seconds, kept + option.working + around, ((length, option),), in_blocks=plan))
    return found


def states_of(pair: LoopPair) -> list[Any]:
    """What is kept of a state."""
    consts, carried = scan_counts(pair.forward)
    state = pair.program.invars[consts:]
    return [state[i] for i in states_again(pair.program, pair.pull, consts, carried)]


def is_plan(plan: LoopPlan) -> bool:
    """Whether a loop that ends early can run by the plan."""
    if plan.schedule is not None or plan.block < 1:
        return False
    if plan.tail:
        return plan.tail == plan.length and not plan.levels
    if not plan.levels or min(plan.levels) < 1:
        return False
    # The distance of the outermost states doubles while there are turns left.
    first, below = plan.levels[0], math.prod(plan.levels[1:]) * plan.block
    return first >= plan.length or (first % 2 == 0 and below >= _distance(plan.length, first))


def _distance(length: int, rows: int) -> int:
    """The largest distance of so many states."""
    return 1 << (-(-length // rows) - 1).bit_length()


def _plans(length: int) -> Iterator[LoopPlan]:
    """Plans with rows of states: many of the outermost level, for loops of few turns, and as few as can be of the others."""
    first = 2
    while first < length:
        below, block = _distance(length, first), 1
        while block <= below:
            left = -(-below // block)
            for levels in range(0 if left == 1 else 1, _MOST_LEVELS):
                inner = math.ceil(left ** (1 / levels) - 1e-9) if levels else 1
                if levels and inner == 1 and levels > 1:
                    break
                yield LoopPlan(length, block, 0, levels=(first, *[inner] * levels))
            block *= 2
        first = max(first + 2, 2 * int(first * _STEP / 2))
    yield LoopPlan(length, 1, 0, levels=(length,))


def _runs(plan: LoopPlan) -> float:
    """How often a turn runs again, on average."""
    runs = 1.0
    most = math.log(max(plan.length, 2))
    for level in range(1, len(plan.levels)):
        # States of this level are found where those of the levels above are not as many as there are turns.
        runs += 1 - min(math.log(math.prod(plan.levels[:level])) / most, 1)
    return runs
