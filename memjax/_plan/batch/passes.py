"""The passes of a derivative in which messages between the nodes of a graph run for some edges at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from memjax._core.lists import Arrays
from memjax._core.program.dataflow import Dataflow, is_literal, made_by, read_by
from memjax._core.program.jaxpr import Program, evaluate_in, read
from memjax._plan.batch.some_edges import with_some_edges
from memjax._plan.derivative import Derivative, Passes
from memjax._plan.result import Tiled


class PassesOfSomeEdges(Passes):
    """Those of a derivative, with its edges in tiles.

    Args:
      of: the derivative.
      platform: of the device, as JAX calls it.
      tile: how many edges run at a time; 0: as many as seem good.

    Attributes:
      tiled: what runs so; None: nothing does, and the passes are as they were.
    """

    def __init__(self, of: Derivative, platform: str, tile: int = 0):
        self.wrt, self.outs, self.outputs, self.constants = of.wrt, of.outs, of.outputs, of.constants
        self.of_blocks, self.in_use = of.of_blocks, of.in_use
        first, second = of.forward, of.backward
        both = Program(
            [*first.constvars, *second.constvars],
            [*first.consts, *second.consts],
            [*first.invars, *second.invars],
            [*of.outputs, *second.outvars],
            [*first.eqns, *second.eqns],
        )
        program, stages, found = with_some_edges(both, [0] * len(first.eqns) + [1] * len(second.eqns), platform, tile)
        self.tiled: Tiled | None = next(iter(found), None)
        forward, backward = ([e for e, stage in zip(program.eqns, stages, strict=True) if stage == n] for n in (0, 1))
        kept, outputs = read_by(backward), {one for one in of.outputs if not is_literal(one)}
        residuals = [var for var in made_by(forward) if var in kept and var not in outputs]
        values = dict(zip(program.constvars, program.consts, strict=True))
        here = [var for var in values if var in kept and var not in set(first.constvars)]
        there = [var for var in values if var not in set(here)]
        self.forward = Program(there, [values[v] for v in there], first.invars, [*of.outputs, *residuals], forward)
        self.backward = Program(here, [values[v] for v in here], second.invars, second.outvars, backward)

    def vjp(self, inputs: Sequence[Any]) -> tuple[Arrays, Any]:
        """The outputs and their pullback, with all kept that the backward pass reads."""
        env = self.forward.given(inputs)
        evaluate_in(self.forward.eqns, env)
        return read(env, self.outputs), jax.tree_util.Partial(self._pull, read(env, self._residuals))

    @property
    def _residuals(self) -> list[Any]:
        own = {*self.backward.constvars, *self.backward.invars}
        outside = Dataflow(self.backward.eqns).outside
        made = made_by(self.backward.eqns)
        given = [var for var in self.backward.outvars if not is_literal(var) and var not in made]
        return [var for var in dict.fromkeys([*outside, *given]) if var not in own]

    def _pull(self, residuals: Arrays, cotangents: Sequence[Any]) -> Arrays:
        env = self.backward.given(cotangents) | dict(zip(self._residuals, residuals, strict=True))
        evaluate_in(self.backward.eqns, env)
        return read(env, self.backward.outvars)


def with_edges_of(derivative: Derivative, platform: str, tile: int = 0) -> PassesOfSomeEdges | None:
    """The passes with edges in tiles; None where the program has none."""
    found = PassesOfSomeEdges(derivative, platform, tile)
    return None if found.tiled is None else found
