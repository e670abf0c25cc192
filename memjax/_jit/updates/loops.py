"""The loops of backward passes in a program, and what they stack: gradients of one layer after the other."""

from __future__ import annotations

from typing import Any

from memjax._core.compat import is_backward, name_stack, scan_counts
from memjax._core.program.jaxpr import Program


def backward_loops(program: Program) -> list[Any]:
    """The equations that are loops of a backward pass."""
    return [eqn for eqn in program.eqns if eqn.primitive.name == "scan" and is_backward(name_stack(eqn))]


def gradients_of(loop: Any) -> list[Any]:
    """What a loop stacks, a slice a turn."""
    return loop.outvars[scan_counts(loop)[1] :]
