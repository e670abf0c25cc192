"""A loop that ends early, and the loop of its backward pass, both of as many turns as there are.

Their number is known when the first loop has ended. It keeps states at even distances; where it has more than there are rows,
every second row becomes free, and the distance doubles. A loop of few turns keeps the states of all of them. The backward pass
takes the states from the last on. Turns after that run again, and leave states in rows that are free, down to blocks of turns:
as many turns from one to the next as binomial checkpointing has for that many rows (Griewank and Walther 2000). What the backward
pass reads of the turns of one block is there at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from memjax._core.arrays import as_array, zeros
from memjax._core.compat import scan_counts
from memjax._core.lists import Arrays, drop, merge, pick
from memjax._core.program.jaxpr import read
from memjax._plan.derivative import LoopPair
from memjax._plan.early.ended import is_running
from memjax._plan.early.options import most_runs
from memjax._plan.early.turns import states_again
from memjax._plan.loop import Env, Loop
from memjax._plan.schedule.execute import LoopPlan
from memjax._plan.schedule.store import at, put


class _Rows(NamedTuple):
    """States at even distances.

    Attributes:
      states: stacks; nobody reads their last row.
      distance: turns from one state to the next.
      order: rows of the states, in order.
    """

    states: Arrays
    distance: Any
    order: Any


class EarlyLoop(Loop):
    """The two loops of a pair that ends early under a plan; see `Loop`.

    The plan has either a tail of all turns, of which is kept from the forward pass on what the backward pass reads, or levels:
    rows of states of the forward pass, and more for turns that run again.
    """

    def __init__(
        self,
        pair: LoopPair,
        parts: Any,
        codes: Any = None,
        in_steps_on: str | None = None,
        constants: Any = None,
        in_blocks: LoopPlan | None = None,
    ):
        super().__init__(pair, parts, codes, in_steps_on, constants, in_blocks)
        assert in_blocks is not None
        self._of_blocks = in_blocks
        consts, carried = scan_counts(pair.forward)
        self._stays = list(range(carried))
        self._again = states_again(pair.program, pair.pull, consts, carried)
        self._is_again = [i in set(self._again) for i in range(carried)]
        rows = self._bodies[0].stack_count if self._keeps_all else len(self._again) + 2
        self.stack_count = rows + 1

    @property
    def _keeps_all(self) -> bool:
        return self._of_blocks.tail > 0

    def forward(self, env: Env) -> Arrays:
        """Run the loop: its outputs go to `env`; what it keeps is returned."""
        pair, ends, length = self.pair, self.pair.early, self._of_blocks.length
        assert ends is not None
        consts, _ = scan_counts(pair.forward)
        values = list(map(as_array, read(env, pair.forward.invars)))
        given, init = values[:consts], values[consts:]
        turn, [body] = self._forward_turn(given), self._bodies

        goes_on = lambda state: (state[1] < length) & is_running(ends, given, state[0])

        if self._keeps_all:

            def one(state: Any) -> Any:
                carry, i, stacks = state
                carry, _, kept = turn(body, carry, [])
                return carry, i + 1, _put(stacks, kept, i)

            saved: Any = self._stacks(body.kept, length)
        else:

            def one(state: Any) -> Any:
                carry, i, rows = state
                rows = _with_state(rows, pick(carry, self._is_again), i)
                carry, _, _ = turn(body, carry, [], keeps=False)
                return carry, i + 1, rows

            saved = self._rows()
        carry, count, saved = lax.while_loop(goes_on, one, (init, jnp.int32(0), saved))
        env |= zip(pair.forward.outvars, carry, strict=False)
        return [*(saved if self._keeps_all else (*saved.states, saved.distance, saved.order)), count]

    def _stacks(self, of: Sequence[Any], rows: int) -> Arrays:
        return [zeros(var.aval, (rows,)) for var in of]

    def _rows(self) -> _Rows:
        levels = self._of_blocks.levels
        carry = self.pair.program.invars[scan_counts(self.pair.forward)[0] :]
        states = self._stacks(pick(carry, self._is_again), sum(levels) + 1)
        return _Rows(states, jnp.int32(1), jnp.arange(levels[0], dtype=jnp.int32))

    def backward(self, values: Any, env: Env, stacks: Sequence[Any]) -> None:
        """Run the loop of the backward pass; its outputs go to `env`."""
        eqn, [body] = self.pair.backward, self._bodies
        back, init, xs = self._backward_turn(values)
        turn_back = lambda carry, kept: back(body, carry, (*xs, kept))[0]
        *saved, count = stacks
        init = list(map(as_array, init))
        if self._keeps_all:
            outs = _downwards(count, lambda i, carry: turn_back(carry, [at(one, i) for one in saved]), init)
        else:
            *states, distance, order = saved
            again = self._forward_turn(self._there(values)[: scan_counts(self.pair.forward)[0]])
            outs = self._pull_back(again, turn_back, _Rows(states, distance, order), count, init)
        env |= zip(eqn.outvars, outs, strict=True)

    def _pull_back(self, again: Any, turn_back: Any, rows: _Rows, count: Any, init: Arrays) -> Arrays:
        """What the turns backwards make of `init`, from states that are kept.

        Rows from the last state on are free, and those that the forward pass had no use for.
        """
        plan, [body] = self._of_blocks, self._bodies
        size = sum(plan.levels)
        order = jnp.concatenate([rows.order, jnp.arange(plan.levels[0], size + 1, dtype=jnp.int32)])
        turns = jnp.arange(size + 1, dtype=jnp.int32) * rows.distance  # before which the states are

        def advance(_: Any, carry: Arrays) -> Arrays:
            return pick(again(body, self._whole(carry), [], writes=False, keeps=False)[0], self._is_again)

        def descend(state: Any) -> Any:
            """Run turns again up to the next state, which goes to a free row, or else up to the last block."""
            carry, i, end, top, turns, states = state
            left, free = -(-(end - i) // plan.block), size - 1 - top
            blocks = jnp.where(free > 0, _up_to_next(left, free, plan), left - 1)
            carry, i = lax.fori_loop(0, blocks * plan.block, advance, carry), i + blocks * plan.block
            at_top = jnp.where(free > 0, top + 1, size)  # nobody reads that row
            states = _put(states, carry, order[at_top])
            return carry, i, end, jnp.where(free > 0, top + 1, top), turns.at[at_top].set(i), states

        def block_back(state: Any) -> Any:
            end, top, turns, states, cotangents, stacks = state
            carry = [at(one, order[top]) for one in states]
            more = lambda state: state[2] - state[1] > plan.block
            carry, i, _, top, turns, states = lax.while_loop(
                more, descend, (carry, turns[top], end, top, turns, states)
            )
            cotangents, stacks = block(carry, end - i, cotangents, stacks)
            return i, jnp.where(turns[top] == i, top - 1, top), turns, states, cotangents, stacks

        def block(carry: Arrays, count: Any, cotangents: Arrays, stacks: Arrays) -> tuple[Arrays, Arrays]:
            if plan.block == 1:
                _, _, kept = again(body, self._whole(carry), [], writes=False)
                return turn_back(cotangents, kept), stacks

            def one(i: Any, state: Any) -> Any:
                carry, stacks = state
                made, _, kept = again(body, self._whole(carry), [], writes=False)
                return pick(made, self._is_again), _put(stacks, kept, i)

            _, stacks = lax.fori_loop(0, count, one, (carry, stacks))
            back = lambda i, carry: turn_back(carry, [at(stack, i) for stack in stacks])
            return _downwards(count, back, cotangents), stacks

        stacks = self._stacks(body.kept, plan.block) if plan.block > 1 else []
        top = -(-count // rows.distance) - 1
        state = count, top, turns, rows.states, init, stacks
        return lax.while_loop(lambda state: state[0] > 0, block_back, state)[4]

    def _whole(self, carry: Arrays) -> Arrays:
        """The state, with zeros where what runs again does not depend on it. Compilers find that out, too."""
        state = self.pair.program.invars[scan_counts(self.pair.forward)[0] :]
        return merge(carry, [zeros(var.aval, ()) for var in drop(state, self._is_again)], self._is_again)


def _with_state(rows: _Rows, state: Arrays, i: Any) -> _Rows:
    """The rows with the state before turn `i`, if that is at one of their distances."""
    states, distance, order = rows
    count, unread = len(order), len(states[0]) - 1
    is_full = i == count * distance
    order = jnp.where(is_full, jnp.concatenate([order[::2], order[1::2]]), order)
    distance = jnp.where(is_full, 2 * distance, distance)
    row = jnp.where(i % distance == 0, order[jnp.minimum(i // distance, count - 1)], unread)
    return _Rows(_put(states, state, row), distance, order)


def _up_to_next(left: Any, free: Any, plan: LoopPlan) -> Any:
    """Blocks up to the next state, of so many that are left, with so many free rows: as in binomial checkpointing.

    With `s` states, of which the first is there, and each block run at most `r` times for states, (s + r)! / (s! r!) blocks are
    pulled back. Where there are `left`, of the fewest runs, the states after the next one are to suffice for what follows it.
    """
    rows = (free + 1).astype(jnp.float32)
    runs = jnp.arange(1, most_runs(plan) + 1, dtype=jnp.float32)
    reached = jnp.cumprod((rows + runs) / runs)
    r = jnp.sum(reached < left.astype(jnp.float32) - 0.5).astype(jnp.float32) + 1
    most = reached[jnp.minimum(r.astype(jnp.int32), len(runs)) - 1]
    after, least = most * rows / (rows + r), most * r * (r - 1) / ((rows + r) * (rows + r - 1))
    blocks = jnp.maximum(left - jnp.round(after).astype(jnp.int32), jnp.round(least).astype(jnp.int32))
    return jnp.clip(blocks, 1, left - 1)


def _put(stacks: Arrays, values: Arrays, row: Any) -> Arrays:
    return [put(stack, value, row) for stack, value in zip(stacks, values, strict=True)]


def _downwards(count: Any, f: Callable[[Any, Any], Any], state: Any) -> Any:
    """What `f` makes of the state for the numbers below `count`, the largest first."""
    return lax.fori_loop(0, count, lambda i, state: f(count - 1 - i, state), state)
