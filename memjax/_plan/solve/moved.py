"""What a loop keeps moved to the memory of the host and back, turn by turn, beside what it computes.

The copies of a turn end with it. Forwards an array starts when it is made, backwards all start with the turn, one after the
other, and what reads an array waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from memjax._core.program import costs
from memjax._core.program.costs import array_bytes
from memjax._core.program.jaxpr import variables
from memjax._core.program.working import needed_for
from memjax._plan.solve.order import in_time
from memjax._plan.solve.segment import Option, Segment


def with_moves(body: Segment, found: Sequence[Option], rates: costs.Device) -> list[Option]:
    """The options for the body of a loop, and those in which the largest of what they keep lies on the host.

    Of these none takes more bytes, working memory and seconds than another.
    """
    seconds = _Seconds(body, rates)
    every = []
    for option in found:
        largest = sorted(filter(lambda var: _is_worth_a_copy(var, rates), option.kept), key=array_bytes, reverse=True)
        for count in range(1, len(largest) + 1):
            moved = largest[:count]
            every.append(
                option._replace(
                    kept=tuple(var for var in option.kept if var not in moved),
                    moved=tuple(moved),
                    nbytes=option.nbytes - sum(map(array_bytes, moved)),
                    seconds=option.seconds + seconds.waiting(option, moved),
                )
            )
    best: list[Option] = []
    for option in sorted([*found, *every], key=lambda option: (option.nbytes, option.seconds, option.working)):
        if not any(one.seconds <= option.seconds and one.working <= option.working for one in best):
            best.append(option)
    return best


def _is_worth_a_copy(var: Any, rates: costs.Device) -> bool:
    is_key = jnp.issubdtype(var.aval.dtype, jax.dtypes.extended)
    return not is_key and array_bytes(var) > rates.start * rates.link


class _Seconds:
    """How long the turns of a loop wait for copies.

    Args:
      body: of the loop.
      rates: of the device.
    """

    def __init__(self, body: Segment, rates: costs.Device):
        self._body, self._link = body, rates.link
        written = costs.stored([*body.eqns, *body.backward], [*body.lost, *body.leaving], rates.platform)
        eqns = [*body.eqns, *body.backward]
        self._of = {id(eqn): costs.seconds(eqn, rates, written.__contains__) for eqn in eqns}

    def waiting(self, option: Option, moved: Sequence[Any]) -> float:
        """The seconds of a turn in the forward pass and one in the backward pass together."""
        kept = {*option.kept, *option.coded}  # what is moved among them
        return self._forward(kept, moved) + self._backward(kept, moved)

    def _forward(self, kept: set[Any], moved: Sequence[Any]) -> float:
        chosen = {id(eqn) for eqn in (*self._body.primal, *needed_for(self._body.eqns, kept, set()))}
        clock = link = 0.0
        link += self._copy(var for var in moved if var in self._body.lost)
        for eqn in self._body.eqns:
            if id(eqn) in chosen:
                clock += self._of[id(eqn)]
                if leaving := self._copy(out for out in eqn.outvars if out in moved):
                    link = max(link, clock) + leaving
        return max(link - clock, 0.0)

    def _backward(self, kept: set[Any], moved: Sequence[Any]) -> float:
        outside = set().union(*(variables(eqn.invars) for eqn in self._body.eqns)) - set(self._body.lost)
        outside -= {out for eqn in self._body.eqns for out in eqn.outvars}
        rerun = needed_for(self._body.eqns, self._body.wanted, kept | outside)
        clock = link = busy = 0.0
        arrives: dict[Any, float] = {}
        for eqn in in_time(rerun, self._body.backward):
            for var in variables(eqn.invars):
                if var in moved:
                    if var not in arrives:
                        link += self._copy([var])
                        arrives[var] = link
                    clock = max(clock, arrives[var])
            clock += self._of[id(eqn)]
            busy += self._of[id(eqn)]
        return clock - busy

    def _copy(self, arrays: Iterable[Any]) -> float:
        return sum(map(array_bytes, arrays)) / self._link
