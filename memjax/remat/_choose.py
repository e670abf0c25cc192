"""Choosing what a scan executes: the exact schedule for some slots, or the fastest plan within a budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from memjax.remat._costs import Costs, model
from memjax.remat._forward_counts import HiddenCounts
from memjax.remat._plan import Plan
from memjax.remat._schedule import Strategy, schedule
from memjax.remat._step import Backward, Step
from memjax.remat._store import Shared

_LARGEST_TABLE = 200_000  # entries of a dynamic program: some hundredths of a second
_WORTH_IT = 0.98  # of the best time so far, for a plan of both kinds of states


def exact(length: int, slots: int, strategy: Strategy, step: Step, backward: Backward) -> Plan:
    """The schedule for `slots` units of one carry, single steps as blocks."""
    size = 1 + Shared(step.carry, backward.kept, 1, slots).rows_of_kept
    return Plan(length, 1, 1, schedule(length, slots, strategy=strategy, internal_size=size))


def check_budget(budget: int, length: int, carry: int, kept: int) -> None:
    """Raise ValueError where not even a single slot fits."""
    least = Plan(length, 1, 1, schedule(length, 1, strategy="hidden"))
    needed = least.stored_bytes(carry, kept)
    if budget < min(needed, carry + length * kept):
        raise ValueError(
            f"budget is {budget} bytes, but the least possible is {needed}: two carries of {carry} bytes and one "
            f"step's residuals of {kept}. There each step runs forward {least.forward_steps / length:.1f} times on "
            "average; give that or more"
        )


def choose(length: int, budget: int, step: Step, backward: Backward, costs: Costs | None) -> Plan:
    """The plan of the least predicted time within `budget` bytes."""
    costs = costs or model(step, backward.kept_nbytes)
    size = _Sizes(length, budget, step.carry_nbytes, backward.kept_nbytes)
    plan, seconds = min([*_nests(size, costs), *_tables(size, costs)], key=lambda found: found[1])
    for candidate in _mixed_tables(size, costs, step, backward, _WORTH_IT * seconds):
        plan, seconds = candidate
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
    """For each depth the fastest nest of equal parts, with its time; first of all, everything kept."""
    length, budget, carry, kept = size
    base = length * (costs.forward + costs.backward)
    if length * kept + carry <= budget:
        yield Plan(length, 1, length), base + length * costs.store
        return
    for depth, ratio in ((1, 1.01), (2, 1.08), (3, 1.25), (4, 1.5)):
        sizes = np.array(_series(length, ratio))
        block, *parts = np.meshgrid(*[sizes[sizes * carry <= budget]] * depth, indexing="ij", sparse=True)
        inner = sum((part * carry for part in parts), np.int64(0)) + block * kept  # while a block is backpropagated
        outermost = block * np.prod(np.broadcast_arrays(*parts), axis=0) if parts else block  # steps of such a part
        inner, outermost, block = np.broadcast_arrays(inner, outermost, block)
        # The tail: as many steps as its residuals fit, the rest being a whole number of outermost parts.
        smallest = length % outermost
        room = budget - (length // outermost + 1) * carry - smallest * kept
        more = np.where(room >= 0, room // np.maximum(outermost * kept - carry, 1), 0)
        tail = smallest + np.clip(more, 0, length // outermost) * outermost
        count = (length - tail) // outermost
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
        seconds = base + again * costs.forward + loops * costs.loop + stored * costs.store
        seconds = np.where(fits, seconds, np.inf)
        i = np.unravel_index(np.argmin(seconds), seconds.shape)
        if np.isfinite(seconds[i]):
            levels = [int(np.broadcast_to(part, seconds.shape)[i]) for part in parts]
            yield Plan(length, int(block[i]), int(tail[i]), levels=(int(count[i]), *levels)), float(seconds[i])


def _tables(size: _Sizes, costs: Costs) -> Iterator[tuple[Plan, float]]:
    """The optimal schedule of hidden states over blocks, for every size of block, with its time."""
    for block in _series(size.length):
        tail, parts, slots = _room(size, block)
        if slots < 1:
            return
        if parts == 2 and block > 1:  # the same as a nest of a single part
            continue
        slots = min(slots, parts)
        turns = HiddenCounts().count(parts, slots) - 2 * parts + 1
        seconds = _base(size, costs, block, tail, parts) + turns * _turn(costs, block)
        yield Plan(size.length, block, tail, schedule(parts, slots, strategy="hidden")), seconds


def _mixed_tables(
    size: _Sizes, costs: Costs, step: Step, backward: Backward, limit: float
) -> Iterator[tuple[Plan, float]]:
    """Schedules of both kinds of states over blocks that take less than `limit`, ever faster.

    Only where residuals are kept in rows that look like carries: words would lose how the carry is sharded.
    """
    block = 1
    while (found := _room(size, block))[2] >= 2:
        tail, parts, slots = found
        store = Shared(step.carry, backward.kept, block, slots)
        if parts > 2 and parts * slots <= _LARGEST_TABLE and store.keeps_types and store.rows_of_kept < slots:
            plan = schedule(parts, slots, strategy="mixed", internal_size=1 + store.rows_of_kept)
            turns = plan.forward_steps - 2 * parts + 1
            seconds = _base(size, costs, block, tail, parts) + turns * _turn(costs, block)
            if seconds < limit:
                candidate = Plan(size.length, block, tail, plan)
                moves = candidate.moves
                internal = int((moves.kept >= 0).sum() + (moves.ahead[:, 2] >= 0).sum())
                # Residuals kept in slots are made instead of run again, and there is a loop more to a turn.
                seconds += internal * block * costs.store + len(moves.ahead) * costs.turn
                if seconds < limit:
                    limit = seconds
                    yield candidate, seconds
        block *= 2


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
