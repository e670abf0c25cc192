"""What a step costs, measured: times that plans are predicted with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memjax._core import check
from memjax._core.arrays import is_float, zeros
from memjax._core.lists import Arrays, pick
from memjax._core.timing import seconds
from memjax._plan.schedule.choose import Costs
from memjax._plan.schedule.execute import Blocks
from memjax._plan.schedule.store import Separate
from memjax.remat._scan.step import Pull, ScanBlocks, StepBackward, trace_step

_BLOCK = 8  # steps of a block whose residuals are kept
_SECONDS = 0.015  # for one run of the longer loops
_REPETITIONS = 15


class _Cycled(ScanBlocks):
    """Blocks that read the rows of xs over and over."""

    def row(self, i: Any) -> Any:
        return i % self.length


def profile(f: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any = None) -> Costs:
    """Time one step of `f` forward and backward, and what storing and loops cost, on the default device.

    Args:
      f, init, xs: as for `memjax.remat.scan`, with concrete arrays (outside `jit`). A few rows of `xs` will do.

    Returns:
      `Costs` in seconds: plain data, to keep and to give to `memjax.remat.scan(..., costs=...)`. Takes some seconds,
      for the most part compilation.

    Every figure is a difference between loops of two lengths, each the fastest of many runs taken in turn, so that
    starting a program and a busy machine count for little.

    Raises:
      TypeError: what is no concrete array; a carry whose structure or type changes.
      ValueError: no row in `xs`.
    """
    check.function("f", f, "f(carry, x) returns (carry, y)", arguments=2)
    for name, tree in (("init", init), ("xs", xs)):
        for leaf in jax.tree.leaves(check.arrays(name, tree)):
            if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
                raise check.fail(TypeError, name, "concrete arrays", leaf, "profile runs f: call it outside jit")
    if any(not jnp.ndim(leaf) or not len(leaf) for leaf in jax.tree.leaves(xs)):
        raise check.fail(ValueError, "xs", "arrays with at least one row", xs, "a few rows will do")
    step, carry = trace_step(f, init, xs)
    backward = StepBackward(step, [is_float(jax.typeof(c)) for c in step.consts], [False] * len(step.x))
    rows = [jnp.asarray(x) for x in jax.tree.leaves(xs)]
    ways: list[Callable[..., Any]] = [
        _advance,
        _in_pairs,
        _by_moves,
        partial(_forward_and_back, 1),
        partial(_forward_and_back, _BLOCK),
    ]

    def program(way: Callable[..., Any], steps: int) -> Callable[[], Any]:
        def run(consts, rows, carry, count):
            return way(_Cycled(backward, consts, rows, len(rows[0]) if rows else 1, False), carry, steps, count)

        compiled = jax.jit(run).lower(step.consts, rows, carry, steps).compile()
        return lambda: compiled(step.consts, rows, carry, steps)

    probe = program(_advance, 2 * _BLOCK)
    seconds(probe)
    once = min(seconds(probe) for _ in range(3)) / (2 * _BLOCK)
    short = _BLOCK * max(1, min(16, round(_SECONDS / once / 4 / _BLOCK)))
    long = 4 * short
    pairs = [(program(way, short), program(way, long)) for way in ways]
    for pair in pairs:
        for run in pair:
            seconds(run)
    taken = [[(seconds(a), seconds(b)) for a, b in pairs] for _ in range(_REPETITIONS)]
    fastest = [tuple(map(min, zip(*column, strict=True))) for column in zip(*taken, strict=True)]
    flat, in_pairs, by_moves, single, blocks = ((b - a) / (long - short) for a, b in fastest)
    flat = max(flat, 0.0)  # a step that does nothing takes less than the clock tells apart
    loop = max(2 * (in_pairs - flat), 0.0)
    return Costs(
        forward=flat,
        backward=max(single - flat, 0.1 * flat),
        store=max(blocks - single - 2 * loop / _BLOCK, 0.0),
        loop=loop,
        turn=max(by_moves - flat, 0.0),
    )


def _advance(blocks: Blocks, carry: Arrays, steps: int, count: Any) -> Any:
    return blocks.advance(carry, 0, steps)


def _in_pairs(blocks: Blocks, carry: Arrays, steps: int, count: Any) -> Any:
    """A loop for every second step."""

    def body(carry, i):
        return blocks.advance(carry, 2 * i, 2), None

    return lax.scan(body, carry, jnp.arange(steps // 2, dtype=jnp.int32))[0]


def _by_moves(blocks: Blocks, carry: Arrays, steps: int, count: Any) -> Any:
    """A loop whose number of iterations the compiler does not know, in which every state goes to a slot."""
    store = Separate(blocks.carry, blocks.kept, 1, 3, 0)

    def iteration(i, state):
        carry, slots = state
        carry = blocks.advance(carry, i, 1)
        return carry, store.put_state(slots, i % 4, carry)

    return lax.fori_loop(0, count, iteration, (carry, store.new(carry)))


def _forward_and_back(n: int, blocks: ScanBlocks, carry: Arrays, steps: int, count: Any) -> Any:
    """Run and backpropagate `n` steps at a time, always forwards."""
    backward = blocks.backward
    types = pick(backward.step.y, backward.out_float[len(carry) :])
    step = blocks.step_back([zeros(aval, (blocks.length,)) for aval in types])

    def body(state, i):
        carry, pull = state
        carry, _, kept = blocks.run(carry, [], i * n, n, keeps=True)
        return (carry, blocks.back(step, kept, i * n, n, (pull, []))[0]), None

    consts = [jnp.zeros_like(c) for c in pick(blocks.consts, backward.wrt_consts)]
    start = (carry, Pull(pick(carry, backward.wrt_carry), consts))
    return lax.scan(body, start, jnp.arange(steps // n, dtype=jnp.int32))[0]
