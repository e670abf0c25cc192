"""Choosing what a scan executes: the exact schedule for some slots, or the fastest plan within a budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from memjax._core.check import readable_bytes
from memjax.remat._scan.costs import Costs, model
from memjax.remat._scan.forward_counts import HiddenCounts
from memjax.remat._scan.plan import Plan
from memjax.remat._scan.schedule import Strategy, schedule
from memjax.remat._scan.step import Step, StepBackward
from memjax.remat._scan.store import Shared

_LARGEST_TABLE = 300_000  # entries of a dynamic program: some tenths of a second
_MOST_BLOCKS = 1024  # in a table that is not asked for by `slots`: the program must not grow with the length
_MOST_MOVES = 1 << 24  # in a table: 64 MiB of program, and of the order of a minute even for the smallest of steps
_WORTH_IT = 0.98  # of the best time so far, for a plan of both kinds of states


def exact(
    length: int, slots: int, strategy: Strategy | None, step: Step, backward: StepBackward, costs: Costs | None
) -> Plan:
    """The schedule for `slots` units of one carry, single steps as blocks; without a strategy the fastest one's."""
    if strategy is not None:
        return _exact(length, slots, strategy, step, backward)
    plan = _exact(length, slots, "hidden", step, backward)
    # Both kinds of states only where rows of residuals look like carries, as words would lose how the carry is sharded,
    # and where the schedule is found in no time. Internal states alone are counted in another unit.
    store = Shared(step.carry, backward.kept, 1, slots)
    useful = min(slots, (1 + store.rows_of_kept) * length)
    if not store.keeps_types or length * useful > _LARGEST_TABLE:
        return plan
    costs = costs or model(step, backward.kept_nbytes)
    mixed = _exact(length, slots, "mixed", step, backward)
    return min(plan, mixed, key=lambda candidate: _exact_seconds(candidate, costs))


def _exact(length: int, slots: int, strategy: Strategy, step: Step, backward: StepBackward) -> Plan:
    size = 1 + Shared(step.carry, backward.kept, 1, slots).rows_of_kept
    plan = schedule(length, slots, strategy=strategy, internal_size=size)
    if plan.forward_steps > _MOST_MOVES:
        raise ValueError(
            f"slots is {slots}, with which {length} steps take {plan.forward_steps} forward steps; give more, "
            f"{_least_slots(length)} for the hidden strategy"
        )
    return Plan(length, 1, 1, plan)


def _exact_seconds(plan: Plan, costs: Costs) -> float:
    """Predicted time of a schedule over single steps."""
    assert plan.schedule is not None
    steps = plan.length * (costs.forward + costs.backward)
    again = plan.schedule.forward_steps - plan.length
    if not plan.keeps_residuals:
        return steps + again * (costs.forward + costs.turn)
    # Every step that runs again writes residuals to a row, whoever reads them, and every backward step reads a row.
    return steps + again * (costs.forward + costs.turn + costs.store / 2) + plan.length * (costs.turn + costs.store)


def check_budget(budget: int | str | None, length: int, carry: int, kept: int) -> int:
    """The bytes to plan with; ValueError where nothing fits that can be run. "min" is the least for which there is a plan."""
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
    return budget


def _least_slots(length: int) -> int:
    """The fewest with which the table of moves has a sensible size."""
    return next(m for m in itertools.count(1) if HiddenCounts().count(length, m) <= _MOST_MOVES)


def choose(length: int, budget: int, step: Step, backward: StepBackward, costs: Costs | None) -> Plan:
    """The plan of the least predicted time within `budget` bytes."""
    costs = costs or model(step, backward.kept_nbytes)
    size = _Sizes(length, budget, step.carry_nbytes, backward.kept_nbytes)
    found = [*_nests(size, costs), *_tables(size, costs, _MOST_BLOCKS)] or [*_tables(size, costs, length)]
    plan, seconds = min(found, key=lambda candidate: candidate[1])
    for mixed, _ in _mixed_tables(size, costs, step, backward, _WORTH_IT * seconds):
        plan = mixed
    return plan


class _Sizes(NamedTuple):
    """Steps, bytes that may be kept, bytes of a carry, bytes of a step's residuals."""

    length: int
    budget: int
    carry: int
    kept: int


def _series(limit: int, ratio: float = 1.08) -> list[int]:
    """All small numbers and a geometric series of larger ones."""
    sizes, value = [], 1
    while value <= limit:
        sizes.append(value)
        value = max(value + 1, int(value * ratio))
    return sizes


