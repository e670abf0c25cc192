"""Choosing what a scan executes: the exact schedule for some slots, or the fastest plan within a budget."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from memjax._core.check import number, readable_bytes
from memjax._core.program.jaxpr import nbytes
from memjax._plan.schedule.execute import LoopPlan
from memjax._plan.schedule.forward_counts import HiddenCounts, InternalCounts
from memjax._plan.schedule.schedule import Strategy, schedule
from memjax._plan.schedule.store import Shared

_LARGEST_TABLE = 300_000  # entries of a dynamic program: some tenths of a second
# Most blocks in a table that `fastest` tries first, because the table is part of the program. More are allowed only if no other
# plan fits, and never in a table of both kinds of states.
_MOST_BLOCKS = 1024
_MOST_MOVES = 1 << 24  # in a table: 64 MiB of program, and of the order of a minute even for the smallest of steps
_WORTH_IT = 0.98  # of the best time so far, for a plan of both kinds of states


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times to predict with, in seconds.

    Attributes:
      forward: one step forward.
      backward: one step backward, from its residuals.
      store: writing the residuals of one step to memory and reading them again.
      loop: starting a loop over the steps of a block.
      turn: an iteration of a loop whose number of iterations stands in a table, and moving its state to and from a slot.

    Raises:
      ValueError: a time that is negative or not finite.
    """

    forward: float
    backward: float
    store: float
    loop: float
    turn: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            number(field.name, getattr(self, field.name), least=0)


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of a loop.

    Attributes:
      length: how many they are.
      carry: types of the state between two steps.
      kept: types of the residuals of one step.
    """

    length: int
    carry: Sequence[Any]
    kept: Sequence[Any]

    @functools.cached_property
    def carry_nbytes(self) -> int:
        return sum(map(nbytes, self.carry))

    @functools.cached_property
    def kept_nbytes(self) -> int:
        return sum(map(nbytes, self.kept))


def exact(steps: Steps, slots: int, strategy: Strategy | None, costs: Costs) -> LoopPlan:
    """The schedule for `slots` units of one carry, single steps as blocks; without a strategy the fastest one's."""
    length, store = steps.length, Shared(steps.carry, steps.kept, 1, slots)

    def plan(strategy: Strategy) -> LoopPlan:
        found = schedule(length, slots, strategy=strategy, internal_size=1 + store.rows_of_kept)
        if found.forward_steps > _MOST_MOVES:
            raise ValueError(
                f"slots is {slots}, with which {length} steps take {found.forward_steps} forward steps; give more, "
                f"{_least_slots(length)} for the hidden strategy"
            )
        return LoopPlan(length, 1, 1, found)

    if strategy is not None:
        return plan(strategy)
    hidden = plan("hidden")
    # Both kinds of states only where rows of residuals look like carries, as words would lose how the carry is sharded,
    # and where the schedule is found in no time. Internal states alone are counted in another unit.
    useful_slots = min(slots, (1 + store.rows_of_kept) * length)
    if not store.keeps_types or length * useful_slots > _LARGEST_TABLE:
        return hidden
    return min(hidden, plan("mixed"), key=lambda plan: _exact_seconds(plan, costs))


def _exact_seconds(plan: LoopPlan, costs: Costs) -> float:
    """Predicted time of a schedule over single steps."""
    assert plan.schedule is not None
    once = plan.length * (costs.forward + costs.backward)
    recomputed = plan.schedule.forward_steps - plan.length
    if not plan.keeps_residuals:
        return once + recomputed * (costs.forward + costs.turn)
    # Every recomputed step writes residuals to a row, whoever reads them, and every backward step reads a row.
    return once + recomputed * (costs.forward + costs.turn + costs.store / 2) + plan.length * (costs.turn + costs.store)


def check_budget(budget: int | str | None, length: int, carry: int, kept: int) -> int:
    """The least bytes for which there is a plan, by the model; ValueError where the budget is less."""
    slots = _least_slots(length)
    needed = min((slots + 1) * carry + kept, carry + length * kept)
    if budget == "min":
        return needed
    assert isinstance(budget, int)
    if budget < needed:
        raise ValueError(
            f"budget is {readable_bytes(budget)}, but the least possible is {needed} bytes: {slots + 1} carries of "
            f"{readable_bytes(carry)} and one step's residuals of {readable_bytes(kept)}. There each step runs forward "
            f'{HiddenCounts().count(length, slots) / length:.1f} times on average; give that or more, or "min"'
        )
    return needed


def _least_slots(length: int) -> int:
    """The fewest slots with which a table has at most `_MOST_MOVES` moves."""
    return next(slots for slots in itertools.count(1) if HiddenCounts().count(length, slots) <= _MOST_MOVES)


