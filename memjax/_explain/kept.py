"""Each array that is kept between the passes: what made it, deep inside loops, and what reads it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from memjax._core.compat import bodies, primitive_name, scan_counts
from memjax._core.program.dataflow import is_literal
from memjax._core.program.primitives import ALIASES
from memjax._core.program.scopes import Paths, line_of
from memjax._residuals import Equation, Held, Value, iteration

_ALIASES = ALIASES | {"transpose"}


@dataclass(eq=False)
class Pass:
    """The forward pass of a program, or of one iteration of a loop in it.

    Attributes:
      program: its equations.
      iterations: how often they run.
      kept: what of theirs is kept, with the equations that read it. An equation comes with the calls and loops around it.
    """

    program: list[Equation]
    iterations: int
    kept: dict[Value, list[tuple]] = field(default_factory=dict)

    @functools.cached_property
    def makers(self) -> dict[Value, Equation]:
        """The equation that makes each value."""
        return {value: equation for equation in self.program for value in equation.outputs if isinstance(value, Value)}


@dataclass(eq=False)
class Kept:
    """An array that is kept.

    Attributes:
      value: the array; within a loop, what one iteration keeps.
      nbytes: the bytes of all iterations, on one device.
      count: how many there are: iterations.
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
    iterations: dict[int, tuple[list[Equation], list]] = {}

    def resolved(value: Value, nbytes: int, readers: list[tuple], count: int, times: int) -> Kept:
        """Into the body of the scan that stacks it."""
        scan = _stacking_scan(value)
        if scan is not None:
            if id(scan) not in iterations:
                iterations[id(scan)] = iteration(scan, value.devices)
            inner = iterations[id(scan)][1][value.index]
            if isinstance(inner, Value) and inner.program is iterations[id(scan)][0]:
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
    """The scan whose iterations' arrays `value` is a stack of."""
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
        # A carry: what the iteration before has made of it.
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


# Alike arrays in one row: those of layers that repeat, and of the iterations of a loop.

_NUMBER = re.compile(r"(.*?)(?:_?(\d+)|\[(\d+)\])$")


@dataclass(frozen=True)
class Group:
    """Arrays of one shape, dtype and origin, from modules that differ in numbers only."""

    path: str
    arrays: tuple[Kept, ...]
    paths: tuple[str, ...]
    producer: str
    source: str
    why: str = ""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def groups(arrays: Iterable[Kept], paths: Paths) -> list[Group]:
    """The groups, the largest first."""
    found: dict[tuple, list[tuple[str, Kept]]] = {}
    for array in arrays:
        # What a library's function makes under `jax.checkpoint` has no line of the user's: its readers have.
        near = next((place for place in (array.place, *array.readers) if paths.of(place)), array.place)
        path, line = paths.of(near), line_of(near)
        producer = primitive_name(array.place[-1])
        aval = array.value.aval
        key = (template(path), aval.shape, str(aval.dtype), producer, line, array.forward.iterations, array.value.why)
        found.setdefault(key, []).append((path, array))
    made = [
        Group(
            collapsed([path for path, _ in members]),
            tuple(array for _, array in members),
            tuple(path for path, _ in members),
            key[3],
            key[4],
            key[6],
        )
        for key, members in found.items()
    ]
    return sorted(made, key=lambda group: -group.nbytes)


def template(path: str) -> str:
    """The path without its numbers."""
    return "/".join(f"{name}[]" if number is not None else name for name, number in map(_numbered, path.split("/")))


def collapsed(paths: Sequence[str]) -> str:
    """Paths of one template as one: "layers_0/mlp" and "layers_1/mlp" are "layers[0..1]/mlp"."""
    columns = zip(*(path.split("/") for path in dict.fromkeys(paths)), strict=True)
    return "/".join(_range(list(dict.fromkeys(column))) for column in columns)


def _range(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    numbers = sorted(number for _, number in map(_numbered, parts) if number is not None)
    name = _numbered(parts[0])[0]
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{name}[{numbers[0]}..{numbers[-1]}]"
    return f"{name}[{','.join(map(str, numbers))}]"


def _numbered(part: str) -> tuple[str, int | None]:
    match = _NUMBER.match(part)
    return (match[1], int(match[2] or match[3])) if match else (part, None)
