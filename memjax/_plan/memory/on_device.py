"""A device's part of a derivative on a mesh: the same equations of arrays as large as on a device. Bytes and seconds are those
of a device then. It is never run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from memjax._core.compat import explicit_sharding
from memjax._core.program.costs import SUMMED
from memjax._core.program.dataflow import is_literal
from memjax._core.program.jaxpr import Program
from memjax._plan.derivative import LoopPair, Passes
from memjax._plan.early.inside import loops_of
from memjax._plan.memory.layout import Layout


def on_device(passes: Passes, layout: Layout) -> Passes:
    """A device's part of the passes, with the pairs of loops in them.

    Args:
      passes: of the whole program.
      layout: of its inputs, with the shapes that arrays have on a device.
    """
    part = _Part(layout)
    whole_loops = loops_of(passes)
    loops = [*map(part.pair, whole_loops)]
    instead = {
        id(getattr(whole, name)): getattr(one, name)
        for whole, one in zip(whole_loops, loops, strict=True)
        for name in ("forward", "backward")
    }
    found = passes.with_loops(part.program(passes.forward, instead), part.program(passes.backward, instead), loops)
    found.outputs, found.in_use = part.atoms(passes.outputs), set(part.atoms(passes.in_use))
    found.around = layout.local(passes.around)
    return found


def split_evenly(shape: Sequence[int], devices: int) -> tuple[int, ...]:
    """The shape of a device's part, of an array of which it is not known how it is split: along the first dimensions that do."""
    found = []
    for size in shape:
        count = math.gcd(size, devices)
        found.append(size // count)
        devices //= count
    return tuple(found)


class _Part:
    """What a device has of variables and equations. Of a variable of the program there is one here."""

    def __init__(self, layout: Layout):
        self._shapes: Mapping[Any, tuple[int, ...]] = layout.shapes or {}
        self._devices, self._names = layout.devices, dict[Any, Any]()

    def atom(self, atom: Any) -> Any:
        if is_literal(atom) or not getattr(atom.aval, "shape", ()):
            return atom
        if atom not in self._names:
            self._names[atom] = core.Var(atom.aval.update(shape=self._shape(atom), sharding=None))
        return self._names[atom]

    def _shape(self, var: Any) -> tuple[int, ...]:
        if var in self._shapes:
            return self._shapes[var]
        told = explicit_sharding(var.aval)
        return split_evenly(var.aval.shape, self._devices) if told is None else told.shard_shape(var.aval.shape)

    def atoms(self, atoms: Any) -> list[Any]:
        return [self.atom(atom) for atom in atoms]

    def program(self, program: Program, instead: Mapping[int, Any]) -> Program:
        eqns = [instead.get(id(eqn)) or self._eqn(eqn) for eqn in program.eqns]
        return Program(self.atoms(program.constvars), program.consts, *self._ends(program), eqns)

    def _ends(self, of: Any) -> tuple[list[Any], list[Any]]:
        return self.atoms(of.invars), self.atoms(of.outvars)

    def _eqn(self, eqn: Any, **params: Any) -> Any:
        if eqn.primitive.name == "shard_map":  # inside are those of a device
            inside = {}
        else:
            inside = {name: self._body(value) for name, value in eqn.params.items() if name not in params}
        invars, outvars = self._ends(eqn)
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            whole, part = eqn.invars[0].aval.shape, invars[0].aval.shape
            inside[SUMMED] = any(part[axis] < whole[axis] for axis in contracted)
        return eqn.replace(invars=invars, outvars=outvars, params={**eqn.params, **inside, **params})

    def _body(self, value: Any) -> Any:
        if isinstance(value, core.ClosedJaxpr):  # in JAX 0.11 every jaxpr is one
            return core.ClosedJaxpr(self._jaxpr(value.jaxpr), value.consts)
        if isinstance(value, core.Jaxpr):
            return self._jaxpr(value)
        return tuple(map(self._body, value)) if isinstance(value, tuple) else value

    def _jaxpr(self, jaxpr: Any) -> Any:
        invars, outvars = self._ends(jaxpr)
        eqns = [self._eqn(eqn) for eqn in jaxpr.eqns]
        return core.Jaxpr(self.atoms(jaxpr.constvars), invars, outvars, eqns, jaxpr.effects, jaxpr.debug_info)

    def pair(self, pair: LoopPair) -> LoopPair:
        program, pull = self.program(pair.program, {}), self.program(pair.pull, {})
        of = lambda eqn, body, invars: self._eqn(eqn, jaxpr=_closed(eqn.params["jaxpr"], body, invars))
        own, again = iter(pull.invars), set(pair.again)
        read = [
            program.outvars[pair.forward.outvars.index(atom)] if i in again else next(own)
            for i, atom in enumerate(pair.backward.invars)
        ]
        return LoopPair(
            of(pair.forward, program, program.invars),
            of(pair.backward, pull, read),
            program,
            pull,
            pair.again,
            self.atoms(pair.free),
            pair.residuals,
            {self.atom(atom): k for atom, k in pair.in_place.items()},
            pair.early,
        )


def _closed(of: Any, body: Program, invars: Sequence[Any]) -> Any:
    """The body of a loop as a closed jaxpr, in place of this one."""
    debug, effects = of.jaxpr.debug_info, of.jaxpr.effects
    debug = debug._replace(arg_names=("",) * len(invars), result_paths=("",) * len(body.outvars))
    return core.ClosedJaxpr(core.Jaxpr(body.constvars, [*invars], body.outvars, body.eqns, effects, debug), body.consts)
