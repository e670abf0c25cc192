"""What a scan executes: blocks of steps, in slots by a table of moves, or in nested loops.

A scan of `length` steps is cut into blocks of `block` steps and a last part, the tail, whose residuals are kept from
the forward pass on. Either a `Schedule` over the blocks (the tail being its last one) says what to keep, or `levels`
do: (n, r, ...) means n parts of r parts of ... of one block.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from memjax.remat._schedule import CORE, Schedule


class Moves(NamedTuple):
    """A schedule as an executor wants it: rows of constant tables, and rows of the slots that they name.

    Attributes:
      stored: (blocks,) row for the state before each block of the first pass.
      kept: (blocks,) row for the residuals of each block of the first pass; -1: they are not kept.
      ahead: (moves, 3) what runs forward after the tail: block, row for the state after it, row for its residuals or
        -1.
      back: (blocks, 6) how each block is backpropagated, in order: the first of the moves ahead that lead there, how
        many they are, the block, the row of the state that the moves start from, the row of the state that the block
        starts from, and the row of the block's residuals or -1.
      rows: rows in use, for states, or for states and residuals together. One more, the last, takes states that
        nobody reads.
    """

    stored: np.ndarray
    kept: np.ndarray
    ahead: np.ndarray
    back: np.ndarray
    rows: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """See the module's docstring. Exactly one of `schedule` and `levels` is given, or neither if all is tail."""

    length: int
    block: int
    tail: int
    schedule: Schedule | None = None
    levels: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.schedule is not None:
            what = f"{self.schedule.strategy} schedule of {self.schedule.length} blocks in {self.schedule.slots} slots"
        elif self.levels:
            what = " x ".join(map(str, self.levels)) + " blocks in nested loops"
        else:
            what = "everything kept"
        return f"{what}, blocks of {self.block}, the last of {self.tail}"

    @property
    def blocks(self) -> int:
        """Blocks before the tail."""
        return (self.length - self.tail) // self.block

    @functools.cached_property
    def moves(self) -> Moves:
        """The tables of moves."""
        if self.schedule is not None:
            return _moves(self.schedule)
        n = self.levels[0] if self.levels else 0
        stored = np.full(self.blocks, n)
        if n:
            stored[:: self.blocks // n] = np.arange(n)
        none = np.zeros((0, 6), np.int32)
        return Moves(stored, np.full(self.blocks, -1), none[:, :3], none, n)

    @property
    def forward_steps(self) -> int:
        """Forward steps in all, the first pass included."""
        if self.schedule is not None:
            return (self.schedule.forward_steps - 1) * self.block + self.tail
        # Each level but the first runs all but the last of its parts to find where they start; leaves run all.
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
        states = self.moves.rows + 1 + sum(self.levels[1:])
        working = max(self.tail, self.block if self.blocks else 0)
        if self.schedule is not None and self.schedule.strategy == "internal":
            working += (self.schedule.peak_slots - 1) * self.block
        return states * carry + working * kept


def _moves(plan: Schedule) -> Moves:
    """The schedule's actions as tables. Its slots, a stack of units, are the rows."""
    # With "internal" the start is none of the slots, but takes the first row for states.
    first = 1 if plan.strategy == "internal" else 0
    spare = plan.peak_slots
    last = plan.length - 1
    stored, kept = np.full(last, spare, np.int32), np.full(last, -1, np.int32)
    ahead: list[tuple[int, int, int]] = []
    back: list[tuple[int, ...]] = []
    if last:
        stored[0] = 0
    source, since, first_pass = 0, 0, True

    def run(block: int, target: int, residual: int) -> None:
        """One block forward, the state after it going to row `target`."""
        if not first_pass:
            ahead.append((block, target, residual))
            return
        kept[block] = residual
        if block + 1 < last:
            stored[block + 1] = target

    for action, units in plan.with_units():
        kind, start, stop, slot = action
        if kind == "load":
            source = slot + first
        elif kind == "advance":
            for block in range(start, stop):
                run(block, spare, -1)
        elif kind == "store":
            row = slot + first
            if first_pass:
                if start < last:
                    stored[start] = row
            else:
                ahead[-1] = (ahead[-1][0], row, ahead[-1][2])
        elif kind == "keep" and slot != CORE:
            run(start, slot + units - 1 + first, slot)
        elif kind == "backward":
            if start < last:
                count = len(ahead) - since
                begin = ahead[-1][1] if count else source
                back.append((since, count, start, source, begin, -1 if slot == CORE else slot))
            since, first_pass = len(ahead), False
    return Moves(
        stored,
        kept,
        np.array(ahead, np.int32).reshape(-1, 3),
        np.array(back, np.int32).reshape(-1, 6),
        spare,
    )
