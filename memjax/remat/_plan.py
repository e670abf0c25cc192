"""What a scan executes: blocks of steps, in slots by a table of moves, or in nested loops.

A scan of `length` steps is cut into blocks of `block` steps and a last part, the tail, whose residuals are
kept from the forward pass on. Either a `Schedule` over the blocks (the tail being its last one) says what to
keep, or `levels`
do: (n, r, ...) means n parts of r parts of ... of one block.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from memjax.remat._schedule import CORE, INIT, Schedule

ADVANCE, KEEP, BACK, REBACK = range(4)  # REBACK: run a block again, keeping its residuals, and backpropagate it


class Moves(NamedTuple):
    """A schedule as an executor wants it.

    Attributes:
      stored: (blocks,) row of the slots for the state before each block of the first pass; `hidden` means
      nowhere.
      kept: (blocks,) row for the residuals of each block of the first pass; -1 means that they are not kept.
      rows: (moves, 5) operation, block, slot read, slot written, row of residuals, for everything after the
      tail.
      hidden: slots for states; there is one more, for the working state.
      internal: rows for residuals of blocks.
    """

    stored: np.ndarray
    kept: np.ndarray
    rows: np.ndarray
    hidden: int
    internal: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """See the module's docstring. Exactly one of `schedule` and `levels` is given."""

    length: int
    block: int
    tail: int
    schedule: Schedule | None = None
    levels: tuple[int, ...] = ()

    @property
    def blocks(self) -> int:
        """Blocks before the tail."""
        return (self.length - self.tail) // self.block

    @functools.cached_property
    def moves(self) -> Moves:
        if self.schedule is not None:
            return _moves(self.schedule)
        n = self.levels[0] if self.levels else 0
        stored = np.full(self.blocks, n)
        if n:
            stored[:: self.blocks // n] = np.arange(n)
        return Moves(stored, np.full(self.blocks, -1), np.zeros((0, 5), int), n, 0)

    @property
    def forward_steps(self) -> int:
        """Forward steps in all, the first pass included."""
        if self.schedule is not None:
            return (self.schedule.forward_steps - 1) * self.block + self.tail
        # Each level but the first runs all but the last of its parts to find where they start; the leaf runs
        # all.
        again = self.blocks
        above = self.levels[0] if self.levels else 0
        for level in self.levels[1:]:
            size = self.blocks // (above * level)
            again += above * (level - 1) * size
            above *= level
        return self.length + again * self.block

    def stored_bytes(self, carry: int, kept: int) -> int:
        """Bytes kept for the backward pass: states of `carry` bytes, residuals of `kept` bytes per step.

        The tail's residuals are gone before the first block's are made, so the larger of the two counts.
        """
        states = self.moves.hidden + 1 + sum(level for level in self.levels[1:])
        leaf = self.block if self.blocks else 0
        return states * carry + (max(self.tail, leaf) + self.moves.internal * self.block) * kept


def _moves(plan: Schedule) -> Moves:
    """Replace the schedule's stack of units by rows for states and rows for residuals, and runs by moves."""
    loaded = _loaded_later(plan)
    states, residuals = _Rows(), _Rows()
    start_row = states.take()
    row_of = {INIT if plan.strategy == "internal" else 0: start_row}  # schedule slot to state row
    residual_of, output_of = {}, {}
    last = plan.length - 1
    stored, kept = {0: start_row}, {}
    rows: list[list[int]] = []
    working, first_pass = start_row, True
    scratch = -1
    for i, (kind, start, stop, slot) in enumerate(plan.actions):
        if kind == "load":
            working = row_of[slot]
        elif kind == "advance":
            for block in range(start, stop):
                if not first_pass:
                    rows.append([ADVANCE, block, working, scratch, 0])
                working = scratch
        elif kind == "store":
            working = row_of[slot] = states.take()
            if first_pass:
                stored[start] = working
            else:
                rows[-1][3] = working
        elif kind == "free":
            states.give(row_of.pop(slot))
        elif kind == "keep" and slot != CORE:
            residual_of[slot] = residuals.take()
            target = scratch
            if i in loaded:
                target = states.take()
                output_of[slot], row_of[loaded[i]] = loaded[i], target
            if first_pass:
                kept[start] = residual_of[slot]
                if i in loaded:
                    stored[stop] = target
            else:
                rows.append([KEEP, start, working, target, residual_of[slot]])
            working = target
        elif kind == "backward":
            if slot == CORE:
                if start != last:
                    rows.append([REBACK, start, working, scratch, 0])
            else:
                residuals.give(residual_of[slot])
                rows.append([BACK, start, scratch, scratch, residual_of.pop(slot)])
                if slot in output_of:
                    states.give(row_of.pop(output_of.pop(slot)))
            first_pass = False
    table = np.array(rows, np.int32).reshape(-1, 5)
    table[:, 2:4][table[:, 2:4] == scratch] = states.most
    return Moves(
        np.array([stored.get(block, states.most) for block in range(last)], np.int32),
        np.array([kept.get(block, -1) for block in range(last)], np.int32),
        table,
        states.most,
        residuals.most,
    )


def _loaded_later(plan: Schedule) -> dict[int, int]:
    """Which "keep" actions' output states are loaded again, by index, and from which slot."""
    found: dict[int, int] = {}
    owner: dict[int, int] = {}  # step: the latest action that made its input state
    for i, action in enumerate(plan.actions):
        if action.kind == "keep":
            owner[action.stop] = i
        elif action.kind == "store":
            owner.pop(action.start, None)
        elif action.kind == "load" and action.start in owner:
            found[owner[action.start]] = action.slot
    return found


class _Rows:
    """Rows of a buffer, reused as soon as they are given back."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.most = 0

    def take(self) -> int:
        if self.free:
            return self.free.pop()
        self.most += 1
        return self.most - 1

    def give(self, row: int) -> None:
        self.free.append(row)
