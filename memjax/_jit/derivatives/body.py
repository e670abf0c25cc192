"""Finds the derivatives in a traced step: the forward and backward pass of each, including those in loop, branch and shard_map
bodies. Evaluates the step with these passes run by plans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from memjax._core.arrays import is_float
from memjax._core.compat import derivatives, name_stack, parameters
from memjax._core.lists import Arrays
from memjax._core.program.costs import Device, array_bytes, kind_of
from memjax._core.program.dataflow import is_literal, made_by, read_by, variables
from memjax._core.program.jaxpr import (
    Program,
    as_closed,
    axis_sizes,
    bind,
    calls_in_place,
    counts_of_host,
    read,
    trace,
    without_dead_equations,
)
from memjax._jit.derivatives.inner import computed_again
from memjax._jit.derivatives.passes import StepPasses, levels_of, passes_of
from memjax._plan.batch.some_edges import with_some_edges
from memjax._plan.result import Tiled
from memjax._plan.run import Run
from memjax._plan.tile.passes import TileOn, kept_whole, with_tiles
from memjax._plan.tile.passes_in_chunks import with_chunks

_PARTS = frozenset(("slice", "dynamic_slice", "split", "unstack", "rev"))
_BODIES = ("scan", "cond", "while", "shard_map")
Acting = Mapping[StepPasses, Run]
"""How passes are run; those that are not there run as they are."""


class Body:
    """A program and the derivatives in it.

    Args:
      closed: the program.
      tile_on: losses and their gradients run tile by tile where they can, in tiles of that size; None: they run as they are. On a
        mesh this is so within a `jax.shard_map` that does not check what varies.
      axes: sizes of the axes of a `jax.shard_map` around it; None: it is in none.
      inner_again_on: inner derivatives recompute their residuals, by the rates of that device; None: they do not.
      microbatches: how many microbatches the program processes one after the other.
      updates_in_loops: whether updates were moved into loops of backward passes.
      two_passes: whether the program takes a derivative twice for that.

    Attributes:
      passes: the passes of each derivative, in order.
      tile_on, microbatches, updates_in_loops, two_passes: as given.
      tiled: the computations that run tile by tile, in bodies as well.
      inner: by index of an equation, its bodies if they contain derivatives.
      inner_again: whether any inner derivative recomputes its residuals.
    """

    def __init__(
        self,
        closed: Any,
        tile_on: TileOn | None = None,
        axes: dict[str, int] | None = None,
        inner_again_on: Device | None = None,
        microbatches: int = 1,
        updates_in_loops: bool = False,
        two_passes: bool = False,
    ):
        program = calls_in_place(closed, differentiable=False)
        self._axes = axes
        self.tile_on, self.tiled, self.microbatches = tile_on, list[Tiled](), microbatches
        self.updates_in_loops, self.two_passes = updates_in_loops, two_passes
        if tile_on is not None and (axes is not None or not tile_on.on_mesh):
            program = without_dead_equations(program)
            if tile_on.chunks:
                program = self._with_chunks(program, tile_on)
            else:
                program, self.tiled = with_tiles(program, tile_on, axes or {})
        if tile_on is not None and axes is None and not (tile_on.on_mesh or tile_on.chunks):
            program = self._with_some_edges(without_dead_equations(program), tile_on)
        losses = _unread_losses(program)
        reached = dataclasses.replace(program, outvars=[*program.outvars, *losses])
        self._program = dataclasses.replace(without_dead_equations(reached), outvars=program.outvars)
        eqns = self._program.eqns
        marks = [derivatives(name_stack(eqn)) for eqn in eqns]
        self._stages, self._of_stage = passes_of(self._program.flow, marks, reached.outvars, axes or {})
        self.passes = list(self._of_stage.values())
        self.inner_again = False
        self.in_use: Set[int] = frozenset()
        if inner_again_on is not None:
            for one in self.passes:
                self.inner_again |= computed_again(one, inner_again_on)
        self.inner: dict[int, list[Body]] = {}
        for i, eqn in enumerate(eqns):
            if eqn.primitive.name in _BODIES and not derivatives(name_stack(eqn)):
                inside = axes if eqn.primitive.name != "shard_map" else (axes or {}) | _manual_axes(eqn)
                bodies = [Body(one, tile_on, inside, inner_again_on) for one in _closed_bodies(eqn)]
                if any(body.has_passes for body in bodies):
                    self.inner[i] = bodies
                    self.tiled += [what for body in bodies for what in body.tiled]
                    self.inner_again |= any(body.inner_again for body in bodies)

    def _with_chunks(self, program: Program, on: TileOn) -> Program:
        """The program in which loops over time run in chunks."""
        levels = levels_of(program.flow, [derivatives(name_stack(eqn)) for eqn in program.eqns])
        program, self.tiled = with_chunks(program, levels, on.chunks, on.platform, self._axes or {})
        return program

    def _with_some_edges(self, program: Program, on: TileOn) -> Program:
        """The program in which messages between nodes run for some edges at a time."""
        levels = levels_of(program.flow, [derivatives(name_stack(eqn)) for eqn in program.eqns])
        program, _, found = with_some_edges(program, levels, on.platform)
        self.tiled += found
        return program

    @property
    def is_changed(self) -> bool:
        """Whether the program differs from the step's even if no pass is changed."""
        return bool(self.tiled) or self.microbatches > 1 or self.updates_in_loops

    @property
    def has_passes(self) -> bool:
        return bool(self.passes or self.inner)

    def every(self) -> Iterator[StepPasses]:
        """Yields all passes, those of bodies included."""
        yield from self.passes
        for bodies in self.inner.values():
            for body in bodies:
                yield from body.every()

    def kept_whole(self, on: TileOn) -> list[str]:
        """Why logits are whole in a program without tiles, as sentences: see `memjax._plan.tile.passes.kept_whole`."""
        if self._axes is not None or not on.on_mesh:
            found = kept_whole(self._program, on, self._axes or {})
        elif with_tiles(self._program, on, {})[1]:
            found = ["arrays lie on several devices: a loss within a jax.shard_map with check_vma=False has tiles"]
        else:
            found = []
        inner = [body for bodies in self.inner.values() for body in bodies]
        return found + [text for body in inner for text in body.kept_whole(on)]

    def put_in_use(self, numbers: Set[int]) -> None:
        """Note that the memory of the results with these indices holds other values until they are computed."""
        in_use = set(variables(self._program.outvars[i] for i in numbers))
        self.in_use = numbers
        for one in self.passes:
            one.in_use = in_use
        for i, bodies in self.inner.items():
            eqn = self._program.eqns[i]
            is_loop = eqn.primitive.name in ("scan", "while")
            of_body = {k for k, out in enumerate(eqn.outvars) if is_loop or out in in_use}
            for body in bodies:
                body.put_in_use(of_body)

    def note_around(self, results: Set[int] | None = None, nbytes: int = 0) -> None:
        """Note for all passes how many bytes lie beside them while they run, but for arguments and results of the step.

        These are what the loops, branches and `jax.shard_map`s around them return, as gradients and sums of them; and what the
        derivatives before them have made for them or for later ones, as parameters between two updates.

        Args:
          results: the indices of the program's results that are results of the step; None: all are.
          nbytes: of what is returned around the program and is none.
        """
        outs = self._program.outvars
        of_step = set(variables(outs if results is None else (outs[i] for i in results)))
        for stage, one in self._of_stage.items():
            one.around = nbytes + sum(map(array_bytes, self._made_before(stage) - of_step))
        for i, bodies in self.inner.items():
            eqn = self._program.eqns[i]
            of_body = {k for k, out in enumerate(eqn.outvars) if out in of_step}
            for body in bodies:
                # In a `jax.shard_map` types are those of a device's part; of a loop the stacks are there as a whole.
                made = body._program.outvars if eqn.primitive.name == "shard_map" else eqn.outvars
                own = sum(array_bytes(out) for k, out in enumerate(made) if k not in of_body)
                body.note_around(of_body, max(nbytes, own))  # the one is made of the other

    def _made_before(self, stage: int) -> set[Any]:
        """The values that stages before make for this one or for later ones; parts of inputs are made when they are needed."""
        eqns, flow = self._program.eqns, self._program.flow
        parts = flow.following((*self._program.invars, *self._program.constvars), _is_part)
        of = lambda stages: [eqns[i] for numbers in stages for i in numbers]
        read = {flow.names.get(var, var) for var in read_by(of(self._stages[stage:]))}
        return (read & made_by(of(self._stages[:stage])).keys()) - parts

    def program_with(self, acting: Acting) -> Program:
        """The program as it runs with these passes run otherwise, calls in place, without what its outputs do not need."""
        if not acting and not any(body.tiled for bodies in self.inner.values() for body in bodies):
            return without_dead_equations(self._program)
        types = [var.aval for var in self._program.invars]
        closed = trace(lambda *given: self.evaluate(given, acting), types, self._axes or {})
        return without_dead_equations(calls_in_place(closed, differentiable=False))

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
            if eqn.primitive.name == "scan":
                values = self._counted(eqn, values)
            bodies = self.inner.get(i)
            if bodies is None or not any(body.tiled or any(one in acting for one in body.every()) for body in bodies):
                outs = bind(eqn, values)
            else:
                outs = _bind_with(eqn, values, [self._evaluating(body, acting) for body in bodies])
            env |= zip(eqn.outvars, outs, strict=True)

    def _counted(self, loop: Any, values: Arrays) -> Arrays:
        """The operands of a loop, those constant that number its turns and by which it reads or writes slices on the host."""
        made, counts = self._program.flow.makers, counts_of_host(loop)
        is_count = lambda i, atom: (
            i in counts and not is_literal(atom) and atom in made and made[atom].primitive.name == "iota"
        )
        number = lambda value: np.arange(value.shape[0], dtype=value.dtype)
        return [number(v) if is_count(i, a) else v for i, (a, v) in enumerate(zip(loop.invars, values, strict=True))]

    def _evaluating(self, body: Body, acting: Acting) -> Callable[..., Arrays]:
        return lambda *inputs: body.evaluate(inputs, acting)


def _is_part(eqn: Any) -> bool:
    """Whether what an equation makes is part of its operand, or costs nothing."""
    return eqn.primitive.name in _PARTS or kind_of(eqn.primitive.name).is_free


def _unread_losses(program: Program) -> list[Any]:
    """The losses of forward passes that nothing reads, as only the gradient is used: a program is cut by what they depend on."""
    read_at_all = {*program.flow.read, *variables(program.outvars)}
    made = made_by(eqn for eqn in program.eqns if derivatives(name_stack(eqn))[:1] == ["jvp"])
    return [var for var in made if var not in read_at_all and is_float(var.aval) and var.aval.ndim <= 1]


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
    """Runs the equation with its bodies replaced by functions of the same types; returns its outputs."""
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
