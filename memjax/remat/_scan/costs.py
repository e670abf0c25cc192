"""What a step costs: times that plans are predicted with, measured or from a model of the step."""

from __future__ import annotations

import dataclasses

import jax

from memjax._core.check import number
from memjax._core.program.costs import flops
from memjax._core.program.jaxpr import nbytes
from memjax._core.program.primitives import expensive
from memjax.remat._scan.step import Step


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times to predict with, in seconds.

    Attributes:
      forward: one step forward.
      backward: one step backward, from its residuals.
      store: writing the residuals of one step to memory and reading them again.
      loop: starting a loop over the steps of a block.
      turn: a turn of a loop whose number of turns stands in a table, and moving its state to and from a slot.

    Raises:
      ValueError: a time that is negative or not finite.
    """

    forward: float
    backward: float
    store: float
    loop: float
    turn: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            number(field.name, getattr(self, field.name), least=0)


def model(step: Step, kept: int) -> Costs:
    """Rough times from the step's operations and its `kept` bytes of residuals: only their ratios matter."""
    eqns = step.jaxpr.eqns
    moved = sum(nbytes(var.aval) for eqn in eqns for var in (*eqn.invars, *eqn.outvars))
    total_flops = sum(map(flops, eqns))
    if jax.default_backend() == "gpu":
        heavy = sum(expensive(eqn) for eqn in eqns)
        forward = 3e-6 * (1 + heavy) + total_flops / 4e13 + moved / 2e13
        return Costs(forward, forward, store=6e-6 + 2 * kept / 3e12, loop=7e-6, turn=1.3e-5)
    forward = 3e-7 * len(eqns) + total_flops / 4e11 + moved / 6e10
    return Costs(
        forward,
        2 * forward,
        store=2 * kept / 1e10,
        loop=1e-6,
        turn=2e-6 + step.carry_nbytes / 1e10,
    )
