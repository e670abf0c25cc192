"""Running a `Plan`: the forward pass that fills slots, and the backward pass that recomputes from them.

The size of the compiled program does not depend on the length: moves are rows of constant tables that loops read. Slots
are preallocated buffers that the loops carry and update in place. All moves are alike, and the moves of one turn are one loop,
for two reasons: XLA would copy whole buffers that a branch of a `cond` writes to, and a GPU waits for the host at every branch
and at every turn of a loop of unknown length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from memjax._core.arrays import zeros
from memjax._core.lists import Arrays, pick
from memjax.remat._scan.blocks import Blocks, Pull, at, put
from memjax.remat._scan.plan import Plan
from memjax.remat._scan.step import Step, StepBackward
from memjax.remat._scan.store import Separate, Shared


def store_of(plan: Plan, step: Step, backward: StepBackward) -> Separate | Shared:
    """Where the plan's slots are."""
    strategy = plan.schedule.strategy if plan.schedule is not None else "hidden"
    if strategy == "mixed":
        return Shared(step.carry, backward.kept, plan.block, plan.rows)
    residuals = plan.rows if strategy == "internal" else 0
    return Separate(step.carry, backward.kept, plan.block, plan.rows, residuals)


def forward(plan: Plan, blocks: Blocks, backward: StepBackward, init: Arrays) -> tuple[Arrays, Arrays, Any]:
    """(carry, ys, what `pull_back` needs: slots, residuals of the tail)."""
    n = plan.block
    store = store_of(plan, blocks.step, backward)

    def body(state, turn):
        carry, slots, ys = state
        block, row, kept_row = turn
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
        state, _ = lax.scan(body, state, (jnp.arange(plan.blocks, dtype=jnp.int32), row, kept_row))
    carry, slots, ys = state
    tail: Arrays = []
    if plan.tail:
        carry, ys, tail = blocks.keep(backward, carry, ys, plan.blocks * n, plan.tail)
        if plan.tail_among_slots:
            slots, tail = store.put_kept(slots, plan.scrap, tail), []
    return carry, ys, (slots, tail)


def pull_back(
    plan: Plan, blocks: Blocks, backward: StepBackward, saved: Any, ct_carry: Arrays, ct_ys: Sequence[Any]
) -> tuple[Arrays, Arrays, Arrays]:
    """Cotangents of the chosen consts, of the carry's floats and of the chosen xs."""
    slots, tail = saved
    n = plan.block
    pull = Pull(ct_carry, [jnp.zeros_like(c) for c in pick(blocks.consts, backward.wrt_consts)])
    d_xs = [jnp.zeros_like(x) for x in pick(blocks.xs, backward.wrt_x)]

    def back(kept, start, steps, pull, d_xs):
        return blocks.back(backward, kept, start, steps, pull, d_xs, ct_ys)

    def recompute_and_back(carry, start, pull, d_xs):
        _, _, kept = blocks.keep(backward, carry, [], start, n)
        return back(kept, start, n, pull, d_xs)

    store = store_of(plan, blocks.step, backward)
    if plan.tail:
        kept = store.kept(slots, plan.scrap) if plan.tail_among_slots else tail
        pull, d_xs = back(kept, plan.blocks * n, plan.tail, pull, d_xs)
    if plan.schedule is None and plan.blocks:
        pull, d_xs = _nest(plan, blocks, recompute_and_back, slots, pull, d_xs)
    elif plan.blocks:
        pull, d_xs = _table(plan, blocks, backward, store, recompute_and_back, back, slots, pull, d_xs)
    return pull.consts, pull.carry, d_xs


def _nest(
    plan: Plan, blocks: Blocks, recompute_and_back: Callable[..., Any], starts: Arrays, pull: Pull, d_xs: Arrays
) -> tuple[Pull, Arrays]:
    """Nested loops: each level finds the states its parts start from, then takes them from the last on."""
    n = plan.block

    def parts(levels, size, starts, start, pull, d_xs):
        """Backpropagate levels[0] parts of `size` blocks each, from step `start` on."""

        def body(state, i):
            carry, first = [at(leaf, i) for leaf in starts], start + i * size * n
            if len(levels) == 1:
                return recompute_and_back(carry, first, *state), None
            smaller = size // levels[1]
            return parts(levels[1:], smaller, find(carry, first, levels[1], smaller), first, *state), None

        (pull, d_xs), _ = lax.scan(body, (pull, d_xs), jnp.arange(levels[0], dtype=jnp.int32), reverse=True)
        return pull, d_xs

    def find(carry, start, count, size):
        """The states that `count` parts of `size` blocks start from: what a part's last block leaves in its row."""

        def block(state, b):
            carry, starts = state
            carry = blocks.advance(carry, start + b * n, n)
            return (carry, [put(stack, leaf, b // size + 1) for stack, leaf in zip(starts, carry, strict=True)]), None

        starts = [jnp.broadcast_to(leaf, (count, *leaf.shape)) for leaf in carry]
        return lax.scan(block, (carry, starts), jnp.arange((count - 1) * size, dtype=jnp.int32))[0][1]

    return parts(plan.levels, plan.blocks // plan.levels[0], starts, 0, pull, d_xs)


def _table(
    plan: Plan,
    blocks: Blocks,
    backward: StepBackward,
    store: Separate | Shared,
    recompute_and_back: Callable[..., Any],
    back: Callable[..., Any],
    slots: Arrays,
    pull: Pull,
    d_xs: Arrays,
) -> tuple[Pull, Arrays]:
    """A turn for every block: run forward what its row of the table says, then backpropagate the block."""
    n, moves, keeps = plan.block, plan.moves, plan.keeps_residuals
    ahead, ahead_kept = jnp.asarray(moves.ahead), jnp.asarray(moves.ahead_kept)

    def turn(state, row):
        slots, pull, d_xs, done = state
        block, count, source, kept_row = (column.astype(jnp.int32) for column in row)
        first = block - count + (1 if keeps else 0)  # with rows for residuals the last move is the block itself
        carry = store.state(slots, source)

        def move(i, state):
            carry, slots = state
            row, start = at(ahead, done + i).astype(jnp.int32), (first + i) * n
            if not keeps:
                carry = blocks.advance(carry, start, n)
                return carry, store.put_state(slots, row, carry)
            carry, _, kept = blocks.keep(backward, carry, [], start, n)
            slots = store.put_state(slots, row, carry)
            return carry, store.put_kept(slots, at(ahead_kept, done + i).astype(jnp.int32), kept)

        if len(moves.ahead):
            carry, slots = lax.fori_loop(0, count, move, (carry, slots))
        if keeps:
            pull, d_xs = back(store.kept(slots, kept_row), block * n, n, pull, d_xs)
        else:
            pull, d_xs = recompute_and_back(carry, block * n, pull, d_xs)
        return (slots, pull, d_xs, done + count), None

    columns = moves.turns, moves.source, moves.residuals
    table = jnp.arange(plan.blocks - 1, -1, -1, dtype=jnp.int32), *map(jnp.asarray, columns)
    (_, pull, d_xs, _), _ = lax.scan(turn, (slots, pull, d_xs, jnp.int32(0)), table)
    return pull, d_xs
