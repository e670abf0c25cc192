"""What a block costs: time from its operations or by the clock, working memory from compiling it by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from memjax._core.arrays import is_float
from memjax._core.backward import Backward
from memjax._core.jaxpr import nbytes
from memjax._core.lists import Arrays
from memjax._core.timing import seconds
from memjax._measure import remat_compiler_options
from memjax.remat._chain.block import Block
from memjax.remat._chain.compiled_bytes import bytes_of, compile_alone, constants, temporary
from memjax.remat._chain.items import BlockCost
from memjax.remat._chain.program_cost import Program

_MOST_COMPILED = 1024


def estimate(block: Block, given: Sequence[bool]) -> BlockCost:
    """The cost of a block whose float inputs are all differentiated. Nothing is run.

    `given` marks leaves of its input that are the chain's own input, handed on: they cost nothing where the block hands
    them on as well.
    """
    backward = _whole(block)
    cts = [aval for aval in block.y if is_float(aval)]
    run = jax.make_jaxpr(block.evaluate)(block.p, block.x)
    pull = jax.make_jaxpr(backward.back)([*block.p, *block.x], backward.kept, cts)
    forward, back = Program(run.jaxpr), Program(pull.jaxpr)
    output, kept = _sizes(block, backward, given)
    compiled = _compiled_bytes(run, pull)
    if compiled is not None:
        forward_work, back_temp, standing = compiled
        backward_work = back_temp + _gradient_bytes(block)
    else:
        forward_work, standing = forward.working_bytes([], forward.outputs), 0
        n_dp = len(back.outputs) - sum(map(is_float, block.x))
        backward_work = back.working_bytes(back.inputs[len(back.inputs) - len(cts) :], back.outputs[:n_dp])
    return BlockCost(forward.seconds(), back.seconds(), output, kept, forward_work, backward_work, standing)


def measured(block: Block, given: Sequence[bool], p: Arrays, x: Arrays) -> tuple[BlockCost, Arrays]:
    """(the cost of the block on the default device, its output): compiled and timed for these arguments."""
    backward = _whole(block)
    options: dict[str, Any] = dict(remat_compiler_options())
    run = jax.jit(block.evaluate).lower(p, x).compile(compiler_options=options)
    out, kept = backward.keep([*p, *x])
    y = out[: len(block.y)]
    cts = [jnp.ones_like(leaf) for leaf in y if is_float(leaf)]
    back = backward.back.lower([*p, *x], kept, cts).compile(compiler_options=options)  # type: ignore[attr-defined]  # jitted
    output, kept_nbytes = _sizes(block, backward, given)
    forward_work, back_temp, standing = _bytes(run, back)
    cost = BlockCost(
        forward=_fastest(run, p, x),
        backward=_fastest(back, [*p, *x], kept, cts),
        output=output,
        kept=kept_nbytes,
        forward_work=forward_work,
        backward_work=back_temp + _gradient_bytes(block),
        standing=standing,
    )
    return cost, y


def _whole(block: Block) -> Backward:
    return block.backward(tuple(is_float(aval) for aval in (*block.p, *block.x)))


def _sizes(block: Block, backward: Backward, given: Sequence[bool]) -> tuple[int, int]:
    """Bytes of the output, and of what is kept, leaves handed on from the input counted unless they are `given`."""
    xs = block.jaxpr.invars[len(block.jaxpr.invars) - len(block.x) :]
    own = {var for var, mine in zip(xs, given, strict=True) if mine}
    outputs = {var for var in block.jaxpr.outvars[: len(block.y)] if not isinstance(var, core.Literal)}
    handed = sum(nbytes(var.aval) for var in outputs.intersection(block.jaxpr.invars) - own)
    return sum(nbytes(var.aval) for var in outputs - own), backward.nbytes_with(len(block.y)) + handed


def _gradient_bytes(block: Block) -> int:
    """Of the gradients of output and input."""
    return sum(nbytes(aval) for aval in (*block.x, *block.y) if is_float(aval))


_compiled: dict[tuple[str, str], tuple[int, int, int] | None] = {}
"""Bytes by backend and digest of what was compiled: blocks, and what they close over, must not outlive their trace."""


def _compiled_bytes(run: Any, pull: Any) -> tuple[int, int, int] | None:
    """Temporary bytes of the forward and of the backward pass, and what of them stands; None if they have no program."""
    text = f"{run}\n{pull}\n{run.in_avals} {pull.in_avals}"
    key = (jax.default_backend(), hashlib.sha256(text.encode()).hexdigest())
    if key not in _compiled:
        programs = compile_alone(run), compile_alone(pull)
        if len(_compiled) == _MOST_COMPILED:
            _compiled.pop(next(iter(_compiled)))
        _compiled[key] = None if None in programs else _bytes(*programs)
    return _compiled[key]


def _bytes(run: Any, pull: Any) -> tuple[int, int, int]:
    """What of them stands is one of both, where they are of one type."""
    standing = [constants(program) for program in (run, pull)]
    works = [temporary(program) - bytes_of(types) for program, types in zip((run, pull), standing, strict=True)]
    return max(works[0], 0), max(works[1], 0), bytes_of(standing[0] | standing[1])


def _fastest(run: Callable[..., Any], *arguments: Any) -> float:
    """The shortest of several runs after a first one."""
    return min([seconds(run, *arguments) for _ in range(8)][1:])
