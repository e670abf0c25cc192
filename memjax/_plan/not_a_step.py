"""Training steps are refused: a plan is for what is differentiated, and a step has been.

A loss that computes gradients on its way (a gradient penalty, forces) is none: it is differentiated once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from memjax._core import check
from memjax._core.program.dataflow import is_literal
from memjax._core.program.gradients_inside import origins
from memjax._plan.flat import Traced

_MANY = 2  # arrays that are the gradients of a whole argument: a force is one


def step_message(f: Callable[..., Any], program: Traced, wrt: Sequence[bool], *, is_guess: bool = False) -> str:
    """What to say where `f` computes the gradients itself that it would be differentiated for; "" where it does not.

    Args:
      f: the function.
      program: it, traced.
      wrt: which of the program's constants and inputs are differentiated.
      is_guess: others may be differentiated.
    """
    jaxpr = program.closed.jaxpr
    types, wrt = [var.aval.str_short() for var in jaxpr.invars], wrt[len(program.closed.consts) :]
    wanted = [kind for kind, flag in zip(types, wrt, strict=True) if flag]
    theirs, inputs = set(types if is_guess else wanted), set(jaxpr.invars)
    made: list[str] = []  # by gradients, of the type of what is differentiated
    is_loss = updates = False
    for one, atom, loss in zip(origins(jaxpr), jaxpr.outvars, program.has_cotangent, strict=True):
        if not is_literal(atom) and atom in inputs:
            continue
        is_loss |= loss and not one.of_gradients and sum(program.has_cotangent) == 1
        if one.of_gradients and (kind := atom.aval.str_short()) in theirs:
            made.append(kind)
            updates |= any(types[i] == kind for i in one.inputs)
    gradients = len(wanted) >= _MANY and all(wanted.count(kind) <= made.count(kind) for kind in wanted)
    if not (updates or gradients or (is_loss and made)):
        return ""
    return str(
        check.fail(
            ValueError,
            "f",
            "a loss, which is differentiated from outside",
            f,
            "it computes gradients itself, as a training step does, and a plan would change nothing of these. Pass the loss, and "
            "have the step differentiate what memjax.planned(loss, ...) returns",
        )
    )
