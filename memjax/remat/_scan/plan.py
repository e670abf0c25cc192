"""What a scan executes: blocks of steps, by a table of moves between slots, or in nested loops.

A scan of `length` steps is cut into blocks of `block` steps and a last part, the tail. The residuals of the tail are kept
from the forward pass on; nested loops can do without one. What else is kept is said either by a `Schedule` over the blocks,
in which the tail is the last one, or by `levels`: (n, r, ...) means n parts of r parts of ... of one block.
"""

from __future__ import annotations

import array
import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from memjax.remat._scan.schedule import CORE, Schedule


class Moves(NamedTuple):
    """A schedule as columns of constant tables, which name rows of the slots.

    The first pass runs the blocks in their order. Then they are backpropagated from the last on. Before each, the
    blocks from some kept state up to it may be recomputed. What nobody reads goes to the rows after the slots, so that
    every move is alike. Schedules that may keep residuals have rows for them: there a block that is recomputed right
    before its backpropagation is one more move, which leaves its residuals after the slots.

    Attributes:
      stored: (blocks,) row for the state before each block of the first pass.
      kept: (blocks,) row for the residuals of each block of the first pass.
      ahead: (moves,) what is recomputed, one block a move: row for the state after it.
      ahead_kept: (moves,) row for its residuals.
      turns: (blocks,) in the order of the backward pass: moves ahead of a block's backpropagation.
      source: (blocks,) row of the state that they start from.
      residuals: (blocks,) row of the block's residuals.
    """

    stored: np.ndarray
    kept: np.ndarray
    ahead: np.ndarray
    ahead_kept: np.ndarray
    turns: np.ndarray
    source: np.ndarray
    residuals: np.ndarray


@dataclasses.dataclass(frozen=True)
class Plan:
    """Blocks and a tail, with a `schedule` or `levels`; neither if the tail is everything."""

    length: int
    block: int
    tail: int
    schedule: Schedule | None = None
    levels: tuple[int, ...] = ()

    @property
    def blocks(self) -> int:
        """Blocks before the tail."""
        return (self.length - self.tail) // self.block

    @property
    def rows(self) -> int:
        """Rows of the slots. What nobody reads has the number after them."""
        if self.schedule is not None:
            return self.schedule.peak_slots
        return self.levels[0] if self.levels else 0

    @property
    def forward_runs(self) -> float:
        """How often a step runs forward, on average."""
        if self.schedule is not None:
            return self.schedule.forward_steps / max(self.schedule.length, 1)
        steps = self.length - self.tail
        runs = steps
        for part in self.levels[1:]:
            runs += steps * (part - 1) // part
        return 1 + runs / max(self.length, 1)

    @property
    def keeps_residuals(self) -> bool:
        """Whether the table has rows for residuals."""
        return self.schedule is not None and self.schedule.strategy != "hidden"

    @property
    def scrap(self) -> int:
        """The row after the slots for residuals."""
        assert self.schedule is not None
        # With "internal" the slots include the working core.
        return self.schedule.peak_slots - (self.schedule.strategy == "internal")

    @property
    def tail_among_slots(self) -> bool:
        """Whether the tail's residuals share a row with those of other blocks, which come later."""
        return self.keeps_residuals and self.tail == self.block

    @functools.cached_property
    def moves(self) -> Moves:
        """The schedule's tables."""
        assert self.schedule is not None
        return _moves(self.schedule, self.scrap)


def _moves(plan: Schedule, scrap: int) -> Moves:
    """The schedule's actions as tables. The units of its slots are the rows."""
    # With "internal" the first state has no slot, but it takes the first row for states.
    first = 1 if plan.strategy == "internal" else 0
    spare, last = plan.peak_slots, plan.length - 1
    stored, kept = np.full(last, spare), np.full(last, scrap)
    stored[:1] = 0
    ahead, ahead_kept, back = array.array("i"), array.array("i"), array.array("i")
    source, since, first_pass = 0, 0, True
    for (kind, start, stop, slot), units in plan.with_units():
        if kind == "load":
            source = slot + first
        elif kind == "advance" and not first_pass:
            ahead.extend([spare] * (stop - start))
            ahead_kept.extend([scrap] * (stop - start))
        elif kind == "store":
            if not first_pass:
                ahead[-1] = slot + first
            elif start < last:
                stored[start] = slot + first
        elif kind == "keep" and slot != CORE:
            output = slot + units - 1 + first
            if not first_pass:
                ahead.append(output)
                ahead_kept.append(slot)
            else:
                kept[start] = slot
                if stop < last:
                    stored[stop] = output
        elif kind == "backward":
            if start < last:
                if slot == CORE and plan.strategy != "hidden":
                    ahead.append(spare)
                    ahead_kept.append(scrap)
                back.extend((len(ahead) - since, source, scrap if slot == CORE else slot))
            since, first_pass = len(ahead), False
    columns = stored, kept, ahead, ahead_kept, *np.array(back, np.int32).reshape(-1, 3).T
    return Moves(*map(_narrow, columns))


def _narrow(column: Any) -> np.ndarray:
    """The column as an array of the smallest sufficient type: tables are part of the program."""
    values = np.asarray(column, np.int32)
    largest = max(np.abs(values).max(initial=0), 1)
    return values.astype(np.result_type(np.int8, np.min_scalar_type(-largest)))