def fastest(steps: Steps, budget: int, costs: Costs, *, mixed: bool = True) -> tuple[LoopPlan, float]:
    """The plan of the least predicted time within `budget` bytes, and that time.

    Args:
      steps: the steps.
      budget: bytes for states and residuals, no less than `check_budget` gives.
      costs: of a step.
      mixed: whether tables of both kinds of states are among the plans.
    """
    sizes = _Sizes(steps.length, budget, steps.carry_nbytes, steps.kept_nbytes)
    timed = [*_nests(sizes, costs), *_tables(sizes, costs, _MOST_BLOCKS)] or [*_tables(sizes, costs, steps.length)]
    plan, seconds = min(timed, key=lambda candidate: candidate[1])
    both = _mixed_table(sizes, costs, steps, _WORTH_IT * seconds) if mixed else None
    return both or (plan, seconds)


class _Sizes(NamedTuple):
    """The number of steps, and bytes: that may be kept, of a carry, and of a step's residuals."""

    length: int
    budget: int
    carry: int
    kept: int


def _series(limit: int, ratio: float = 1.08) -> list[int]:
    """All small numbers and a geometric series of larger ones."""
    numbers, value = [], 1
    while value <= limit:
        numbers.append(value)
        value = max(value + 1, int(value * ratio))
    return numbers


