"""What a block costs: time from its operations or by the clock, working memory from compiling it by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from memjax._core.arrays import is_float
from memjax._core.backward import Backward
from memjax._core.lists import Arrays, pick
from memjax._core.program.costs import device, program_seconds
from memjax._core.program.jaxpr import calls_in_place, nbytes, variables
from memjax._core.program.working import peak_bytes
from memjax._core.timing import seconds
from memjax._measure import remat_compiler_options
from memjax._plan.alone import bytes_of, compile_alone, constants, temporary
from memjax.remat._chain.block import Block
from memjax.remat._chain.items import BlockCost

_MOST_COMPILED = 1024


def estimate(block: Block, from_input: Sequence[bool]) -> BlockCost:
    """The cost of a block whose float inputs are all differentiated. Nothing is run.

    `from_input` marks the leaves of its input that are leaves of the chain's input, handed on. They cost nothing where the block
    hands them on as well.
    """
    backward = _whole(block)
    cts = [aval for aval in block.y if is_float(aval)]
    run = jax.make_jaxpr(block.evaluate)(block.p, block.x)
    pull = jax.make_jaxpr(backward.back)([*block.p, *block.x], backward.kept, cts)
    forward, back = (calls_in_place(traced, differentiable=False) for traced in (run, pull))
    rates = device()
    output, kept = _sizes(block, backward, from_input)
    compiled = _compiled_bytes(run, pull)
    if compiled is not None:
        forward_work, back_temp, standing = compiled
        backward_work = back_temp + _gradient_bytes(block)
    else:
        n_kept, n_dp = len(back.invars) - len(cts), len(back.outvars) - sum(map(is_float, block.x))
        forward_work, standing = modelled_bytes(forward, rates.platform), 0
        backward_work = modelled_bytes(back, rates.platform, back.invars[n_kept:], back.outvars[n_dp:])
    times = program_seconds(forward, rates), program_seconds(back, rates)
    return BlockCost(*times, output, kept, forward_work, backward_work, standing)


def modelled_bytes(program: Any, platform: str, entering: Sequence[Any] = (), leaving: Sequence[Any] = ()) -> int:
    """The most bytes that a program without calls works with, without its inputs and outputs but those named."""
    counted = {*variables(entering), *variables(leaving)}
    elsewhere = variables([*program.constvars, *program.invars, *program.outvars])
    return peak_bytes(program.eqns, set(elsewhere) - counted, variables(entering), variables(leaving), [], platform)


def measured(block: Block, from_input: Sequence[bool], p: Arrays, x: Arrays) -> tuple[BlockCost, Arrays]:
    """(the cost of the block on the default device, its output): compiled and timed for these arguments."""
    backward = _whole(block)
    options: dict[str, Any] = dict(remat_compiler_options())
    run = jax.jit(block.evaluate).lower(p, x).compile(compiler_options=options)
    out, kept = backward.keep([*p, *x])
    y = out[: len(block.y)]
    cts = [jnp.ones_like(leaf) for leaf in y if is_float(leaf)]
    back = backward.back.lower([*p, *x], kept, cts).compile(compiler_options=options)  # type: ignore[attr-defined]  # jitted
    output, kept_nbytes = _sizes(block, backward, from_input)
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


def _sizes(block: Block, backward: Backward, from_input: Sequence[bool]) -> tuple[int, int]:
    """Bytes of the output, and of what is kept, without leaves that are `from_input`."""
    exist = set(pick(block.x_vars, from_input))
    outputs = set(variables(block.y_vars)) - exist
    handed_on = sum(nbytes(var.aval) for var in outputs.intersection(block.jaxpr.invars))
    return sum(nbytes(var.aval) for var in outputs), backward.nbytes_with(len(block.y)) + handed_on


def _gradient_bytes(block: Block) -> int:
    """Bytes of the gradients of output and input."""
    return sum(nbytes(aval) for aval in (*block.x, *block.y) if is_float(aval))


_compiled: dict[tuple[str, str], tuple[int, int, int] | None] = {}
"""Bytes by backend and digest of the programs. The programs would hold what blocks close over."""


def _compiled_bytes(run: Any, pull: Any) -> tuple[int, int, int] | None:
    """As `_bytes`, for programs that are compiled here; None if they cannot be."""
    text = f"{run}\n{pull}\n{run.in_avals} {pull.in_avals}"
    key = (jax.default_backend(), hashlib.sha256(text.encode()).hexdigest())
    if key not in _compiled:
        programs = compile_alone(run), compile_alone(pull)
        if len(_compiled) == _MOST_COMPILED:
            _compiled.pop(next(iter(_compiled)))
        _compiled[key] = None if None in programs else _bytes(*programs)
    return _compiled[key]


def _bytes(run: Any, pull: Any) -> tuple[int, int, int]:
    """Temporary bytes of the forward and of the backward pass, and of the constants that stand throughout.

    Constants of the same type in both passes are taken to be the same ones.
    """
    standing = [constants(program) for program in (run, pull)]
    works = [temporary(program) - bytes_of(types) for program, types in zip((run, pull), standing, strict=True)]
    return max(works[0], 0), max(works[1], 0), bytes_of(standing[0] | standing[1])


def _fastest(run: Callable[..., Any], *arguments: Any) -> float:
    """The shortest of several runs after a first one."""
    return min([seconds(run, *arguments) for _ in range(8)][1:])
