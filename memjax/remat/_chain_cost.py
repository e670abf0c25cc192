"""What a block costs: time from its operations or by the clock, working memory from compiling it by itself."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from memjax._jaxpr import nbytes
from memjax._measure import remat_compiler_options
from memjax.remat._chain_block import Backward, Block
from memjax.remat._chain_schedule import BlockCost
from memjax.remat._program_cost import Program
from memjax.remat._step import Arrays, is_float


def estimate(block: Block, given: Sequence[bool]) -> BlockCost:
    """The cost of a block whose float inputs are all differentiated. Nothing is run.

    `given` marks leaves of its input that are the chain's own input, handed on: they cost nothing where the block hands
    them on as well.
    """
    backward = _whole(block)
    cts = [aval for aval in block.y if is_float(aval)]
    back_jaxpr = jax.make_jaxpr(backward.back)(block.p, block.x, backward.kept, cts).jaxpr
    forward, back = Program(block.jaxpr), Program(back_jaxpr)
    output, kept = _sizes(block, backward, given)
    if _compiles_alone(block):
        forward_work, back_temp = _compiled_bytes(_Text(block, backward))
        backward_work = back_temp + _gradient_bytes(block)
    else:
        forward_work = forward.working_bytes([], forward.outputs)
        n_dp = len(back.outputs) - sum(map(is_float, block.x))
        backward_work = back.working_bytes(back.inputs[len(back.inputs) - len(cts) :], back.outputs[:n_dp])
    return BlockCost(forward.seconds(), back.seconds(), output, kept, forward_work, backward_work)


def measured(block: Block, given: Sequence[bool], p: Arrays, x: Arrays) -> tuple[BlockCost, Arrays]:
    """(the cost of the block on the default device, its output): compiled and timed for these arguments."""
    backward = _whole(block)
    options: dict[str, Any] = dict(remat_compiler_options())
    run = jax.jit(block._evaluate).lower(p, x).compile(compiler_options=options)
    y, _, kept = backward.keep(p, x)
    cts = [jnp.ones_like(leaf) for leaf in y if is_float(leaf)]
    back = backward.back.lower(p, x, kept, cts).compile(compiler_options=options)
    output, kept_nbytes = _sizes(block, backward, given)
    cost = BlockCost(
        forward=_seconds(run, p, x),
        backward=_seconds(back, p, x, kept, cts),
        output=output,
        kept=kept_nbytes,
        forward_work=_temporary(run),
        backward_work=_temporary(back) + _gradient_bytes(block),
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
    return sum(nbytes(var.aval) for var in outputs - own), backward.kept_nbytes + handed


def _gradient_bytes(block: Block) -> int:
    """Of the gradients of output and input."""
    return sum(nbytes(aval) for aval in (*block.x, *block.y) if is_float(aval))


def _compiles_alone(block: Block) -> bool:
    """Whether the block is a program of its own: not where it uses mesh axes, or arrays laid out over a mesh."""
    avals = (*block.p, *block.x, *block.y)
    laid_out = any(aval.manual_axis_type.varying or not aval.sharding.mesh.empty for aval in avals)
    return not laid_out and not any(type(effect).__name__ == "NamedAxisEffect" for effect in block.jaxpr.effects)


class _Text:
    """A block as a key to what was compiled before: equal if the printed program is."""

    def __init__(self, block: Block, backward: Backward):
        self.block, self.backward = block, backward
        self.key = (str(block.jaxpr), jax.default_backend())

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Text) and self.key == other.key


@functools.lru_cache(maxsize=1024)
def _compiled_bytes(text: _Text) -> tuple[int, int]:
    """Temporary bytes of the forward and of the backward pass."""
    block, backward = text.block, text.backward
    cts = [aval for aval in block.y if is_float(aval)]
    options: dict[str, Any] = dict(remat_compiler_options())
    if jax.default_backend() == "cpu":
        options["xla_backend_optimization_level"] = 0  # machine code is made after memory has been assigned
    run = jax.jit(block._evaluate).lower(block.p, block.x)
    back = backward.back.lower(block.p, block.x, backward.kept, cts)
    forward_bytes, back_bytes = (_temporary(lowered.compile(compiler_options=options)) for lowered in (run, back))
    return forward_bytes, back_bytes


def _temporary(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def _seconds(run: Callable[..., Any], *arguments: Any) -> float:
    """The shortest of several runs."""
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)