def _nests(size: _Sizes, costs: Costs) -> Iterator[tuple[Plan, float]]:
    """For each depth the fastest nest of equal parts, with its time; only one that keeps everything, if that fits."""
    if size.length * size.kept + size.carry <= size.budget:
        step = costs.forward + costs.backward + costs.store
        yield Plan(size.length, 1, size.length), size.length * step
        return
    for depth, ratio in ((1, 1.01), (2, 1.08), (3, 1.25), (4, 1.5)):
        yield from _fastest_nest(size, costs, _series(size.length, ratio), depth, tails=True)
    # Without a tail the program is a quarter smaller: times that differ by a hundredth are the same.
    small = [n for n in range(1, math.isqrt(size.length) + 1) if size.length % n == 0]
    divisors = sorted({*small, *(size.length // n for n in small)})
    for depth in (1, 2, 3):
        for plan, seconds in _fastest_nest(size, costs, divisors, depth, tails=False):
            yield plan, 0.99 * seconds


def _fastest_nest(
    size: _Sizes, costs: Costs, candidates: list[int], depth: int, *, tails: bool
) -> Iterator[tuple[Plan, float]]:
    """The fastest nest of `depth` levels with parts of these sizes, if any fits."""
    length, budget, carry, kept = size
    sizes = np.array(candidates)
    sizes = sizes[sizes * min(carry, kept) <= budget]
    block, *parts = (np.array(grid) for grid in np.meshgrid(*[sizes] * depth, indexing="ij"))
    outermost = block * np.prod(parts, axis=0, dtype=np.int64)  # steps of an outermost part
    tail = length % outermost
    if tails:
        # As many steps as their residuals fit, the rest being a whole number of outermost parts.
        room = budget - (length // outermost + 1) * carry - tail * kept
        more = np.where(room >= 0, room // np.maximum(outermost * kept - carry, 1), 0)
        tail = tail + np.clip(more, 0, length // outermost) * outermost
    seconds = _nest_seconds(size, costs, block, parts, outermost, tail)
    seconds[(tail > 0) != tails] = np.inf
    if seconds.size and np.isfinite(seconds.min()):
        i = np.unravel_index(np.argmin(seconds), seconds.shape)
        levels = [int((length - tail[i]) // outermost[i]), *(int(part[i]) for part in parts)]
        yield Plan(length, int(block[i]), int(tail[i]), levels=tuple(levels)), float(seconds[i])


def _nest_seconds(
    size: _Sizes,
    costs: Costs,
    block: np.ndarray,
    parts: list[np.ndarray],
    outermost: np.ndarray,
    tail: np.ndarray,
) -> np.ndarray:
    """Predicted times of nests; infinite where they do not fit."""
    length, budget, carry, kept = size
    count = (length - tail) // outermost
    inner = block * kept + carry * sum(parts, np.int64(0))  # while a block is backpropagated
    # A single part would be no loop: XLA might run it again before the tail's residuals are gone.
    fits = (count >= 2) & ((count + 1) * carry + np.maximum(inner, tail * kept) <= budget)
    again = (length - tail).astype(float)  # steps run again
    above, rest = count.astype(float), outermost.astype(float)
    loops = 3 * above
    for part in parts:
        rest = rest / part
        again = again + above * (part - 1) * rest
        loops = loops + 3 * above * part
        above = above * part
    several = block > 1
    # Every block is advanced, advanced again, kept and pulled back; single steps need no loop, and no memory.
    loops = loops + several * (2 * (length - tail) + again) / block
    stored = tail + several * (length - tail)
    seconds = length * (costs.forward + costs.backward)
    return np.where(fits, seconds + again * costs.forward + loops * costs.loop + stored * costs.store, np.inf)


def _tables(size: _Sizes, costs: Costs, most: int) -> Iterator[tuple[Plan, float]]:
    """The optimal schedule of hidden states over at most `most` blocks, for every size of block, with its time."""
    for block in _series(size.length):
        tail, parts, slots = _room(size, block)
        if slots < 1:
            return
        if parts > most or (parts == 2 and block > 1):  # the latter would be a nest of a single part
            continue
        slots = min(slots, parts)
        turns = HiddenCounts().count(parts, slots) - 2 * parts + 1
        if turns > _MOST_MOVES:
            continue
        seconds = _base(size, costs, block, tail, parts) + turns * _turn(costs, block)
        yield Plan(size.length, block, tail, schedule(parts, slots, strategy="hidden")), seconds


def _mixed_tables(
    size: _Sizes, costs: Costs, step: Step, backward: StepBackward, limit: float
) -> Iterator[tuple[Plan, float]]:
    """Schedules of both kinds of states over blocks that take less than `limit`, ever faster.

    Only where residuals are kept in rows that look like carries: words would lose how the carry is sharded.
    """
    if limit <= 1.05 * size.length * (costs.forward + costs.backward):  # nothing to gain
        return
    block = 1
    while block <= size.length and (found := _room(size, block))[2] >= 2:
        tail, parts, slots = found
        if tail != block:  # which takes memory of its own
            slots -= -(-tail * size.kept // max(size.carry, 1))
        store = Shared(step.carry, backward.kept, block, slots)
        if (
            2 < parts <= _MOST_BLOCKS
            and slots >= 2
            and parts * slots <= _LARGEST_TABLE
            and store.keeps_types
            and store.rows_of_kept < slots
        ):
            plan = schedule(parts, slots, strategy="mixed", internal_size=1 + store.rows_of_kept)
            turns = plan.forward_steps - 2 * parts + 1
            # Every move writes residuals somewhere, whoever reads them.
            writing = plan.forward_steps * block * costs.store / 2
            seconds = _base(size, costs, block, tail, parts) + turns * _turn(costs, block) + writing
            if seconds < limit:
                limit = seconds
                yield Plan(size.length, block, tail, plan), seconds
        block *= 4


def _room(size: _Sizes, block: int) -> tuple[int, int, int]:
    """(steps of the tail, blocks with the tail, slots beside the block at work and the working state)."""
    tail = (size.length - 1) % block + 1
    return tail, (size.length - tail) // block + 1, (size.budget - block * size.kept) // max(size.carry, 1) - 1


def _base(size: _Sizes, costs: Costs, block: int, tail: int, parts: int) -> float:
    """Time of the first pass, and of running each block but the tail again and pulling it back."""
    steps = size.length * (costs.forward + costs.backward) + (parts - 1) * (block * costs.forward + costs.turn)
    if block == 1:
        return steps
    return steps + size.length * costs.store + 3 * parts * costs.loop


def _turn(costs: Costs, block: int) -> float:
    """Time of running a block forward to find a state."""
    return block * costs.forward + costs.turn + (costs.loop if block > 1 else 0.0)
