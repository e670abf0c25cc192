"""What a scan executes, blocks of steps in nested loops or by a table of moves between slots, and its two passes.

A scan of `length` steps is cut into blocks of `block` steps and a last part, the tail. The residuals of the tail are kept
from the forward pass on; nested loops can do without one. What else is kept is said either by a `Schedule` over the blocks,
in which the tail is the last one, or by `levels`: (n, r, ...) means n parts of r parts of ... of one block.

The size of the compiled program does not depend on the length: moves are rows of constant tables that loops read. Slots
are preallocated buffers that the loops carry and update in place. All moves are alike, and the moves of one iteration are one
loop, for two reasons: XLA would copy whole buffers that a branch of a `cond` writes to, and a GPU waits for the host at every
branch and at every iteration of a loop of unknown length.
"""

from __future__ import annotations

import abc
import array
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memjax._core.arrays import zeros
from memjax._core.barriers import barrier
from memjax._core.lists import Arrays
from memjax._plan.schedule.schedule import CORE, Schedule
from memjax._plan.schedule.store import Separate, Shared, StateCodec, at, put
from memjax._plan.schedule.unroll import Unroll


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
class LoopPlan:
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


Cotangents = Any
"""What the backward pass carries from step to step."""
StepBack = Callable[[Cotangents, Arrays, Any], Cotangents]
"""One step of the backward pass, from cotangents, the residuals of a step and its number."""


class Blocks(abc.ABC):
    """Runs of consecutive steps of a loop as plain scans: the units that schedules move.

    Outputs go straight into rows of whole arrays, which the loops update in place.

    Args:
      carry, kept: types of the state, and of the residuals of one step; the latter are needed for slots of residuals, and where
        steps in a turn are ordered.
      length: how many steps there are.
      reverse: whether the first step reads the last row.
      unroll: how many steps a turn of a loop takes.
    """

    def __init__(self, carry: Arrays, kept: Arrays, length: int, reverse: bool, unroll: Unroll):
        self.carry, self.kept = carry, kept
        self.length, self.reverse, self.unroll = length, reverse, unroll

    @abc.abstractmethod
    def outputs(self) -> Arrays:
        """Where all steps write their outputs to."""

    @abc.abstractmethod
    def step(self, carry: Arrays, i: Any, *, writes: bool, keeps: bool) -> tuple[Arrays, Arrays, Arrays]:
        """Step `i`: (carry, outputs if it `writes`, residuals if it `keeps`)."""

    def beside(self, cotangents: Cotangents) -> Blocks:
        """The blocks as they run again where the backward pass carries these."""
        return self

    def row(self, i: Any) -> Any:
        """The row of stacked arrays that step `i` reads and writes."""
        return self.length - 1 - i if self.reverse else i

    def write(self, stacks: Arrays, rows: Arrays, i: Any) -> Arrays:
        """The stacks with what step `i` has made."""
        return [put(stack, row, self.row(i)) for stack, row in zip(stacks, rows, strict=True)]

    def advance(self, carry: Arrays, start: Any, n: int) -> Arrays:
        """The carry after `n` steps from `start` on."""
        return self.run(carry, [], start, n)[0]

    def run(
        self, carry: Arrays, ys: Arrays, start: Any, n: int, *, writes: bool = False, keeps: bool = False
    ) -> tuple[Arrays, Arrays, Arrays]:
        """(carry, ys, kept) after `n` steps. It `writes` outputs into `ys`. With `keeps`, kept is what `back` needs."""

        ordered = self._ordered(n, self.unroll.forward, keeps=keeps)
        # A loop that stacks what its steps keep holds that of one turn twice, so steps of one turn write it themselves.
        in_place = keeps and ordered
        stacks = [zeros(leaf, (n,)) for leaf in self.kept] if in_place else []

        def body(state, i):
            carry, ys, stacks = state
            if ordered:
                carry, i = barrier((carry, i))
            carry, y, kept = self.step(carry, start + i, writes=writes, keeps=keeps)
            if in_place:
                stacks, kept = [put(stack, leaf, i) for stack, leaf in zip(stacks, kept, strict=True)], []
            return (carry, self.write(ys, y, start + i), stacks), kept

        (carry, ys, stacks), kept = self._loop(n, body, (carry, ys, stacks), self.unroll.forward)
        return carry, ys, stacks if in_place else kept

    def back(self, step: StepBack, kept: Arrays, start: Any, n: int, cotangents: Cotangents) -> Cotangents:
        """Backpropagate through `n` steps whose residuals are kept."""
        ordered = self._ordered(n, self.unroll.backward, keeps=True)

        def body(cotangents, i):
            if ordered:
                cotangents, i = barrier((cotangents, i))
            return step(cotangents, jax.tree.map(lambda stack: at(stack, i), kept), start + i), []

        return self._loop(n, body, cotangents, self.unroll.backward, reverse=True)[0]

    def _ordered(self, n: int, unroll: int | bool, *, keeps: bool) -> bool:
        """Whether each of `n` steps waits for the one before, within a turn. `keeps`: they keep residuals, or read them.

        In a `shard_map` what depends on the step's number alone waits only for what varies over no axis of the mesh.
        """
        return self.unroll.orders(keeps) and n > 1 and unroll != 1

    def _loop(self, n: int, body: Any, state: Any, unroll: int | bool, *, reverse: bool = False) -> tuple[Any, Arrays]:
        if n == 1:  # no loop to set up
            state, out = body(state, 0)
            return state, jax.tree.map(lambda leaf: leaf[None], out)
        return lax.scan(body, state, jnp.arange(n, dtype=jnp.int32), reverse=reverse, unroll=unroll)