def _nests(sizes: _Sizes, costs: Costs) -> Iterator[tuple[LoopPlan, float]]:
    """The fastest nest of equal parts for each depth, with its time. Where everything fits, the plan that keeps it, alone."""
    length, budget, carry, kept = sizes
    if length * kept + carry <= budget:
        yield LoopPlan(length, 1, length), length * (costs.forward + costs.backward + costs.store)
        return
    # Where one level fits with ease, three do not help.
    deepest = 2 if budget > 4 * math.sqrt(length * carry * kept) else 4
    for depth, ratio in ((1, 1.01), (2, 1.08), (3, 1.25), (4, 1.5))[:deepest]:
        yield from _fastest_nest(sizes, costs, _series(length, ratio), depth, tails=True)
    # Without a tail the program is a quarter smaller: times that differ by a hundredth are the same.
    small = [n for n in range(1, math.isqrt(length) + 1) if length % n == 0]
    divisors = sorted({*small, *(length // n for n in small)})
    for depth in range(1, min(deepest, 3) + 1):
        for plan, seconds in _fastest_nest(sizes, costs, divisors, depth, tails=False):
            yield plan, 0.99 * seconds


def _fastest_nest(
    sizes: _Sizes, costs: Costs, candidates: list[int], depth: int, *, tails: bool
) -> Iterator[tuple[LoopPlan, float]]:
    """The fastest nest of `depth` levels with parts of these sizes, if any fits."""
    length, budget, carry, kept = sizes
    fitting = np.array([size for size in candidates if size * min(carry, kept) <= budget], int)
    block, *parts = (np.array(grid) for grid in np.meshgrid(*[fitting] * depth, indexing="ij"))
    outermost = block * np.prod(parts, axis=0, dtype=np.int64)  # steps of an outermost part
    tail = length % outermost
    if tails:
        # As many steps as their residuals fit, the others being a whole number of outermost parts.
        free = budget - (length // outermost + 1) * carry - tail * kept
        parts_in_tail = np.where(free >= 0, free // np.maximum(outermost * kept - carry, 1), 0)
        tail = tail + np.clip(parts_in_tail, 0, length // outermost) * outermost
    seconds = _nest_seconds(sizes, costs, block, parts, outermost, tail)
    seconds[(tail > 0) != tails] = np.inf
    if seconds.size and np.isfinite(seconds.min()):
        i = np.unravel_index(np.argmin(seconds), seconds.shape)
        levels = [int((length - tail[i]) // outermost[i]), *(int(part[i]) for part in parts)]
        yield LoopPlan(length, int(block[i]), int(tail[i]), levels=tuple(levels)), float(seconds[i])


def _nest_seconds(
    sizes: _Sizes, costs: Costs, block: np.ndarray, parts: list[np.ndarray], outermost: np.ndarray, tail: np.ndarray
) -> np.ndarray:
    """Predicted times of nests; infinite where they do not fit."""
    length, budget, carry, kept = sizes
    count = (length - tail) // outermost
    inner = block * kept + carry * sum(parts, np.int64(0))  # bytes while a block is backpropagated
    # A single part would be no loop: XLA might recompute it before the tail's residuals are gone.
    fits = (count >= 2) & ((count + 1) * carry + np.maximum(inner, tail * kept) <= budget)
    recomputed = (length - tail).astype(float)  # steps
    parts_above, part_steps = count.astype(float), outermost.astype(float)
    several = block > 1
    loops = 3 * parts_above * (several if not parts else 1)
    for i, part in enumerate(parts):
        part_steps = part_steps / part
        recomputed = recomputed + parts_above * (part - 1) * part_steps
        loops = loops + 3 * parts_above * part * (several if i == len(parts) - 1 else 1)  # a step alone is no loop
        parts_above = parts_above * part
    loops = loops + (1 - several) * (
        recomputed - (length - tail)
    )  # a step alone may leave a state in its row each time
    # Every block before the tail takes one loop in the forward pass, one per recomputation (the last keeps residuals), and one in
    # the backward pass. A one-step block needs no loop and stores nothing.
    loops = loops + several * (2 * (length - tail) + recomputed) / block
    stored = tail + several * (length - tail)
    once = length * (costs.forward + costs.backward)
    return np.where(fits, once + recomputed * costs.forward + loops * costs.loop + stored * costs.store, np.inf)


def _tables(sizes: _Sizes, costs: Costs, most_blocks: int) -> Iterator[tuple[LoopPlan, float]]:
    """The optimal schedule of hidden states over at most `most_blocks`, for every size of block, with its time."""
    for block in _series(sizes.length):
        tail, blocks, slots = _division(sizes, block)
        if slots < 1:
            return
        if blocks > most_blocks or (blocks == 2 and block > 1):  # the latter would be a nest of a single part
            continue
        slots = min(slots, blocks)
        runs = HiddenCounts().count(blocks, slots) - 2 * blocks + 1
        if runs > _MOST_MOVES:
            continue
        seconds = _table_seconds(sizes, costs, block, blocks, runs)
        yield LoopPlan(sizes.length, block, tail, schedule(blocks, slots, strategy="hidden")), seconds


def _mixed_table(sizes: _Sizes, costs: Costs, steps: Steps, limit: float) -> tuple[LoopPlan, float] | None:
    """The fastest schedule of both kinds of states over blocks, and its time, if that is less than `limit`.

    Only where residuals are kept in rows that look like carries: words would lose how the carry is sharded.
    """
    fastest = None
    if limit <= 1.05 * sizes.length * (costs.forward + costs.backward):  # nothing to gain
        return None
    block = 1
    while block <= sizes.length:
        tail, blocks, slots = _division(sizes, block)
        if slots < 2:
            break
        if tail != block:  # which takes memory of its own
            slots -= -(-tail * sizes.kept // max(sizes.carry, 1))
        store = Shared(steps.carry, steps.kept, block, slots)
        if (
            2 < blocks <= _MOST_BLOCKS
            and slots >= 2
            and blocks * slots <= _LARGEST_TABLE
            and store.keeps_types
            and store.rows_of_kept < slots
            # If residuals took one slot only: no table is made where that is too slow.
            and _mixed_seconds(sizes, costs, block, blocks, InternalCounts().count(blocks, slots)) < limit
        ):
            plan = schedule(blocks, slots, strategy="mixed", internal_size=1 + store.rows_of_kept)
            seconds = _mixed_seconds(sizes, costs, block, blocks, plan.forward_steps)
            if seconds < limit:
                limit = seconds
                fastest = LoopPlan(sizes.length, block, tail, plan), seconds
        block *= 4
    return fastest


def _division(sizes: _Sizes, block: int) -> tuple[int, int, int]:
    """(steps of the tail, blocks with the tail, slots beside the block at work and the working state)."""
    tail = (sizes.length - 1) % block + 1
    slots = (sizes.budget - block * sizes.kept) // max(sizes.carry, 1) - 1
    return tail, (sizes.length - tail) // block + 1, slots


def _mixed_seconds(sizes: _Sizes, costs: Costs, block: int, blocks: int, forward_runs: int) -> float:
    """Predicted time of a table of both kinds, in which blocks run forward so many times."""
    # Every move writes residuals somewhere, whoever reads them.
    writing = forward_runs * block * costs.store / 2
    return _table_seconds(sizes, costs, block, blocks, forward_runs - 2 * blocks + 1) + writing


def _table_seconds(sizes: _Sizes, costs: Costs, block: int, blocks: int, runs: int) -> float:
    """Predicted time of a table that runs a block forward `runs` times to find a state.

    The forward pass, and one more run of each block but the tail in the backward pass, come on top.
    """
    loop = costs.loop if block > 1 else 0.0
    store = costs.store if block > 1 else 0.0
    once = sizes.length * (costs.forward + costs.backward + store) + 3 * blocks * loop
    move = block * costs.forward + costs.turn
    return once + (blocks - 1) * move + runs * (move + loop)
