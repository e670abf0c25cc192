"""Running a `Plan`: the forward pass that fills slots, and the backward pass that recomputes from them.

The size of the compiled program does not depend on the length: moves are rows of constant tables that loops read. Slots
are preallocated buffers that the loops carry and update in place. All moves are alike, and the moves of one iteration are one
loop, for two reasons: XLA would copy whole buffers that a branch of a `cond` writes to, and a GPU waits for the host at every
branch and at every iteration of a loop of unknown length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from memjax._core.arrays import zeros
from memjax._core.lists import Arrays, pick
from memjax.remat._scan.plan import Plan
from memjax.remat._scan.step import Blocks, Pull, Step, StepBackward, at, put
from memjax.remat._scan.store import Separate, Shared, StateCodec

_Cotangents = tuple[Pull, Arrays]


def store_of(plan: Plan, step: Step, backward: StepBackward, codec: StateCodec | None) -> Separate | Shared:
    """Where the plan's slots are."""
    strategy = plan.schedule.strategy if plan.schedule is not None else "hidden"
    if strategy == "mixed":
        return Shared(step.carry, backward.kept, plan.block, plan.rows)
    residuals = plan.rows if strategy == "internal" else 0
    return Separate(step.carry, backward.kept, plan.block, plan.rows, residuals, codec)