class Execution:
    """The passes of a plan: forwards, filling slots, and backwards, recomputing from them."""

    def __init__(self, plan: LoopPlan, blocks: Blocks, codec: StateCodec | None = None):
        self.plan, self.blocks = plan, blocks
        types = blocks.carry, blocks.kept, plan.block, plan.rows
        strategy = plan.schedule.strategy if plan.schedule is not None else "hidden"
        residuals = plan.rows if strategy == "internal" else 0
        self.store = Shared(*types) if strategy == "mixed" else Separate(*types, residuals, codec)

    def forward(self, init: Arrays) -> tuple[Arrays, Arrays, Any]:
        """(carry, ys, what `pull_back` needs: slots, residuals of the tail)."""
        plan, blocks, store, n = self.plan, self.blocks, self.store, self.plan.block

        def body(state, rows):
            carry, slots, ys = state
            block, row, kept_row = rows
            if n == 1 and blocks.unroll.orders(kept_row is not None):
                carry, block = barrier((carry, block))
            if row is not None:
                slots = store.put_state(slots, row.astype(jnp.int32), carry)
            carry, ys, kept = blocks.run(carry, ys, block * n, n, writes=True, keeps=kept_row is not None)
            if kept_row is not None:
                slots = store.put_kept(slots, kept_row.astype(jnp.int32), kept)
            if row is None:  # nested loops: what a part's last block leaves in its row is where the next one starts
                slots = store.put_state(slots, block // (plan.blocks // plan.levels[0]) + 1, carry)
            return (carry, slots, ys), None

        state = (list(init), store.new(init), blocks.outputs())
        if plan.blocks:
            row = kept_row = None
            if plan.schedule is not None:
                row = jnp.asarray(plan.moves.stored)
                kept_row = jnp.asarray(plan.moves.kept) if plan.keeps_residuals else None
            table = jnp.arange(plan.blocks, dtype=jnp.int32), row, kept_row
            state, _ = lax.scan(body, state, table, unroll=blocks.unroll.forward if n == 1 else 1)
        carry, slots, ys = state
        tail: Arrays = []
        if plan.tail:
            carry, ys, tail = blocks.run(carry, ys, plan.blocks * n, plan.tail, writes=True, keeps=True)
            if plan.tail_among_slots:
                slots, tail = store.put_kept(slots, plan.scrap, tail), []
        return carry, ys, (slots, tail)

    def pull_back(self, saved: Any, cotangents: Cotangents, step: StepBack) -> Cotangents:
        """What `step` makes of the cotangents, from the last step to the first."""
        (slots, tail), plan = saved, self.plan
        back = functools.partial(self.blocks.back, step)
        if plan.tail:
            kept = self.store.kept(slots, plan.scrap) if plan.tail_among_slots else tail
            cotangents = back(kept, plan.blocks * plan.block, plan.tail, cotangents)
        if plan.blocks:
            cotangents = (self._nest if plan.schedule is None else self._table)(slots, cotangents, back)
        return cotangents

    def _recomputed(self, blocks: Blocks, carry: Arrays, start: Any) -> Arrays:
        """The residuals of a block, from its first state."""
        return blocks.run(carry, [], start, self.plan.block, keeps=True)[2]

    def _nest(self, slots: Any, cotangents: Cotangents, back: Callable[..., Cotangents]) -> Cotangents:
        """Nested loops: each level finds the states its parts start from, then takes them from the last on."""
        plan, n = self.plan, self.plan.block

        def parts(levels, size, starts, start, cotangents):
            """Backpropagate levels[0] parts of `size` blocks each, from step `start` on."""

            def body(cotangents, i):
                carry, first = [at(leaf, i) for leaf in starts], start + i * size * n
                blocks = self.blocks.beside(cotangents)
                if len(levels) == 1:
                    return back(self._recomputed(blocks, carry, first), first, n, cotangents), None
                smaller = size // levels[1]
                inner_starts = find(blocks, carry, first, levels[1], smaller)
                return parts(levels[1:], smaller, inner_starts, first, cotangents), None

            return lax.scan(body, cotangents, jnp.arange(levels[0], dtype=jnp.int32), reverse=True)[0]

        def find(blocks, carry, start, count, size):
            """The states that `count` parts of `size` blocks start from: what a part's last block leaves in its row."""

            def block(state, b):
                carry, starts = state
                carry = blocks.advance(carry, start + b * n, n)
                starts = [put(stack, leaf, b // size + 1) for stack, leaf in zip(starts, carry, strict=True)]
                return (carry, starts), None

            starts = [jnp.broadcast_to(leaf, (count, *leaf.shape)) for leaf in carry]
            return lax.scan(block, (carry, starts), jnp.arange((count - 1) * size, dtype=jnp.int32))[0][1]

        return parts(plan.levels, plan.blocks // plan.levels[0], slots[0], 0, cotangents)

    def _table(self, slots: Any, cotangents: Cotangents, back: Callable[..., Cotangents]) -> Cotangents:
        """An iteration for every block: run forward what its row of the table says, then backpropagate the block."""
        store, n = self.store, self.plan.block
        moves, keeps = self.plan.moves, self.plan.keeps_residuals
        ahead, ahead_kept = jnp.asarray(moves.ahead), jnp.asarray(moves.ahead_kept)

        def iteration(state, row):
            slots, cotangents, done = state
            block, count, source, kept_row = (column.astype(jnp.int32) for column in row)
            first = block - count + (1 if keeps else 0)  # with rows for residuals the last move is the block itself
            carry = store.state(slots, source)
            blocks = self.blocks.beside(cotangents)

            def move(i, state):
                carry, slots = state
                row, start = at(ahead, done + i).astype(jnp.int32), (first + i) * n
                carry, _, kept = blocks.run(carry, [], start, n, keeps=keeps)
                slots = store.put_state(slots, row, carry)
                if keeps:
                    slots = store.put_kept(slots, at(ahead_kept, done + i).astype(jnp.int32), kept)
                return carry, slots

            if len(moves.ahead):
                carry, slots = lax.fori_loop(0, count, move, (carry, slots))
            start = block * n
            kept = store.kept(slots, kept_row) if keeps else self._recomputed(blocks, carry, start)
            return (slots, back(kept, start, n, cotangents), done + count), None

        columns = moves.turns, moves.source, moves.residuals
        table = jnp.arange(self.plan.blocks - 1, -1, -1, dtype=jnp.int32), *map(jnp.asarray, columns)
        (_, cotangents, _), _ = lax.scan(iteration, (slots, cotangents, jnp.int32(0)), table)
        return cotangents
