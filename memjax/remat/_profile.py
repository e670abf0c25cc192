"""Measuring what a step costs where it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memjax.remat._blocks import Blocks, Pull, zeros
from memjax.remat._costs import Costs
from memjax.remat._step import Backward, is_float, pick, trace_step

_STEPS, _BLOCK = 128, 4


def profile(f: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any = None) -> Costs:
    """Time one step of `f` forward and backward, and what loops and branches cost, on the default device.

    Args:
      f, init, xs: as for `memjax.remat.scan`, with concrete arrays (outside `jit`). Only the first row of
      `xs` is read.

    Returns:
      `Costs` in seconds: plain data, to keep and give to `memjax.remat.scan(..., costs=...)`. Takes some
      seconds, compilation for the most part.
    """
    step, carry = trace_step(f, init, xs)
    backward = Backward(step, [is_float(jax.typeof(c)) for c in step.consts], [False] * len(step.x))
    row = [x[:1] for x in jax.tree.leaves(xs)]

    def blocks(consts, row):
        here = Blocks(step, consts, row, _STEPS, False)
        # Every step reads the one row, in a way that the compiler cannot take out of the loop.
        here._row = lambda i: i // _STEPS  # type: ignore[method-assign]
        return here

    def flat(consts, row, carry):
        return blocks(consts, row).advance(carry, 0, _STEPS)

    def nested(consts, row, carry):
        def body(carry, i):
            return blocks(consts, row).advance(carry, i * _BLOCK, _BLOCK), None

        return lax.scan(body, carry, jnp.arange(_STEPS // _BLOCK))[0]

    def branching(consts, row, carry):
        """As many steps, and half as many moves more that do nothing."""

        def advance(carry, i):
            return blocks(consts, row).advance(carry, i * _BLOCK, _BLOCK)

        def body(carry, i):
            return lax.cond(i % 3 < 2, advance, lambda carry, _: list(carry), carry, i), None

        return lax.scan(body, carry, jnp.arange(_STEPS // _BLOCK * 3 // 2))[0]

    def gradient(consts, row, carry):
        here = blocks(consts, row)
        carry, _, kept = here.keep(backward, carry, 0, _STEPS)
        start = Pull(pick(carry, backward.wrt_carry), [jnp.zeros_like(c) for c in pick(consts, backward.wrt_consts)])
        ct_ys = [zeros(aval, (1,)) for aval in pick(step.y, backward.out_float[len(step.carry) :])]
        return here.back(backward, kept, 0, _STEPS, start, ct_ys)[0]

    t_flat, t_nested, t_branch, t_gradient = (
        _seconds(jax.jit(run), step.consts, row, carry) for run in (flat, nested, branching, gradient)
    )
    parts = _STEPS // _BLOCK
    return Costs(
        forward=t_flat / _STEPS,
        backward=max(t_gradient - t_flat, 0.1 * t_flat) / _STEPS,
        loop=max(t_nested - t_flat, 0.0) / parts,
        branch=max(t_branch - t_nested, 0.0) / (1.5 * parts),
    )


def _seconds(run: Callable[..., Any], *arguments: Any) -> float:
    """The shortest of several runs, after one that compiles."""
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)
