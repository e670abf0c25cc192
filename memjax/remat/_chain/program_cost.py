"""The working memory of a program, from its jaxpr alone, by a model of fusion.

The compiler writes to memory what matrix products, reductions, loops and the like read or write; elementwise chains
between them are one pass each. The model follows that: an elementwise value takes memory if something other than one
elementwise operation or reduction reads it. Values live, in the order of the program, from there to their last reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from memjax._core.compat import bodies
from memjax._core.jaxpr import is_literal, nbytes
from memjax._core.primitives import ALIASES, CALLS, LOOPS, REDUCTIONS, SOURCES, WHOLE_OPERANDS

_LOOPS = LOOPS | {"shard_map"}


class _Operation(NamedTuple):
    name: str
    eqn: Any
    inputs: list[int]
    outputs: list[int]


class Program:
    """A jaxpr with calls inlined. Values are numbers; other names for the same bytes have the same number."""

    def __init__(self, jaxpr: Any):
        self.nbytes: list[int] = []
        self.operations: list[_Operation] = []
        self.inputs = [self._new(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)]
        self.outputs = self._inline(jaxpr, self.inputs)
        self._fuse()

    def _new(self, aval: Any) -> int:
        self.nbytes.append(nbytes(aval))
        return len(self.nbytes) - 1

    def _inline(self, jaxpr: Any, inputs: Sequence[int]) -> list[int]:
        value = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

        def read(atom):
            return self._new(None) if is_literal(atom) else value[atom]

        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            ins = [read(atom) for atom in eqn.invars]
            body = next(iter(bodies(eqn)), None) if name in CALLS else None
            if body is not None and len(body.invars) == len(ins):
                consts = [self._new(var.aval) for var in body.constvars]
                outs = self._inline(body, [*consts, *ins])
            elif name in ALIASES and len(ins) == len(eqn.outvars):
                outs = ins
            else:
                outs = [self._new(var.aval) for var in eqn.outvars]
                self.operations.append(_Operation(name, eqn, ins, outs))
            value.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _fuse(self) -> None:
        """Decide which values take memory, and when each is read for the last time."""
        end = len(self.operations)
        readers: dict[int, list[int]] = {}
        for i, operation in enumerate(self.operations):
            for value in set(operation.inputs):
                readers.setdefault(value, []).append(i)
        outputs = set(self.outputs)
        self.stored = [False] * len(self.nbytes)
        self.last = [-1] * len(self.nbytes)
        for operation in self.operations:
            for value in operation.outputs:
                reading = [self.operations[i].name for i in readers.get(value, [])]
                fused = _fusible(operation.name) and not any(map(_needs_operands, reading))
                one_reader = len(reading) <= 1 or operation.name in SOURCES
                self.stored[value] = value in outputs or not (fused and one_reader)
        for value in self.inputs:
            self.stored[value] = True
        for i in range(end - 1, -1, -1):
            operation = self.operations[i]
            runs = max([i, *(self.last[v] for v in operation.outputs if not self.stored[v])])
            for value in operation.inputs:
                self.last[value] = max(self.last[value], runs)
        for value in outputs:
            self.last[value] = end

    def working_bytes(self, counted: Sequence[int], free: Sequence[int]) -> int:
        """The most bytes at one moment. Of the inputs only those `counted` have bytes; those `free` have none."""
        uncounted = set(free) - set(counted)
        live = peak = sum(self.nbytes[value] for value in set(counted))
        ends: dict[int, list[int]] = {}
        for value in set(counted):
            ends.setdefault(self.last[value], []).append(value)
        for i, operation in enumerate(self.operations):
            made = [v for v in operation.outputs if self.stored[v] and v not in uncounted]
            new, dying = sum(self.nbytes[v] for v in made), sum(self.nbytes[v] for v in ends.get(i, []))
            if _fusible(operation.name):  # written over an operand that is not needed any more
                peak = max(peak, live + new - min(new, dying))
            else:
                inside = (body.working_bytes([], []) for body in _bodies(operation))
                peak = max(peak, live + new + max(inside, default=0))
            live += new - dying
            for value in made:
                if self.last[value] > i:
                    ends.setdefault(self.last[value], []).append(value)
                else:
                    live -= self.nbytes[value]
        return peak


def _bodies(operation: _Operation) -> Iterator[Program]:
    """The programs of one iteration of a loop, or of each branch."""
    if operation.name in _LOOPS:
        yield from map(Program, bodies(operation.eqn))


def _fusible(name: str) -> bool:
    return not _needs_operands(name) and name not in REDUCTIONS


def _needs_operands(name: str) -> bool:
    """Whether the operation reads its operands from memory."""
    return name in WHOLE_OPERANDS or name in _LOOPS