def forward(
    plan: Plan, blocks: Blocks, backward: StepBackward, codec: StateCodec | None, init: Arrays
) -> tuple[Arrays, Arrays, Any]:
    """(carry, ys, what `pull_back` needs: slots, residuals of the tail)."""
    n = plan.block
    store = store_of(plan, blocks.step, backward, codec)

    def body(state, rows):
        carry, slots, ys = state
        block, row, kept_row = rows
        if row is not None:
            slots = store.put_state(slots, row.astype(jnp.int32), carry)
        if kept_row is None:
            carry, ys = blocks.emit(carry, ys, block * n, n)
        else:
            carry, ys, kept = blocks.keep(backward, carry, ys, block * n, n)
            slots = store.put_kept(slots, kept_row.astype(jnp.int32), kept)
        if row is None:  # nested loops: what a part's last block leaves in its row is where the next one starts
            slots = store.put_state(slots, block // (plan.blocks // plan.levels[0]) + 1, carry)
        return (carry, slots, ys), None

    state = (list(init), store.new(init), [zeros(aval, (plan.length,)) for aval in blocks.step.y])
    if plan.blocks:
        row = kept_row = None
        if plan.schedule is not None:
            row = jnp.asarray(plan.moves.stored)
            kept_row = jnp.asarray(plan.moves.kept) if plan.keeps_residuals else None
        table = jnp.arange(plan.blocks, dtype=jnp.int32), row, kept_row
        state, _ = lax.scan(body, state, table, unroll=blocks.unroll if n == 1 else 1)
    carry, slots, ys = state
    tail: Arrays = []
    if plan.tail:
        carry, ys, tail = blocks.keep(backward, carry, ys, plan.blocks * n, plan.tail)
        if plan.tail_among_slots:
            slots, tail = store.put_kept(slots, plan.scrap, tail), []
    return carry, ys, (slots, tail)


def pull_back(
    plan: Plan,
    blocks: Blocks,
    backward: StepBackward,
    codec: StateCodec | None,
    saved: Any,
    ct_carry: Arrays,
    ct_ys: Sequence[Any],
) -> tuple[Arrays, Arrays, Arrays]:
    """Cotangents of the chosen consts, of the carry's floats and of the chosen xs."""
    slots, tail = saved
    store = store_of(plan, blocks.step, backward, codec)
    run = _PullBack(plan, blocks, backward, store, ct_ys)
    pull = Pull(ct_carry, [jnp.zeros_like(c) for c in pick(blocks.consts, backward.wrt_consts)])
    cotangents = pull, [jnp.zeros_like(x) for x in pick(blocks.xs, backward.wrt_x)]
    if plan.tail:
        kept = store.kept(slots, plan.scrap) if plan.tail_among_slots else tail
        cotangents = run.kept(kept, plan.blocks * plan.block, plan.tail, cotangents)
    if plan.blocks:
        cotangents = run.nest(slots, cotangents) if plan.schedule is None else run.table(slots, cotangents)
    pull, d_xs = cotangents
    return pull.consts, pull.carry, d_xs


class _PullBack:
    """The backward pass of a plan. Cotangents are a pair: those of carry and consts, and those of the chosen xs."""

    def __init__(
        self,
        plan: Plan,
        blocks: Blocks,
        backward: StepBackward,
        store: Separate | Shared,
        ct_ys: Sequence[Any],
    ):
        self.plan, self.blocks, self.backward, self.store, self.ct_ys = plan, blocks, backward, store, ct_ys

    def kept(self, kept: Arrays, start: Any, steps: int, cotangents: _Cotangents) -> _Cotangents:
        """Backpropagate `steps` steps whose residuals are kept."""
        return self.blocks.back(self.backward, kept, start, steps, *cotangents, self.ct_ys)

    def recomputed(self, carry: Arrays, start: Any, cotangents: _Cotangents) -> _Cotangents:
        """Recompute a block from its first state, and backpropagate it."""
        _, _, kept = self.blocks.keep(self.backward, carry, [], start, self.plan.block)
        return self.kept(kept, start, self.plan.block, cotangents)

    def nest(self, starts: Arrays, cotangents: _Cotangents) -> _Cotangents:
        """Nested loops: each level finds the states its parts start from, then takes them from the last on."""
        plan, n = self.plan, self.plan.block

        def parts(levels, size, starts, start, cotangents):
            """Backpropagate levels[0] parts of `size` blocks each, from step `start` on."""

            def body(cotangents, i):
                carry, first = [at(leaf, i) for leaf in starts], start + i * size * n
                if len(levels) == 1:
                    return self.recomputed(carry, first, cotangents), None
                smaller = size // levels[1]
                inner_starts = find(carry, first, levels[1], smaller)
                return parts(levels[1:], smaller, inner_starts, first, cotangents), None

            return lax.scan(body, cotangents, jnp.arange(levels[0], dtype=jnp.int32), reverse=True)[0]

        def find(carry, start, count, size):
            """The states that `count` parts of `size` blocks start from: what a part's last block leaves in its row."""

            def block(state, b):
                carry, starts = state
                carry = self.blocks.advance(carry, start + b * n, n)
                starts = [put(stack, leaf, b // size + 1) for stack, leaf in zip(starts, carry, strict=True)]
                return (carry, starts), None

            starts = [jnp.broadcast_to(leaf, (count, *leaf.shape)) for leaf in carry]
            return lax.scan(block, (carry, starts), jnp.arange((count - 1) * size, dtype=jnp.int32))[0][1]

        return parts(plan.levels, plan.blocks // plan.levels[0], starts, 0, cotangents)

    def table(self, slots: Arrays, cotangents: _Cotangents) -> _Cotangents:
        """An iteration for every block: run forward what its row of the table says, then backpropagate the block."""
        store, blocks, n = self.store, self.blocks, self.plan.block
        moves, keeps = self.plan.moves, self.plan.keeps_residuals
        ahead, ahead_kept = jnp.asarray(moves.ahead), jnp.asarray(moves.ahead_kept)

        def iteration(state, row):
            slots, cotangents, done = state
            block, count, source, kept_row = (column.astype(jnp.int32) for column in row)
            first = block - count + (1 if keeps else 0)  # with rows for residuals the last move is the block itself
            carry = store.state(slots, source)

            def move(i, state):
                carry, slots = state
                row, start = at(ahead, done + i).astype(jnp.int32), (first + i) * n
                if not keeps:
                    carry = blocks.advance(carry, start, n)
                    return carry, store.put_state(slots, row, carry)
                carry, _, kept = blocks.keep(self.backward, carry, [], start, n)
                slots = store.put_state(slots, row, carry)
                return carry, store.put_kept(slots, at(ahead_kept, done + i).astype(jnp.int32), kept)

            if len(moves.ahead):
                carry, slots = lax.fori_loop(0, count, move, (carry, slots))
            if keeps:
                cotangents = self.kept(store.kept(slots, kept_row), block * n, n, cotangents)
            else:
                cotangents = self.recomputed(carry, block * n, cotangents)
            return (slots, cotangents, done + count), None

        columns = moves.turns, moves.source, moves.residuals
        table = jnp.arange(self.plan.blocks - 1, -1, -1, dtype=jnp.int32), *map(jnp.asarray, columns)
        (_, cotangents, _), _ = lax.scan(iteration, (slots, cotangents, jnp.int32(0)), table)
        return cotangents
