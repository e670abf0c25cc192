"""A traced step as the derivatives in it: where their two passes are, in loops and branches as well.

JAX marks what a derivative makes in name stacks: "jvp" the forward pass, "transpose" the backward pass. What depends on a
backward pass comes after it: the update of parameters belongs to it, and the forward pass of another gradient begins anew.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from memjax._core.arrays import is_float
from memjax._core.compat import derivatives, is_ordered, name_stack, parameters
from memjax._core.lists import Arrays
from memjax._core.program.dataflow import Dataflow, made_by, read_by, variables
from memjax._core.program.jaxpr import Program, as_closed, axis_sizes, bind, calls_in_place, read, trace
from memjax._core.program.primitives import expensive
from memjax._plan.derivative import Passes, without_dead_equations
from memjax._plan.result import Tiled
from memjax._plan.run import Run
from memjax._plan.tile.passes import TileOn, with_tiles

_BODIES = ("scan", "cond", "while", "shard_map")
Acting = Mapping["StepPasses", Run]
"""How passes are run; those that are not there run as they are."""


class StepPasses(Passes):
    """The two passes of a derivative in a program, and what follows from the second.

    Args:
      forward, backward: their equations.
      others: what is read elsewhere: variables.
      manual: the axes of the `jax.shard_map`s around them.
    """

    def __init__(self, forward: Sequence[Any], backward: Sequence[Any], others: set[Any], manual: Collection[str] = ()):
        self.manual = frozenset(manual)
        made, late, kept = made_by(forward), made_by(backward), read_by(backward)
        inputs = list(Dataflow([*forward, *backward]).outside)
        self.outputs = [var for var in made if var in others]
        if (last := _last_of(forward, self.outputs)) is not None:
            self.outputs.append(last)
        residuals = [var for var in made if var in kept and var not in others]
        self.forward = Program([], [], inputs, [*self.outputs, *residuals], list(forward))
        self.backward = Program([], [], [], [var for var in late if var in others], list(backward))
        self.wrt = tuple(is_float(var.aval) for var in inputs)
        self.outs = (False,) * len(self.outputs)


class Body:
    """A program and the derivatives in it.

    Args:
      closed: the program.
      tile_on: losses and their gradients run tile by tile where they can, in tiles of that size; None: they run as they are. On a
        mesh this is so within a `jax.shard_map` that does not check what varies.
      axes: sizes of the axes of a `jax.shard_map` around it; None: it is in none.

    Attributes:
      passes: of the derivatives, in order.
      tile_on: as given.
      tiled: what runs tile by tile, that in bodies included.
      inner: by number of an equation, the bodies that have derivatives in them.
    """

    def __init__(self, closed: Any, tile_on: TileOn | None = None, axes: dict[str, int] | None = None):
        program = calls_in_place(closed, differentiable=False)
        self.tile_on, self.tiled = tile_on, list[Tiled]()
        if tile_on is not None and (axes is not None or not tile_on.on_mesh):
            program, self.tiled = with_tiles(without_dead_equations(program), tile_on, axes or {})
        losses = _unread_losses(program)
        reached = dataclasses.replace(program, outvars=[*program.outvars, *losses])
        self._program = dataclasses.replace(without_dead_equations(reached), outvars=program.outvars)
        eqns = self._program.eqns
        levels = _levels(self._program.flow)
        self._stages = [
            [i for i, level in enumerate(levels) if level // 2 == stage]
            for stage in range(max(levels, default=0) // 2 + 1)
        ]
        self._of_stage: dict[int, StepPasses] = {}
        for stage, numbers in enumerate(self._stages):
            first, second = ([eqns[i] for i in numbers if levels[i] % 2 == part] for part in (0, 1))
            if first and second:
                elsewhere = [eqns[i] for other in self._stages[stage + 1 :] for i in other]
                others = {*read_by(elsewhere), *variables(reached.outvars)}
                self._of_stage[stage] = StepPasses(first, second, others, axes or ())
        self.passes = list(self._of_stage.values())
        self.inner: dict[int, list[Body]] = {}
        for i, eqn in enumerate(eqns):
            if eqn.primitive.name in _BODIES and not derivatives(name_stack(eqn)):
                inside = axes if eqn.primitive.name != "shard_map" else (axes or {}) | _manual_axes(eqn)
                bodies = [Body(one, tile_on, inside) for one in _closed_bodies(eqn)]
                if any(body.has_passes for body in bodies):
                    self.inner[i] = bodies
                    self.tiled += [what for body in bodies for what in body.tiled]

    @property
    def has_passes(self) -> bool:
        return bool(self.passes or self.inner)

    def every(self) -> Iterator[StepPasses]:
        """All passes, those of bodies included."""
        yield from self.passes
        for bodies in self.inner.values():
            for body in bodies:
                yield from body.every()

    def evaluate(self, inputs: Sequence[Any], acting: Acting) -> Arrays:
        """The outputs of the program for values of its inputs."""
        program = self._program
        env = program.given(inputs)
        if not any(one in acting for one in self.passes):
            self._run(range(len(program.eqns)), env, acting)
        else:
            for stage, numbers in enumerate(self._stages):
                one = self._of_stage.get(stage)
                if one is None or one not in acting:
                    self._run(numbers, env, acting)
                    continue
                given = read(env, one.forward.invars)
                outs, kept = acting[one].forward(given)
                env |= zip(one.outputs, outs, strict=True)
                env |= zip(one.backward.outvars, acting[one].backward(given, kept, []), strict=True)
        return read(env, program.outvars)

    def _run(self, numbers: Sequence[int], env: dict[Any, Any], acting: Acting) -> None:
        for i in numbers:
            eqn = self._program.eqns[i]
            values = read(env, eqn.invars)
            bodies = self.inner.get(i)
            if bodies is None or not any(body.tiled or any(one in acting for one in body.every()) for body in bodies):
                outs = bind(eqn, values)
            else:
                outs = _bind_with(eqn, values, [self._evaluating(body, acting) for body in bodies])
            env |= zip(eqn.outvars, outs, strict=True)

    def _evaluating(self, body: Body, acting: Acting) -> Callable[..., Arrays]:
        return lambda *inputs: body.evaluate(inputs, acting)


def _unread_losses(program: Program) -> list[Any]:
    """What forward passes make last, where only the gradient is asked for: programs are cut by what leads there."""
    read_at_all = {*program.flow.read, *variables(program.outvars)}
    made = made_by(eqn for eqn in program.eqns if derivatives(name_stack(eqn))[:1] == ["jvp"])
    return [var for var in made if var not in read_at_all and is_float(var.aval) and var.aval.ndim <= 1]


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


def _levels(flow: Dataflow) -> list[int]:
    """By equation: 0 in the first forward pass, 1 in the first backward pass and after it, 2 in the next forward pass, and so on.

    An order by levels is one in which every equation comes after those that it depends on.
    """
    marks = [derivatives(name_stack(eqn)) for eqn in flow.eqns]
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


def _closed_bodies(eqn: Any) -> list[Any]:
    """The bodies of an equation that `_bind_with` can replace."""
    params = parameters(eqn)
    if eqn.primitive.name == "cond":
        return list(params["branches"])
    return [as_closed(params["body_jaxpr" if eqn.primitive.name == "while" else "jaxpr"])]


def _manual_axes(eqn: Any) -> dict[str, int]:
    """The axes that a `jax.shard_map` makes manual, with their sizes."""
    params = parameters(eqn)
    return {name: params["mesh"].shape[name] for name in params["newly_manual_axes"]}


def _bind_with(eqn: Any, values: Sequence[Any], fs: Sequence[Callable[..., Arrays]]) -> Arrays:
    """The results of the equation with other bodies, which are functions of the same types."""
    params = parameters(eqn)
    if eqn.primitive.name == "shard_map":
        specs = {name: params[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
        [f] = fs
        of_tuple = lambda *local: tuple(f(*local))
        return list(jax.shard_map(of_tuple, axis_names=set(params["newly_manual_axes"]), **specs)(*values))
    old = _closed_bodies(eqn)
    new = [trace(f, one.in_avals, axis_sizes(one.jaxpr)) for f, one in zip(fs, old, strict=True)]
    if eqn.primitive.name == "cond":
        changed: dict[str, Any] = {"branches": tuple(new)}
    else:
        changed = {"body_jaxpr" if eqn.primitive.name == "while" else "jaxpr": new[0]}
    return bind(eqn.replace(params=eqn.params | changed), values)
