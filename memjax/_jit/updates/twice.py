"""A step that takes its derivative twice: first for numbers that its updates need of all gradients, such as their norm.

The second time these numbers are there before the backward pass begins, so that its loop can update weights. The compiler must
not make one of the two: what the second reads waits for the numbers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jax.extend import core

from memjax._core.barriers import joint_barrier
from memjax._core.positions.walk import shape_of
from memjax._core.program.dataflow import made_by, read_by, renamed
from memjax._core.program.jaxpr import Program, trace, without_dead_equations
from memjax._jit.updates.loops import backward_loops, gradients_of


def twice(program: Program, donated: Collection[Any]) -> Program | None:
    """The program that takes its derivative twice; None where its updates need no number of all gradients, or it cannot.

    Args:
      program: straight lines of equations.
      donated: those of its inputs whose memory is that of a result. They do not wait, as loops write them where they are.
    """
    numbers = _numbers(program)
    first = program.flow.needed(numbers)
    inputs = [var for var in program.invars if var not in donated and var in read_by(first)]
    if not numbers or not inputs or any(eqn.effects for eqn in first):
        return None
    copies = {var: core.Var(var.aval) for var in made_by(first)}
    copied = [eqn.replace(invars=renamed(eqn.invars, copies), outvars=renamed(eqn.outvars, copies)) for eqn in first]
    waiting = [*inputs, *(copies[var] for var in numbers)]
    [wait] = trace(lambda *values: joint_barrier(list(values)), [var.aval for var in waiting], {}).jaxpr.eqns
    second = dict(zip([*inputs, *numbers], [core.Var(var.aval) for var in waiting], strict=True))
    eqns = [*copied, wait.replace(invars=waiting, outvars=[*second.values()])]
    eqns += [eqn.replace(invars=renamed(eqn.invars, second)) for eqn in program.eqns]
    outs = renamed(program.outvars, {var: second[var] for var in numbers})
    return without_dead_equations(Program(program.constvars, program.consts, program.invars, outs, eqns))


def _numbers(program: Program) -> list[Any]:
    """Scalars that depend on stacked gradients, and that arrays are made of."""
    stacked = [var for loop in backward_loops(program) for var in gradients_of(loop)]
    after = program.flow.depending(stacked)
    reading = [eqn for eqn in program.eqns if any(map(shape_of, eqn.outvars))]
    return [var for var in read_by(reading) if var in after and not shape_of(var)]
