"""Running a `Plan`: the forward pass that fills slots, and the backward pass that recomputes from them.

The compiled program does not depend on the length: moves are rows of a constant table that one loop reads.
Slots are preallocated buffers that the loops carry. A slot is read before and written after the one branch of
a move, so that XLA updates it in place. Where a table has one kind of move there is no branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from memjax.remat._blocks import Blocks, Pull, at, put, zeros
from memjax.remat._plan import ADVANCE, BACK, KEEP, REBACK, Plan
from memjax.remat._step import Arrays, Backward, pick


def forward(plan: Plan, blocks: Blocks, backward: Backward, init: Arrays) -> tuple[Arrays, Arrays, Any]:
    """(carry, ys, what `pull_back` needs: slots, residuals of blocks, residuals of the tail)."""
    moves, n = plan.moves, plan.block
    ys = [zeros(aval, (plan.length,)) for aval in blocks.step.y]
    slots = [jnp.broadcast_to(leaf, (moves.hidden + 1, *leaf.shape)) for leaf in init]
    stacks = [zeros(aval, (moves.internal, n)) for aval in backward.kept] if moves.internal else []
    keeps = moves.kept >= 0

    def body(state, move):
        carry, slots, stacks, ys = state
        block, slot, row, keep = move
        start = block * n
        slots = [put(buffer, leaf, slot) for buffer, leaf in zip(slots, carry, strict=True)]
        kept = [at(buffer, row) for buffer in stacks]

        def advance(carry, kept):
            return *blocks.emit(carry, start, n), kept

        def keep_all(carry, kept):
            return blocks.keep(backward, carry, start, n)

        if keeps.any():
            carry, y, kept = lax.cond(keep, lambda c, _: blocks.keep(backward, c, start, n), advance, carry, kept)
        else:
            carry, y, kept = advance(carry, kept)
        stacks = [put(buffer, leaf, row) for buffer, leaf in zip(stacks, kept, strict=True)]
        return (carry, slots, stacks, _write(ys, y, blocks.first_row(start, n))), None

    state = (list(init), slots, stacks, ys)
    if plan.blocks:
        table = (np.arange(plan.blocks, dtype=np.int32), moves.stored, np.maximum(moves.kept, 0), keeps)
        state, _ = lax.scan(body, state, tuple(map(jnp.asarray, table)))
    carry, slots, stacks, ys = state
    tail: Arrays = []
    if plan.tail:
        start = plan.blocks * n
        carry, y, tail = blocks.keep(backward, carry, start, plan.tail)
        ys = _write(ys, y, blocks.first_row(start, plan.tail))
    return carry, ys, (slots, stacks, tail)


def pull_back(
    plan: Plan, blocks: Blocks, backward: Backward, saved: Any, ct_carry: Arrays, ct_ys: Sequence[Any]
) -> tuple[Arrays, Arrays, Arrays]:
    """Cotangents of the chosen consts, of the carry's floats and of the chosen xs."""
    slots, stacks, tail = saved
    n = plan.block
    pull = Pull(ct_carry, [jnp.zeros_like(c) for c in pick(blocks.consts, backward.wrt_consts)])
    d_xs = [jnp.zeros_like(x) for x in pick(blocks.xs, backward.wrt_x)]
    if plan.tail:
        start = plan.blocks * n
        pull, d_x = blocks.back(backward, tail, start, plan.tail, pull, ct_ys)
        d_xs = _write(d_xs, d_x, blocks.first_row(start, plan.tail))

    def reback(carry, start, pull):
        _, _, kept = blocks.keep(backward, carry, start, n)
        return blocks.back(backward, kept, start, n, pull, ct_ys)

    if plan.schedule is None:
        pull, d_xs = _nest(plan, blocks, reback, slots, pull, d_xs)
    elif len(plan.moves.rows):
        pull, d_xs = _table(plan, blocks, backward, reback, slots, stacks, pull, d_xs, ct_ys)
    return pull.consts, pull.carry, d_xs


