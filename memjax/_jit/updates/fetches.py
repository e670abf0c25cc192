"""State that an update in a loop reads from the memory of the host, moved while the gradient that it is updated with is computed.

XLA begins to move an array shortly before it is read: it takes the link for as fast as the memory of the device. So what is moved
is read where the computation of the gradient ends, and XLA begins to move it before that starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memjax._core.arrays import is_on_host
from memjax._core.barriers import barrier
from memjax._core.lists import Arrays
from memjax._core.program.dataflow import Dataflow, is_literal, made_by
from memjax._core.program.jaxpr import Program, as_closed, bind, calls_in_place, read
from memjax._core.program.primitives import LOOPS, TRANSFERS
from memjax._jit.updates.found import Update


class Fetches:
    """The body of a loop of a backward pass, and what moves state from the host for an update in it.

    Attributes:
      moves: the equations of the update that do, as far as they move it for a gradient.
      moved: by what they make, the arrays on the device, once the body has run.
    """

    def __init__(self, update: Update):
        flow, loop = Dataflow(update.eqns), update.loop
        self._body = calls_in_place(as_closed(loop.params["jaxpr"]), differentiable=False)
        self._with: dict[Any, list[Any]] = {}  # by what the body makes
        self.moves: list[Any] = []
        self.moved: dict[Any, Any] = {}
        for eqn in _from_host(update):
            gradient = _first_read_with(eqn, flow, update.gradients)
            made = None if gradient is None else _made_last(self._body, loop.outvars.index(gradient))
            if made is not None:
                self._with.setdefault(made, []).append(eqn)
                self.moves.append(eqn)

    def run(self, operands: Sequence[Any], states: Mapping[Any, Any]) -> Arrays:
        """What the body makes of its operands.

        Args:
          operands: those of the body.
          states: by what the equations move, slices on the host.
        """
        env = self._body.given(operands)
        for eqn in self._body.eqns:
            env |= zip(eqn.outvars, bind(eqn, read(env, eqn.invars), marked=True), strict=True)
            made = [out for out in eqn.outvars if out in self._with]
            moves = [move for out in made for move in self._with[out]]
            if made:
                moved = [bind(move, [states[move.invars[0]]])[0] for move in moves]
                waited, moved = barrier((read(env, made), moved))
                env |= zip(made, waited, strict=True)
                self.moved |= zip((move.outvars[0] for move in moves), moved, strict=True)
        return read(env, self._body.outvars)


def fetches_of(update: Update, platform: str) -> Fetches | None:
    """Those of an update; None if it has none, and on CPUs, which move nothing."""
    return Fetches(update) if platform != "cpu" and _from_host(update) else None


def _from_host(update: Update) -> list[Any]:
    """The equations that move slices of stacked state from the host."""
    moves = [eqn for eqn in update.eqns if eqn.primitive.name in TRANSFERS and eqn.invars[0] in update.reads]
    return [eqn for eqn in moves if is_on_host(eqn.invars[0].aval) and not is_on_host(eqn.outvars[0].aval)]


def _first_read_with(eqn: Any, flow: Dataflow, gradients: Sequence[Any]) -> Any | None:
    """The gradient that is first read together with what an equation moves."""
    with_it = flow.depending(eqn.outvars)
    after = [flow.depending([gradient]) for gradient in gradients]
    both = (
        g for out in made_by(flow.eqns) if out in with_it for g, of in zip(gradients, after, strict=True) if out in of
    )
    return next(both, None)


def _made_last(body: Program, number: int) -> Any | None:
    """What a turn computes an output from by more than a conversion; None if it does not compute it."""
    var = body.outvars[number]
    maker = None if is_literal(var) else body.flow.makers.get(var)
    if maker is not None and maker.primitive.name == "convert_element_type" and not is_literal(maker.invars[0]):
        before = body.flow.makers.get(maker.invars[0])
        if before is not None and before.primitive.name in LOOPS:  # other conversions are part of what computes it
            return maker.invars[0]
    return None if maker is None else var
