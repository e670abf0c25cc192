"""The edges of a graph in a program: which array has them, and what of the program can run for some of them at a time.

Nothing says which arrays are those of edges. Sums by index in a forward pass (`jax.ops.segment_sum`) tell how many edges there
are, and which integers are their ends. `memjax._plan.batch.rounds` follows the edges from there.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from memjax._core.positions.walk import Positions, shape_of
from memjax._core.program.costs import array_bytes
from memjax._core.program.dataflow import made_by
from memjax._core.program.jaxpr import Program
from memjax._core.program.primitives import ADDING_SCATTERS
from memjax._plan.batch.examples import Batch
from memjax._plan.batch.rounds import Rounds, roots

_LEAST = 64  # edges
_MOST_WALKS = 4


class Edges(NamedTuple):
    """The edges of a graph in a program.

    Attributes:
      length: how many.
      parts: in order, what can run for some of them at a time.
      stages: of these: see `edges_of`.
      largest: the largest variable that never exists for all edges.
      of_each: bytes that an edge has in the part that makes the most.
    """

    length: int
    parts: list[Batch]
    stages: list[int]
    largest: Any
    of_each: int


def edges_of(program: Program, stages: Sequence[int]) -> Edges | None:
    """The edges of a graph in a program, those of which most bytes are made if there are several; or None.

    Args:
      program: straight lines of equations.
      stages: by equation: an even number in a forward pass, the next odd one in its backward pass.
    """
    for length in _lengths(program, stages):
        found = _found(program, stages, length)
        if found is not None:
            return found
    return None


def _sums(program: Program, length: int | None = None) -> Iterator[tuple[int, Any]]:
    """The sums by index in a program, with their numbers: one index for each edge."""
    for i, eqn in enumerate(program.eqns):
        if eqn.primitive.name in ADDING_SCATTERS:
            size = shape_of(eqn.invars[1])[:1]
            if size and shape_of(eqn.invars[1]) == (*size, 1) and length in (None, size[0]):
                yield i, eqn


def _lengths(program: Program, stages: Sequence[int]) -> list[int]:
    nbytes: dict[int, int] = collections.Counter()
    for i, eqn in _sums(program):
        if not stages[i] % 2 and shape_of(eqn.invars[1])[0] >= _LEAST:
            nbytes[shape_of(eqn.invars[1])[0]] += array_bytes(eqn.invars[2])
    return sorted(nbytes, key=lambda length: -nbytes[length])


def _found(program: Program, stages: Sequence[int], length: int) -> Edges | None:
    sources = _ends(program, length)
    for _ in range(_MOST_WALKS):
        rounds = Rounds(program, stages, length, sources)
        if rounds.sources == sources:
            break
        sources = rounds.sources
    parts, of_parts = rounds.parts()
    inside = [var for part in parts for var in made_by(part.eqns) if isinstance(rounds.states.get(var), Positions)]
    stored = {var for part in parts for var in part.makes}
    never = [var for var in inside if var not in stored]
    whole = sum(array_bytes(var) for var in stored if isinstance(rounds.states[var], Positions))
    if not never or sum(map(array_bytes, never)) < 2 * whole:
        return None
    each = [
        sum(array_bytes(var) for var in made_by(part.eqns) if isinstance(rounds.states.get(var), Positions))
        for part in parts
    ]
    return Edges(length, parts, of_parts, max(never, key=array_bytes), max(each) // length)


def _ends(program: Program, length: int) -> set[Any]:
    """What the indices of sums and gathers over edges follow from, edge by edge."""
    pending = [eqn.invars[1] for _, eqn in _sums(program, length)]
    pending += [
        eqn.invars[1]
        for eqn in program.eqns
        if eqn.primitive.name == "gather" and shape_of(eqn.invars[1]) == (length, 1)
    ]
    return roots(program, pending, length)