def _nest(plan, blocks, reback, slots, pull, d_xs):
    """Nested loops: each level finds the states its parts start from, then takes them from the last on."""
    n = plan.block

    def part(levels, size, carry, start, pull, d_xs):
        """Backpropagate `size` blocks from step `start`, divided as `levels` say."""
        if not levels:
            pull, d_x = reback(carry, start, pull)
            return pull, _write(d_xs, d_x, blocks.first_row(start, n))
        count, size = levels[0], size // levels[0]

        def find(carry, i):
            ahead, _ = lax.scan(
                lambda c, b: (blocks.advance(c, start + (i * size + b) * n, n), None),
                carry,
                jnp.arange(size, dtype=jnp.int32),
            )
            return ahead, ahead

        _, starts = lax.scan(find, carry, jnp.arange(count - 1, dtype=jnp.int32))
        starts = [jnp.concatenate([first[None], rest]) for first, rest in zip(carry, starts, strict=True)]
        return parts(levels, count, size, starts, start, pull, d_xs)

    def parts(levels, count, size, starts, start, pull, d_xs):
        def body(state, i):
            pull, d_xs = state
            carry = [at(leaf, i) for leaf in starts]
            return part(levels[1:], size, carry, start + i * size * n, pull, d_xs), None

        (pull, d_xs), _ = lax.scan(body, (pull, d_xs), jnp.arange(count, dtype=jnp.int32), reverse=True)
        return pull, d_xs

    if not plan.blocks:
        return pull, d_xs
    count = plan.levels[0]
    return parts(plan.levels, count, plan.blocks // count, slots, 0, pull, d_xs)


def _table(plan, blocks, backward, reback, slots, stacks, pull, d_xs, ct_ys):
    """One loop over the moves."""
    n = plan.block
    rows = plan.moves.rows
    kinds = sorted(set(rows[:, 0].tolist()))

    def body(state, row):
        slots, stacks, pull, d_xs = state
        kind, block, source, target, residual = row
        start = block * n
        first = blocks.first_row(start, n)

        def advance(carry, kept, pull, d_x):
            return blocks.advance(carry, start, n), kept, pull, d_x

        def keep(carry, kept, pull, d_x):
            carry, _, kept = blocks.keep(backward, carry, start, n)
            return carry, kept, pull, d_x

        def back(carry, kept, pull, d_x):
            return carry, kept, *blocks.back(backward, kept, start, n, pull, ct_ys)

        def back_again(carry, kept, pull, d_x):
            return carry, kept, *reback(carry, start, pull)

        branches = {ADVANCE: advance, KEEP: keep, BACK: back, REBACK: back_again}
        operands = (
            [at(buffer, source) for buffer in slots],
            [at(buffer, residual) for buffer in stacks],
            pull,
            [lax.dynamic_slice_in_dim(d, first, n, 0) for d in d_xs],
        )
        if len(kinds) == 1:
            out = branches[kinds[0]](*operands)
        else:
            out = lax.switch(
                jnp.asarray(np.searchsorted(kinds, range(4)))[kind], [branches[k] for k in kinds], *operands
            )
        carry, kept, pull, d_x = out
        slots = [put(buffer, leaf, target) for buffer, leaf in zip(slots, carry, strict=True)]
        stacks = [put(buffer, leaf, residual) for buffer, leaf in zip(stacks, kept, strict=True)]
        return (slots, stacks, pull, _write(d_xs, d_x, first)), None

    (_, _, pull, d_xs), _ = lax.scan(body, (slots, stacks, pull, d_xs), tuple(map(jnp.asarray, rows.T)))
    return pull, d_xs


def _write(buffers: Arrays, rows: Arrays, first: Any) -> Arrays:
    return [lax.dynamic_update_slice_in_dim(buffer, new, first, 0) for buffer, new in zip(buffers, rows, strict=True)]
