"""The shapes that the arrays of a step have on a device of a mesh, as the compiler splits them.

JAX hands shardings of arguments, results and constraints to XLA, whose partitioner (Shardy) derives all others. It runs here on
the step with a mark behind each equation, which takes no longer than lowering the step: nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax

from memjax._core.barriers import barrier
from memjax._core.compat.partitioner import split_marked
from memjax._core.meshes import device_of, mesh_of
from memjax._core.program import costs
from memjax._core.program.dataflow import is_literal
from memjax._core.program.jaxpr import after_equations
from memjax._jit.derivatives.body import Acting, Body
from memjax._jit.derivatives.passes import StepPasses
from memjax._plan.memory.layout import Layout
from memjax._plan.run import Run
from memjax._plan.solve.chain import Chain, Choice
from memjax._plan.solve.loops import carried, turn_of
from memjax._plan.solve.phases import available_anywhere
from memjax._plan.solve.segment import BackwardTurn, Option

Lower = Callable[[Body, Acting], Any]
"""Lowers the step with these passes run otherwise than they are."""
_MARK = "memjax_mark_"


def with_shapes(layout: Layout, body: Body, lower: Lower) -> Layout:
    """The layout with the shapes of a device's parts of the variables in the passes of a step, and in their loops.

    Args:
      layout: of the step's inputs.
      body: the step.
      lower: lowers it.
    """
    mesh, passes = mesh_of(layout.shardings), [one for one in body.every() if not one.axes]
    if mesh is None or layout.devices == 1 or not passes:
        return layout
    marked: list[list[Any]] = []

    def mark(every: Sequence[Any], values: list[Any]) -> list[Any]:
        arrays = [i for i, var in enumerate(every) if _is_array(var.aval)]
        if arrays:
            with jax.named_scope(f"{_MARK}{len(marked)}"):
                passed = barrier([values[i] for i in arrays])
            marked.append([every[i] for i in arrays])
            for i, value in zip(arrays, passed, strict=True):
                values[i] = value
        return values

    with after_equations(mark):
        lowered = lower(body, {one: _keeping_all(one, layout) for one in passes})
    found: dict[Any, tuple[int, ...]] = {}
    for number, parts in split_marked(lowered, _MARK, dict(mesh.shape)):
        for var, counts in zip(marked[number], parts, strict=True):
            found.setdefault(var, tuple(-(-n // count) for n, count in zip(var.aval.shape, counts, strict=True)))
    for pair in (pair for one in passes for pair in one.loops):
        for eqn, program in ((pair.forward, pair.program), (pair.backward, pair.pull)):
            start, stop = carried(eqn)
            ends = zip(program.invars[start:stop], program.outvars, strict=False)
            found |= {var: found[out] for var, out in ends if not is_literal(out) and out in found}
    return layout._replace(shapes=found) if found else layout


def _keeping_all(passes: StepPasses, layout: Layout) -> Run:
    """The passes by a plan that keeps all that is read again: loops run by plans, of which shardings differ from others'."""
    chain = Chain(passes, costs.device(device_of(layout.shardings)), solved=False)
    keep = lambda turn: Option(tuple(turn.wanted), 0, 0.0, 0)

    def option(number: int) -> Option:
        if (pair := chain.loops.get(chain.cuts[number])) is None:
            return keep(BackwardTurn(chain.segment(number, number + 1), chain.rates, chain.free))
        free = available_anywhere(pair.program, pair.free)
        inside = keep(BackwardTurn(turn_of(pair, free), chain.rates, free, is_loop=True))
        return Option((), 0, 0.0, 0, ((pair.forward.params["length"], inside),))

    choices = [Choice(*ends, option(number)) for number, ends in enumerate(pairwise(chain.cuts))]
    return Run(chain, choices, gathers_again=True)


def _is_array(aval: Any) -> bool:
    return bool(getattr(aval, "shape", ())) and not jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended)
