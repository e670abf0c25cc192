"""A program whose derivatives of any order keep little: in parts, each a `jax.checkpoint`.

The two passes of a plan are for the first derivative. Differentiated once more, they would keep all that they compute, twice: in
the forward pass, and where the backward pass runs it again. So the second derivative is that of this program instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax

from memjax._core.lists import Arrays
from memjax._core.program.dataflow import Dataflow, variables
from memjax._core.program.jaxpr import calls_in_place, evaluate_in, read
from memjax._plan.derivative import without_checkpoints
from memjax._plan.solve.phases import available_anywhere, cut_points


def in_checkpoints(closed: Any, inputs: Sequence[Any]) -> Arrays:
    """The outputs of the program.

    Args:
      closed: the program.
      inputs: its constants and inputs.
    """
    program = calls_in_place(without_checkpoints(closed), differentiable=True)
    n = len(closed.consts)
    env = dict(zip([*program.constvars, *program.invars], [*inputs[:n], *program.consts[n:], *inputs[n:]], strict=True))
    free = available_anywhere(program, program.invars)
    cuts = cut_points(program, program.outvars, free)
    later = set(variables(program.outvars))
    parts: list[tuple[Sequence[Any], list[Any], list[Any]]] = []
    for start, stop in reversed(list(pairwise(cuts))):
        flow = Dataflow(program.eqns[start:stop])
        parts.append((flow.eqns, list(flow.outside), [var for var in flow.place if var in later]))
        later.update(flow.outside)
    for eqns, reads, wanted in reversed(parts):
        env |= zip(wanted, jax.checkpoint(_part(eqns, reads, wanted))(read(env, reads)), strict=True)
    return read(env, program.outvars)


def _part(eqns: Sequence[Any], reads: Sequence[Any], wanted: Sequence[Any]) -> Any:
    def run(values: Arrays) -> Arrays:
        env = dict(zip(reads, values, strict=True))
        evaluate_in(eqns, env)
        return read(env, wanted)

    return run
