"""Each array that is kept between the passes: what made it, deep inside loops, and what reads it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from memjax._core.compat import bodies, primitive_name, scan_counts
from memjax._core.program.jaxpr import is_literal
from memjax._core.program.primitives import ALIASES
from memjax._residuals import Equation, Held, Value, iteration

_ALIASES = ALIASES | {"transpose"}


@dataclass(eq=False)
class Pass:
    """The forward pass of a program, or of one turn of a loop in it.

    Attributes:
      program: its equations.
      turns: how often they run.
      kept: what of theirs is kept, with the equations that read it. An equation comes with the calls and loops around it.
    """

    program: list[Equation]
    turns: int
    kept: dict[Value, list[tuple]] = field(default_factory=dict)

    @functools.cached_property
    def makers(self) -> dict[Value, Equation]:
        """The equation that makes each value."""
        return {value: equation for equation in self.program for value in equation.outputs if isinstance(value, Value)}


@dataclass(eq=False)
class Kept:
    """An array that is kept.

    Attributes:
      value: the array; within a loop, what one turn keeps.
      nbytes: the bytes of all turns, on one device.
      count: how many there are: turns.
      place: the equation that makes it, the calls and loops around it before it.
      forward: the pass that it is made in.
    """

    value: Value
    nbytes: int
    count: int
    place: tuple
    forward: Pass

    @property
    def readers(self) -> list[tuple]:
        return self.forward.kept[self.value]


def kept_arrays(held: Held) -> list[Kept]:
    """All of them, in the order in which they are made."""
    passes: dict[int, Pass] = {}
    turns: dict[int, tuple[list[Equation], list]] = {}

    def resolved(value: Value, nbytes: int, readers: list[tuple], count: int, times: int) -> Kept:
        """Into the body of the scan that stacks it."""
        scan = _stacking_scan(value)
        if scan is not None:
            if id(scan) not in turns:
                turns[id(scan)] = iteration(scan, value.devices)
            inner = turns[id(scan)][1][value.index]
            if isinstance(inner, Value) and inner.program is turns[id(scan)][0]:
                length = scan.eqn.params["length"]
                return resolved(inner, nbytes, readers, count * length, times * length)
        forward = passes.setdefault(id(value.program), Pass(value.program, times))
        forward.kept.setdefault(value, []).extend(readers)
        return Kept(value, nbytes, count, _innermost(value.made_by, value.index), forward)

    return [
        resolved(
            value, value.nbytes * number, [chain for reader in value.readers for chain in _reading(*reader)], number, 1
        )
        for value, number in held.values
    ]


def _stacking_scan(value: Value) -> Equation | None:
    """The scan whose turns' arrays `value` is a stack of."""
    eqn = value.made_by[-1]
    if primitive_name(eqn) != "scan" or value.index < scan_counts(eqn)[1]:
        return None
    return next((equation for equation in value.program if equation.eqn is eqn and value in equation.outputs), None)


def _innermost(place: tuple, index: int) -> tuple:
    """The equation that makes output `index` of the last of `place`, inside its bodies."""
    eqn = place[-1]
    body = next((body for body in reversed(bodies(eqn)) if len(body.outvars) == len(eqn.outvars)), None)
    if body is None:
        return place
    makers = {var: (inner, number) for inner in body.eqns for number, var in enumerate(inner.outvars)}
    var, seen = body.outvars[index], set()
    while not is_literal(var) and var not in seen:
        seen.add(var)
        if var in makers:
            inner, number = makers[var]
            if primitive_name(inner) in _ALIASES and not is_literal(inner.invars[0]):
                var = inner.invars[number if primitive_name(inner) == "optimization_barrier" else 0]
                continue
            return _innermost((*place, inner), number)
        if primitive_name(eqn) != "scan":
            return place
        # A carry: what the turn before has made of it.
        constants, carries = scan_counts(eqn)
        position = body.invars.index(var) - constants if var in body.invars else -1
        if not 0 <= position < carries:
            return place
        var = body.outvars[position]
    return place


def _reading(place: tuple, index: int) -> Iterator[tuple]:
    """The equations that read input `index` of the last of `place`, inside its bodies."""
    eqn = place[-1]
    found = False
    for body in bodies(eqn):
        position = index - (len(eqn.invars) - len(body.invars))
        if position < 0:
            continue
        same = {body.invars[position]}
        for inner in body.eqns:
            for number, atom in enumerate(inner.invars):
                if is_literal(atom) or atom not in same:
                    continue
                if primitive_name(inner) in _ALIASES:
                    same.add(inner.outvars[number if primitive_name(inner) == "optimization_barrier" else 0])
                else:
                    found = True
                    yield from _reading((*place, inner), number)
    if not found:
        yield place
