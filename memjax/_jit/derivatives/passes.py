"""The two passes of each derivative in a program, told by the marks that derivatives leave and by dependence.

JAX marks what a derivative makes in name stacks: "jvp" the forward pass, "transpose" the backward pass. What depends on a
backward pass comes after it: the update of parameters belongs to it, and the forward pass of another gradient begins anew.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from memjax._core.arrays import is_float
from memjax._core.compat import is_ordered
from memjax._core.program.dataflow import Dataflow, made_by, read_by, variables
from memjax._core.program.jaxpr import Program
from memjax._core.program.primitives import expensive
from memjax._plan.derivative import Passes
from memjax._plan.solve.concatenations import late_concatenations


class StepPasses(Passes):
    """The two passes of a derivative in a program, and what follows from the second.

    Args:
      forward, backward: their equations.
      others: what is read elsewhere: variables.
      axes: sizes of the axes of the `jax.shard_map`s around them.
    """

    def __init__(self, forward: Sequence[Any], backward: Sequence[Any], others: set[Any], axes: Mapping[str, int]):
        self.axes = axes
        inputs = list(Dataflow([*forward, *backward]).outside)
        self.outputs = [var for var in made_by(forward) if var in others]
        if (last := _last_of(forward, self.outputs)) is not None:
            self.outputs.append(last)
        self._set(inputs, forward, backward, [var for var in made_by(backward) if var in others])
        self.wrt = tuple(is_float(var.aval) for var in inputs)
        self.outs = (False,) * len(self.outputs)

    def replace_equations(self, forward: Sequence[Any], backward: Sequence[Any]) -> None:
        """Other equations that make the same of the same inputs."""
        self._set(self.forward.invars, forward, backward, self.backward.outvars)

    def _set(self, inputs: list[Any], forward: Sequence[Any], backward: Sequence[Any], results: list[Any]) -> None:
        kept, outputs = read_by(backward), set(self.outputs)
        residuals = [var for var in made_by(forward) if var in kept and var not in outputs]
        self.forward = late_concatenations(Program([], [], inputs, [*self.outputs, *residuals], list(forward)))
        self.backward = Program([], [], [], results, list(backward))


def _last_of(forward: Sequence[Any], outputs: Sequence[Any]) -> Any | None:
    """What a forward pass makes last, where few of its products lead to its outputs; or None.

    So it is for a `jax.vjp` of which only the pullback is used, and where a loss goes tile by tile: programs are cut by what
    leads to outputs. It is the last of the variables to which most products lead.
    """
    leading: dict[Any, int] = {}  # a bit for each product
    heavy = 0
    for eqn in forward:
        bits = functools.reduce(operator.or_, (leading.get(var, 0) for var in variables(eqn.invars)), 0)
        if expensive(eqn):
            bits |= 1 << heavy
            heavy += 1
        leading |= dict.fromkeys(eqn.outvars, bits)
    to_outputs = functools.reduce(operator.or_, (leading[out] for out in outputs), 0)
    if 2 * to_outputs.bit_count() >= heavy:
        return None
    last = (out for out in made_by(reversed(forward)) if is_float(out.aval))
    return max(last, key=lambda out: leading[out].bit_count(), default=None)


def passes_of(
    flow: Dataflow, marks: Sequence[Sequence[str]], outvars: Sequence[Any], axes: Mapping[str, int]
) -> tuple[list[list[int]], dict[int, StepPasses]]:
    """The stages of a program, each a forward pass and what comes after it, as numbers of equations; and which have both passes.

    Args:
      flow: the program.
      marks: by equation those of derivatives, the outermost first.
      outvars: what it is run for.
      axes: sizes of the axes of the `jax.shard_map`s around it.
    """
    eqns, levels = flow.eqns, levels_of(flow, marks)
    count = max(levels, default=0) // 2 + 1
    stages = [[i for i, level in enumerate(levels) if level // 2 == stage] for stage in range(count)]
    found: dict[int, StepPasses] = {}
    for stage, numbers in enumerate(stages):
        first, second = ([eqns[i] for i in numbers if levels[i] % 2 == part] for part in (0, 1))
        if first and second:
            elsewhere = [eqns[i] for other in stages[stage + 1 :] for i in other]
            found[stage] = StepPasses(first, second, {*read_by(elsewhere), *variables(outvars)}, axes)
    return stages, found


def levels_of(flow: Dataflow, marks: Sequence[Sequence[str]]) -> list[int]:
    """By equation: 0 in the first forward pass, 1 in the first backward pass and after it, 2 in the next forward pass, and so on.

    An order by levels is one in which every equation comes after those that it depends on.
    """
    # Within a derivative in forward mode all is marked "jvp" once more, and the passes are told by the marks inside of these.
    while marks and any("transpose" in mark for mark in marks) and not any(mark[:1] == ["transpose"] for mark in marks):
        marks = [mark[1:] for mark in marks]
    level_of: dict[Any, int] = {}
    levels, ordered = [], 0
    for eqn, reads, mark in zip(flow.eqns, flow.reads, marks, strict=True):
        level = max((level_of.get(var, 0) for var in reads), default=0)
        if is_ordered(eqn):  # callbacks stay in their order
            level = max(level, ordered)
        if mark[:1] == ["transpose"]:
            level += 1 - level % 2
        elif mark[:1] == ["jvp"]:
            level += level % 2
        levels.append(level)
        if is_ordered(eqn):
            ordered = level
        level_of.update(dict.fromkeys(eqn.outvars, level))
    return _put_off(flow, marks, levels)


def _put_off(flow: Dataflow, marks: Sequence[Sequence[str]], levels: Sequence[int]) -> list[int]:
    """The levels, each equation being put off until it is read: decayed weights to the update, a mask to the pass that uses it.

    An equation of a forward pass stays in one, that of the gradient which reads it first.
    """
    found = list(levels)
    first: dict[Any, int] = {}  # of the levels that read a variable
    for i, eqn in reversed(list(enumerate(flow.eqns))):
        reading = [first[out] for out in eqn.outvars if out in first]
        if marks[i][:1] != ["transpose"] and not eqn.effects and reading:
            level = min(reading)
            found[i] = max(found[i], level - level % 2 if marks[i] else level)
        for var in flow.reads[i]:
            first[var] = min(first.get(var, found[i]), found[i])
    return found
