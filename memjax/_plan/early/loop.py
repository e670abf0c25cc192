"""A loop that ends early, and the loop of its backward pass, both of as many turns as there are.

Their number is known when the first loop has ended. It keeps states at even distances; where it has more than there are rows,
every second row becomes free, and the distance doubles. A loop of few turns keeps the states of all of them. The backward pass
takes the states from the last on. Turns between two of them run again, and leave states in rows of their own, and so on, down to
blocks of turns. What the backward pass reads of the turns of one block is there at once.
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

    The plan has either a tail of all turns, of which is kept from the forward pass on what the backward pass reads, or levels,
    rows of states on each.
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

            saved = self._rows(0)
        carry, count, saved = lax.while_loop(goes_on, one, (init, jnp.int32(0), saved))
        env |= zip(pair.forward.outvars, carry, strict=False)
        return [*(saved if self._keeps_all else (*saved.states, saved.distance, saved.order)), count]

    def _stacks(self, of: Sequence[Any], rows: int) -> Arrays:
        return [zeros(var.aval, (rows,)) for var in of]

    def _rows(self, level: int) -> _Rows:
        count = self._of_blocks.levels[level]
        carry = self.pair.program.invars[scan_counts(self.pair.forward)[0] :]
        states = self._stacks(pick(carry, self._is_again), count + 1)
        return _Rows(states, jnp.int32(1), jnp.arange(count, dtype=jnp.int32))

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

        Rows of the inner levels are carried by all loops, so that they are made once.
        """
        plan, [body] = self._of_blocks, self._bodies

        def parts(level: int, rows: _Rows, count: Any, state: Any) -> Any:
            """Pull back so many turns, from states at even distances."""

            def part(k: Any, state: Any) -> Any:
                carry = [at(one, rows.order[k]) for one in rows.states]
                return turns(level + 1, carry, jnp.minimum(rows.distance, count - k * rows.distance), state)

            return _downwards(-(-count // rows.distance), part, state)

        def turns(level: int, carry: Arrays, count: Any, state: Any) -> Any:
            """Pull back so many turns, from the state before the first."""
            cotangents, scratch = state
            if level == len(plan.levels):
                cotangents, scratch[-1] = block(carry, count, cotangents, scratch[-1])
                return cotangents, scratch
            rows = scratch[level - 1]
            rows = rows._replace(distance=-(-count // len(rows.order)))
            last = (count - 1) // rows.distance

            def one(i: Any, found: Any) -> Any:
                carry, rows = found
                rows = _with_state(rows, carry, i)
                return advance(carry), rows

            carry, rows = lax.fori_loop(0, last * rows.distance, one, (carry, rows))
            rows = _with_state(rows, carry, last * rows.distance)
            scratch[level - 1] = rows._replace(distance=jnp.int32(1))
            return parts(level, rows, count, (cotangents, scratch))

        def advance(carry: Arrays) -> Arrays:
            return pick(again(body, self._whole(carry), [], writes=False, keeps=False)[0], self._is_again)

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

        inner: list[Any] = [self._rows(level) for level in range(1, len(plan.levels))]
        stacks = self._stacks(body.kept, plan.block) if plan.block > 1 else []
        return parts(0, rows, count, (init, [*inner, stacks]))[0]

    def _whole(self, carry: Arrays) -> Arrays:
        """The state, with zeros where what runs again does not depend on it. Compilers find that out, too."""
        state = self.pair.program.invars[scan_counts(self.pair.forward)[0] :]
        return merge(carry, [zeros(var.aval, ()) for var in drop(state, self._is_again)], self._is_again)


def _with_state(rows: _Rows, state: Arrays, i: Any) -> _Rows:
    """The rows with the state before turn `i`, if that is at one of their distances."""
    states, distance, order = rows
    count = len(order)
    is_full = i == count * distance
    order = jnp.where(is_full, jnp.concatenate([order[::2], order[1::2]]), order)
    distance = jnp.where(is_full, 2 * distance, distance)
    row = jnp.where(i % distance == 0, order[jnp.minimum(i // distance, count - 1)], count)
    return _Rows(_put(states, state, row), distance, order)


def _put(stacks: Arrays, values: Arrays, row: Any) -> Arrays:
    return [put(stack, value, row) for stack, value in zip(stacks, values, strict=True)]


def _downwards(count: Any, f: Callable[[Any, Any], Any], state: Any) -> Any:
    """What `f` makes of the state for the numbers below `count`, the largest first."""
    return lax.fori_loop(0, count, lambda i, state: f(count - 1 - i, state), state)
