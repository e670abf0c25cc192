"""Loops that end early and keep nothing, as loops that end: nothing of them is differentiated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from memjax._core.arrays import as_array
from memjax._core.compat import scan_counts
from memjax._core.lists import Arrays
from memjax._core.program.dataflow import variables
from memjax._core.program.jaxpr import Program, as_closed, calls_in_place, evaluate_in, read, trace
from memjax._plan.early.turns import Early, early


def is_running(ends: Early, given: Arrays, carry: Arrays) -> Any:
    """Whether a turn with these constants changes this state."""
    env = ends.asks.given([*given, *carry])
    evaluate_in(ends.asks.eqns, env)
    [number] = read(env, ends.asks.outvars)
    return number.astype(jnp.int32) == ends.running


def in_loop(eqn: Any) -> Early | None:
    """How a scan that scans over nothing ends early; or None."""
    program = calls_in_place(as_closed(eqn.params["jaxpr"]), differentiable=False)
    consts, carried = scan_counts(eqn)
    return early(program, consts, carried) if consts + carried == len(program.invars) else None


def with_ends(program: Program, paired: Collection[int], axes: Mapping[str, int]) -> Program:
    """The program whose loops that end early and stack nothing run no turn after that.

    Args:
      program: calls in place.
      paired: `id`s of loops that stay as they are.
      axes: sizes of the named axes that collectives run over.
    """
    for eqn in program.eqns:
        if eqn.primitive.name != "scan" or id(eqn) in paired or scan_counts(eqn)[1] != len(eqn.outvars):
            continue
        if (ends := in_loop(eqn)) is not None:
            run = _that_ends(ends, eqn.params["length"], scan_counts(eqn)[0])
            f = lambda env, eqn=eqn, run=run: run(read(env, eqn.invars))
            program, _ = in_place(program, eqn, f, eqn.outvars, axes, eqn.invars)
    return program


def _that_ends(ends: Early, length: int, consts: int) -> Callable[[Arrays], Arrays]:
    def run(values: Arrays) -> Arrays:
        given, init = values[:consts], list(map(as_array, values[consts:]))

        def turn(state: Any) -> Any:
            i, carry = state
            env = ends.turn.given([*given, *carry])
            evaluate_in(ends.turn.eqns, env)
            return i + 1, read(env, ends.turn.outvars)

        goes_on = lambda state: (state[0] < length) & is_running(ends, given, state[1])
        return lax.while_loop(goes_on, turn, (jnp.int32(0), init))[1]

    return run


def in_place(
    program: Program,
    eqn: Any,
    f: Callable[[dict[Any, Any]], Arrays],
    outs: Sequence[Any],
    axes: Mapping[str, int],
    reads: Sequence[Any],
) -> tuple[Program, list[Any]]:
    """The program with what `f` does in place of an equation, and what that makes: first `outs`, which the equation made.

    Args:
      f: from values by variable.
      reads: the variables, and literals, that it reads.
    """
    reads = [*dict.fromkeys(variables(reads))]
    types = [var.aval for var in reads]
    run = lambda *values: f(dict(zip(reads, values, strict=True)))
    inside = calls_in_place(trace(run, types, dict(axes)), differentiable=False)
    if len(set(variables(inside.outvars)) - set(inside.invars)) < len(inside.outvars):
        # Something is no equation's result.
        copies = lambda *values: list(map(jnp.copy, run(*values)))
        inside = calls_in_place(trace(copies, types, dict(axes)), differentiable=False)
    made = [*outs, *inside.outvars[len(outs) :]]
    inside = inside.between(reads, made)
    at = next(i for i, one in enumerate(program.eqns) if one is eqn)
    found = dataclasses.replace(
        program,
        constvars=[*program.constvars, *inside.constvars],
        consts=[*program.consts, *inside.consts],
        eqns=[*program.eqns[:at], *inside.eqns, *program.eqns[at + 1 :]],
    )
    return found, made
