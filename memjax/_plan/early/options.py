"""The ways to keep or run again what the turns of a loop make that ends early."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from memjax._core.compat import scan_counts
from memjax._core.program.costs import array_bytes
from memjax._plan.derivative import LoopPair
from memjax._plan.early.turns import states_again
from memjax._plan.schedule.execute import LoopPlan
from memjax._plan.solve.segment import Option

_STEP = 1.25  # from one number of rows to the next
_MOST_BLOCK = 64
_LENGTHS = 12  # numbers of turns of which the mean is taken


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
            held = crossing + (sum(plan.levels) + 1) * state  # and a row that nobody reads
            inside = plan.block * option.kept_nbytes if plan.block > 1 else 0
            peak = held + state + inside + option.working + around
            seconds = length * (option.seconds + _runs(plan) * forward)
            found.append(
                Option((), held, seconds, peak, ((length, option),), in_blocks=plan, states_nbytes=plan.rows * state)
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
    if not 1 <= len(plan.levels) <= 2 or min(plan.levels) < 1:
        return False
    # The distance of the states doubles while there are turns left.
    return plan.levels[0] >= plan.length or plan.levels[0] % 2 == 0


def most_runs(plan: LoopPlan) -> int:
    """So often at most a block runs again for states, where two states are left for them."""
    return math.isqrt(2 * -(-plan.length // plan.block)) + 2


def _plans(length: int) -> Iterator[LoopPlan]:
    """Plans with rows for states of the forward pass, and more for turns that run again."""
    first = 2
    while first < length:
        block = 1
        while block <= min(_MOST_BLOCK, length // first):
            more = 1
            while more <= max(2 * first, 16):
                yield LoopPlan(length, block, 0, levels=(first, more))
                more *= 2
            block *= 2
        first = max(first + 2, 2 * int(first * _STEP / 2))
    yield LoopPlan(length, 1, 0, levels=(length,))


@functools.lru_cache(maxsize=4096)
def _runs(plan: LoopPlan) -> float:
    """How often a turn runs again, on average."""
    first, size = plan.levels[0], sum(plan.levels)
    if first >= plan.length:
        return 1.0
    every = []
    for turns in np.geomspace(1, plan.length, _LENGTHS).round():
        distance = 1 << max(math.ceil(turns / first) - 1, 0).bit_length()
        parts = math.ceil(turns / distance)
        blocks = -(-np.minimum(distance, turns - distance * np.arange(parts)) // plan.block)
        every.append(plan.block * _advances(blocks, size - np.arange(parts)).sum() / turns)
    return 1.0 + float(np.mean(every))


def _advances(blocks: np.ndarray, states: np.ndarray) -> np.ndarray:
    """How many blocks run for states, where so many are pulled back with so many states, of which the first is there."""
    runs, reached = np.zeros_like(blocks), np.ones_like(blocks)
    last = np.zeros_like(blocks)  # those with a state more and a run less
    while (short := reached < blocks).any():
        runs = runs + short
        last = np.where(short, last + reached, last)
        reached = np.where(short, reached * (states + runs) / np.maximum(runs, 1), reached)
    return runs * blocks - last
