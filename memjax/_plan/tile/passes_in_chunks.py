"""A traced step in which both passes of a recurrence run chunk by chunk.

The forward pass is a recurrence, and the backward pass is one whose loops run the other way. What the first makes for each step
and the second reads is stacked by chunks: then the loops over chunks are a pair, which plans divide like that of any other scan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from memjax._core.compat import derivatives, name_stack, varying
from memjax._core.positions.growth import Sources
from memjax._core.positions.walk import Mixed, Positions, shape_of
from memjax._core.program.costs import array_bytes
from memjax._core.program.dataflow import made_by, variables
from memjax._core.program.jaxpr import Program, calls_in_place, trace
from memjax._core.program.scopes import place_of
from memjax._plan.result import Tiled
from memjax._plan.tile.chunks import InChunks, Parts
from memjax._plan.tile.recurrences import Grown, Recurrence, is_loop, is_outermost, is_worth_chunks
from memjax._plan.tile.rewrite import in_order


class _Both(NamedTuple):
    """The two passes of a recurrence, and what the first makes for each step for the second alone, with its dimension."""

    forward: Recurrence
    backward: Recurrence
    between: list[tuple[Any, int]]

    @property
    def eqns(self) -> list[Any]:
        return [*self.forward.eqns, *self.backward.eqns]


def with_chunks(
    program: Program, levels: Sequence[int], count: int, platform: str, axes: dict[str, int]
) -> tuple[Program, list[Tiled]]:
    """The program with its recurrences in chunks, and what they are, in order.

    Args:
      program: straight lines of equations, with JAX's marks of derivatives.
      levels: by equation: even numbers in forward passes, odd ones in the backward passes that follow them.
      count: how many chunks there are, about.
      platform: of the device, as JAX calls it.
      axes: sizes of the named axes around it.
    """
    picked: list[InChunks] = []
    inside: dict[int, Program] = {}
    found: list[Tiled] = []
    for both in _recurrences(program, levels):
        chunk = both.forward.chunk(count)
        try:
            runs = _in_chunks(both, chunk, platform) if chunk else []
            inside |= {id(run): _as_program(run, axes) for run in runs}
        except (Mixed, TypeError, ValueError):  # sizes that an equation names in a way not known here
            continue
        if runs:
            picked += runs
            what = f"a loop over time with what leads to it and follows {place_of(program.eqns[both.forward.seed])}".strip()
            found.append(Tiled(both.forward.seed, 0, chunk, both.forward.length, both.forward.nbytes, what))
    if not found:
        return program, []
    eqns: list[Any] = []
    constvars, consts = [*program.constvars], [*program.consts]
    for step in in_order(program, picked):
        if (loop := inside.get(id(step))) is None:
            eqns.append(step)
            continue
        eqns += loop.eqns
        constvars += loop.constvars
        consts += loop.consts
    return dataclasses.replace(program, constvars=constvars, consts=consts, eqns=eqns), found


def _recurrences(program: Program, levels: Sequence[int]) -> list[_Both]:
    """Those with both passes in a program that do not overlap and are worth chunks; in order."""
    found: list[_Both] = []
    sources, taken = Sources(program), set[int]()
    for i, eqn in enumerate(program.eqns):
        is_forward = levels[i] % 2 == 0 and bool(derivatives(name_stack(eqn)))
        if id(eqn) in taken or not is_forward or not is_loop(eqn):
            continue
        both = _both(program, sources, levels, i)
        if both is not None and taken.isdisjoint(map(id, both.eqns)) and _is_worth(program, both):
            taken.update(map(id, both.eqns))
            found.append(both)
    return found


def _both(program: Program, sources: Sources, levels: Sequence[int], seed: int) -> _Both | None:
    """The recurrence that grows from a loop of a forward pass; None if it has no backward pass."""
    loop = program.eqns[seed]
    first, second = ([i for i, level in enumerate(levels) if level == levels[seed] + k] for k in (0, 1))
    mirrors = [
        i
        for i in second
        if is_loop(program.eqns[i], loop.params["length"])
        and program.eqns[i].params["reverse"] != loop.params["reverse"]
    ]
    if not mirrors:
        return None
    forward = Grown(program, sources, loop, first, first=seed)
    if not forward.inside:
        return None
    forward.add_what_leads_here()
    is_known = lambda var, state: isinstance(state, Positions) and is_outermost(var, state, forward.length)
    known = {var: state for var, state in forward.states.items() if is_known(var, state)}
    backward = _backward(program, sources, second, mirrors, known)
    if backward is None or (back := backward.region()) is None:
        return None
    # What the forward pass makes for the backward pass alone may be made in its chunks, too.
    state_of = lambda var, dim: Positions(dim, shape_of(var)[dim] // forward.length)
    forward.add_what_leads_here([(var, state_of(var, dim)) for var, dim in back.mapped if var not in forward.states])
    if (front := forward.region()) is None:
        return None
    readers = {id(eqn) for eqn in (*front.eqns, *back.eqns)}
    results = set(variables(program.outvars))
    outs, mapped = dict(zip(front.outs, front.axes, strict=True)), dict(back.mapped)
    is_between = lambda var: outs.get(var) == mapped[var] and var not in results and _is_read_by(program, var, readers)
    return _Both(front, back, [(var, mapped[var]) for var in mapped if is_between(var)])


def _is_read_by(program: Program, var: Any, readers: Collection[int]) -> bool:
    return all(id(program.eqns[i]) in readers for i in program.flow.readers.get(var, ()))


def _backward(
    program: Program, sources: Sources, numbers: Sequence[int], mirrors: Sequence[int], known: dict[Any, Any]
) -> Grown | None:
    """The backward pass of what has steps; None if none of the loops is in it.

    A loop may follow from something that mixes steps, as a mean over them in a loss: all that leads there runs before.
    """
    loop = program.eqns[mirrors[0]]
    flow, before = program.flow, set[int]()
    while True:
        grown = Grown(program, sources, loop, numbers, known=known, left_out=before)
        missing = [i for i in mirrors if i not in grown.operands]
        if len(missing) == len(mirrors):
            led = flow.needed([var for i in missing for var in flow.reads[i]])
            mixing = [var for var in made_by(led) if var in grown.behind]
            more = {flow.place[eqn.outvars[0]] for eqn in flow.needed(mixing)}.intersection(numbers) - before
            if more:
                before |= more
                continue
            return None
        grown.add_what_leads_here()
        return grown


def _is_worth(program: Program, both: _Both) -> bool:
    """Whether the forward pass makes more than what loops alone keep: plans run these again in blocks."""
    between = {var for var, _ in both.between}
    inside = {program.flow.place[eqn.outvars[0]] for eqn in both.forward.eqns}
    is_read = lambda var: not inside.isdisjoint(program.flow.readers.get(var, ()))
    kept = [var for var in made_by(both.forward.loops) if var in between and not is_read(var)]
    read = {var for part in both[:2] for var, _ in part.mapped} - between
    outs = [pair for part in both[:2] for pair in zip(part.outs, part.axes, strict=True)]
    made = [var for var, axis in outs if axis is not None and var not in between]
    return is_worth_chunks(both.forward.nbytes - _bytes(kept), _bytes([*read, *made]))


def _bytes(some: Iterable[Any]) -> int:
    return sum(map(array_bytes, some))


def _in_chunks(both: _Both, chunk: int, platform: str) -> list[InChunks]:
    """Both passes in chunks; none where types are known within their `jax.shard_map` alone. Raises Mixed."""
    if any(varying(var.aval) for var in made_by(both.eqns)):
        return []
    parts = [(var, Parts.of(var, dim, both.forward.length, chunk)) for var, dim in both.between]
    return [InChunks(part, chunk, platform, parts) for part in both[:2]]


def _as_program(run: InChunks, axes: dict[str, int]) -> Program:
    """The equations that run a pass, of its own variables, marked as a part of that pass."""
    reads, makes = run.reads, run.makes
    inside = calls_in_place(
        trace(lambda *values: run(list(values)), [var.aval for var in reads], axes), differentiable=False
    )
    made = made_by(inside.eqns)
    if len(set(makes)) < len(makes) or len(set(variables(inside.outvars)) & made.keys()) < len(makes):
        raise Mixed("a result that chunks do not make")
    return inside.between(reads, makes, source_info=run.region.loops[0].source_info)
