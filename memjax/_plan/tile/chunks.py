"""Recurrences chunk by chunk: a loop over time, with what is computed for each step before and after it.

Steps mix through what the loop carries alone. So embeddings, projections, the loop, heads and losses may run for some steps at a
time, and then for the next ones: nothing exists for all steps at once but what goes in. The chunks are a loop around the user's
loop, which JAX differentiates and plans divide like any other: with the state between chunks kept, a chunk runs again in its
iteration of the backward pass. What the chunks share, parameters that is, gets its gradients summed over chunks in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from memjax._core.arrays import as_array, is_float, strong, zeros
from memjax._core.backward.passes import vjp
from memjax._core.compat import primitive_name, scan_counts
from memjax._core.lists import Arrays, merge, pick
from memjax._core.positions.growth import Growth, Sources
from memjax._core.positions.rules import apply_rule
from memjax._core.positions.walk import Mixed, Positions, State, Summed, Walk, shape_of, shared
from memjax._core.program.costs import array_bytes
from memjax._core.program.dataflow import is_literal, made_by, variables
from memjax._core.program.jaxpr import Program, axis_sizes, bind, calls_in_place, trace
from memjax._core.program.primitives import CUSTOM_CALLS, TRACED_CUSTOM_CALLS
from memjax._plan.tile.resized import Resized

_FEWEST_STEPS = 32
_FEWEST_IN_CHUNK = 8
_WORTH = 2  # times what goes in and comes out: less is not worth chunks
_CHUNKS = (4, 16, 64)  # how many there are
_CUSTOM = CUSTOM_CALLS.keys() | TRACED_CUSTOM_CALLS


class Recurrence(NamedTuple):
    """A part of a program that may run chunk by chunk.

    Attributes:
      seed: number of its first loop.
      length: steps of its loops.
      reverse: whether they begin with the last row.
      eqns: in order.
      shared: variables that all chunks read.
      mapped: variables of which each chunk reads its steps, and in which dimension these are.
      outs: variables that are read outside. The states that its loops end with are not among them.
      axes: where these have their steps; None: sums.
      nbytes: of what it makes.
    """

    seed: int
    length: int
    reverse: bool
    eqns: list[Any]
    shared: list[Any]
    mapped: list[tuple[Any, int]]
    outs: list[Any]
    axes: list[int | None]
    nbytes: int

    @property
    def loops(self) -> list[Any]:
        return [eqn for eqn in self.eqns if _is_loop(eqn, self.length)]


def recurrences(program: Program) -> list[Recurrence]:
    """Those of a program, straight lines of equations, that do not overlap; in order."""
    found: list[Recurrence] = []
    sources, taken = Sources(program), set[int]()
    for i, eqn in enumerate(program.eqns):
        if id(eqn) in taken or not _is_loop(eqn) or eqn.params["length"] < _FEWEST_STEPS:
            continue
        region = _Grown(program, sources, i).recurrence()
        if region is not None and taken.isdisjoint(map(id, region.eqns)):
            taken.update(map(id, region.eqns))
            found.append(region)
    return found


def chunk_sizes(length: int) -> Iterator[int]:
    """Steps of a chunk that are worth a try, the largest first."""
    for count in _CHUNKS:
        if length // count >= _FEWEST_IN_CHUNK:
            yield length // count


def _is_loop(eqn: Any, length: int | None = None) -> bool:
    """Whether the equation is a loop over arrays, of so many steps."""
    if eqn.primitive.name != "scan" or eqn.effects:
        return False
    return len(eqn.invars) > sum(scan_counts(eqn)) and length in (None, eqn.params["length"])


class _Grown(Growth):
    """The equations around a loop that keep steps apart: those that follow from it, then those that lead to these alone."""

    def __init__(self, program: Program, sources: Sources, seed: int):
        first = program.eqns[seed]
        self._begin(program, sources, seed, first.params["length"])
        self._reverse = first.params["reverse"]
        behind: set[Any] = set()  # what follows from the region outside of it
        for i in range(seed, len(program.eqns)):
            eqn, reads = program.eqns[i], program.flow.reads[i]
            if not behind.isdisjoint(reads):
                behind.update(eqn.outvars)
            elif i == seed or any(var in self.states for var in reads):
                is_mine = _is_loop(eqn, self.length) and eqn.params["reverse"] == self._reverse
                if is_mine and self._add_loop(i):
                    behind.update(eqn.outvars[: scan_counts(eqn)[1]])
                elif is_mine or not self._add(i, None):
                    behind.update(eqn.outvars)

    def _add_loop(self, i: int) -> bool:
        """Take a loop in, if it scans over steps and nothing else of it has steps."""
        eqn = self.program.eqns[i]
        first = sum(scan_counts(eqn))
        rows = Positions(0, 1)
        if any(not is_literal(atom) and atom in self.states for atom in eqn.invars[:first]):
            return False
        if any(self.states.get(atom, rows) != rows for atom in eqn.invars[first:] if not is_literal(atom)):
            return False
        others = [shared(shape_of(atom)) for atom in eqn.invars[:first]]
        self.operands[i] = [*others, *[rows] * (len(eqn.invars) - first)]
        self.states |= dict.fromkeys(eqn.outvars[scan_counts(eqn)[1] :], rows)
        self.inside.append(i)
        return True

    def _add_what_leads_here(self) -> None:
        """Take in what makes operands with steps, where nothing outside reads it."""
        waiting = list(self.inside)
        while waiting:
            i = waiting.pop()
            for atom, state in zip(self.program.eqns[i].invars, self.operands[i], strict=True):
                j = None if is_literal(atom) else self.program.flow.place.get(atom)
                if j is None or j in self.operands or not isinstance(state, Positions):
                    continue
                readers = {
                    one for out in self.program.eqns[j].outvars for one in self.program.flow.readers.get(out, [])
                }
                results = set(variables(self.program.outvars))
                if readers <= self.operands.keys() and results.isdisjoint(self.program.eqns[j].outvars):
                    found = self.kept_apart(j, state) if len(self.program.eqns[j].outvars) == 1 else None
                    if found is not None:
                        self.operands[j], outs = found
                        self.states |= zip(self.program.eqns[j].outvars, outs, strict=True)
                        self.inside.append(j)
                        waiting += [j, i]

    def recurrence(self) -> Recurrence | None:
        """None where it is no more than a loop, or not worth chunks."""
        if not self.inside:
            return None
        self._add_what_leads_here()
        numbers, program = sorted(self.operands), self.program
        eqns = [program.eqns[i] for i in numbers]
        made, results, chosen = made_by(eqns), set(variables(program.outvars)), set(numbers)
        is_read = lambda var: var in results or not chosen.issuperset(program.flow.readers.get(var, ()))
        outs = [var for var in made if var in self.states and is_read(var)]
        states = [self.states[var] for var in outs]
        if any(isinstance(state, Positions) and state.inner != 1 for state in states):
            return None
        mapped: dict[tuple[Any, int], None] = {}
        common: dict[Any, None] = {}
        for i in numbers:
            count = _carried(program.eqns[i], self.length)
            for k, (atom, state) in enumerate(zip(program.eqns[i].invars, self.operands[i], strict=True)):
                if not is_literal(atom) and atom not in made and k not in count:
                    if isinstance(state, Positions):
                        mapped[atom, state.dim] = None
                    else:
                        common[atom] = None
        if len({var for var, _ in mapped}) < len(mapped) or not common.keys().isdisjoint(var for var, _ in mapped):
            return None
        axes = [state.dim if isinstance(state, Positions) else None for state in states]
        inside = sum(array_bytes(var) for var in made if isinstance(self.states.get(var), Positions))
        moved = sum(array_bytes(var) for var, _ in mapped) + sum(map(array_bytes, outs))
        if inside < _WORTH * moved:
            return None
        return Recurrence(self.seed, self.length, self._reverse, eqns, list(common), list(mapped), outs, axes, inside)


def _carried(eqn: Any, length: int) -> range:
    """Which operands of an equation are what a loop over steps starts from."""
    if not _is_loop(eqn, length):
        return range(0)
    consts, carried = scan_counts(eqn)
    return range(consts, consts + carried)


def _rule(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """The states of an equation's outputs; loops over steps keep these apart. Raises Mixed."""
    if not _is_loop(eqn, walk.length):
        return apply_rule(walk, eqn, states)
    first = sum(scan_counts(eqn))
    if any(isinstance(state, Positions | Summed) for state in states[:first]):
        raise Mixed("a loop whose state has steps", eqn=eqn)
    if any(state != Positions(0, 1) for state in states[first:]):
        raise Mixed("a loop over what has its steps elsewhere", eqn=eqn)
    carried = scan_counts(eqn)[1]
    outs = eqn.outvars
    return [*(shared(shape_of(out)) for out in outs[:carried]), *[Positions(0, 1)] * (len(outs) - carried)]


class _Chunk(Resized):
    """A recurrence for any number of steps, which can be differentiated: functions with derivative rules keep these."""

    def __init__(
        self, program: Program, states: Sequence[State], out_states: Sequence[State], length: int, platform: str
    ):
        super().__init__(program, states, out_states, length, platform, _rule)
        for eqn in self._program.eqns:
            read = [shared(shape_of(atom)) if is_literal(atom) else self._states[atom] for atom in eqn.invars]
            if primitive_name(eqn) in _CUSTOM and any(isinstance(state, Positions) for state in read):
                made = [self._states[out] for out in eqn.outvars]
                self.calls[eqn.outvars[0]] = _with_rule(eqn, read, made, length, platform)


def _with_rule(
    eqn: Any, states: list[State], outs: list[State], length: int, platform: str
) -> Callable[[Arrays, int], Arrays]:
    """A call of a function with a derivative rule, for any number of steps. Raises Mixed."""
    types, out_types = ([strong(atom.aval) for atom in atoms] for atoms in (eqn.invars, eqn.outvars))
    wrt, floats = list(map(is_float, types)), list(map(is_float, out_types))
    axes = axis_sizes(eqn)

    def resized(f: Any, states: Sequence[State], outs: Sequence[State]) -> Resized:
        return Resized(calls_in_place(f, differentiable=False), states, outs, length, platform)

    forward = resized(trace(lambda *values: bind(eqn, list(values)), types, axes), states, outs)

    def pull(values: Arrays, cotangents: Arrays) -> Any:
        return vjp(lambda inputs: pick(bind(eqn, inputs), floats), values, wrt)[1](cotangents)[0]

    cotangents = [aval.to_ct_aval() for aval in pick(out_types, floats)]
    wanted: list[State] = [one if isinstance(one, Positions) else Summed() for one in pick(states, wrt)]
    backward = resized(trace(pull, [types, cotangents], axes), [*states, *pick(outs, floats)], wanted)

    @jax.custom_vjp
    def run(values: Arrays) -> Arrays:
        return forward(values)

    def keep(values: Arrays) -> tuple[Arrays, Arrays]:
        return forward(values), values

    def back(values: Arrays, cts: Arrays) -> tuple[Arrays]:
        found = backward([*values, *pick(cts, floats)])
        found = [one.astype(aval.dtype) for one, aval in zip(found, pick(types, wrt), strict=True)]
        return (merge(found, [None] * (len(wrt) - len(found)), wrt),)

    run.defvjp(keep, back)
    return lambda values, _: run(values)


class InChunks:
    """A recurrence as a function of its shared and its mapped values and of what its loops start from.

    Args:
      region: the recurrence.
      chunk: steps of a chunk.
      platform: of the device, as JAX calls it.

    Raises Mixed where it mixes steps.
    """

    def __init__(self, region: Recurrence, chunk: int, platform: str):
        self.region, self._chunk = region, chunk
        self.starts, self.ends = list[Any](), list[Any]()
        for eqn in region.loops:
            where = _carried(eqn, region.length)
            self.starts += eqn.invars[where.start : where.stop]
            self.ends += eqn.outvars[: len(where)]
        states_in = [core.Var(strong(out.aval)) for out in self.ends]
        given = iter(states_in)
        eqns = []
        for eqn in region.eqns:
            if _is_loop(eqn, region.length):
                invars, where = list(eqn.invars), _carried(eqn, region.length)
                invars[where.start : where.stop] = [next(given) for _ in where]
                eqn = eqn.replace(invars=invars)
            eqns.append(eqn)
        invars = [*region.shared, *(var for var, _ in region.mapped), *states_in]
        program = Program([], [], invars, [*region.outs, *self.ends], eqns)
        states: list[State] = [shared(shape_of(var)) for var in region.shared]
        states += [Positions(dim, 1) for _, dim in region.mapped]
        states += [shared(shape_of(var)) for var in states_in]
        out_states: list[State] = [Summed() if axis is None else Positions(axis, 1) for axis in region.axes]
        out_states += [shared(shape_of(var)) for var in self.ends]
        self._run = _Chunk(program, states, out_states, region.length, platform)

    @property
    def reads(self) -> list[Any]:
        """What it is called with."""
        return [*self.region.shared, *(var for var, _ in self.region.mapped), *self.starts]

    @property
    def makes(self) -> list[Any]:
        """What it returns."""
        return [*self.region.outs, *self.ends]

    def __call__(self, values: Arrays) -> Arrays:
        """The outputs, and what the loops end with."""
        n, m = len(self.region.shared), len(self.region.shared) + len(self.region.mapped)
        outs, ends = self._in_chunks(values[:n], values[n:m], values[m:])
        return [*outs, *ends]

    def _in_chunks(self, shared_values: Arrays, mapped: Arrays, starts: Arrays) -> tuple[Arrays, Arrays]:
        region, chunk = self.region, self._chunk
        whole = region.length // chunk * chunk
        wide = [_wide(value) for value in shared_values]
        dims = [dim for _, dim in region.mapped]
        is_sum = [axis is None for axis in region.axes]
        count = len(is_sum)

        def steps(state: tuple[Arrays, Arrays], tiles: Arrays) -> tuple[tuple[Arrays, Arrays], Arrays]:
            carry, sums = state
            values = [one.astype(value.dtype) for one, value in zip(wide, shared_values, strict=True)]
            tiles = [jnp.moveaxis(tile, 0, dim) for tile, dim in zip(tiles, dims, strict=True)]
            found = self._run([*values, *tiles, *carry])
            outs, ends = found[:count], found[count:]
            new = [a + b.astype(a.dtype) for a, b in zip(sums, pick(outs, is_sum), strict=True)]
            rows = [jnp.moveaxis(out, axis, 0) for out, axis in zip(outs, region.axes, strict=True) if axis is not None]
            ends = [end.astype(one.dtype) for end, one in zip(ends, carry, strict=True)]
            return (ends, new), rows

        rows = [jnp.moveaxis(value, dim, 0) for value, dim in zip(mapped, dims, strict=True)]
        stacked = [row[:whole].reshape(whole // chunk, chunk, *row.shape[1:]) for row in rows]
        last = [row[whole:] for row in rows]
        none_yet = [_wide(zeros(strong(out.aval))) for out in pick(region.outs, is_sum)]
        state = [as_array(start) for start in starts], none_yet
        parts: list[Arrays] = []
        if whole < region.length and region.reverse:
            state, part = steps(state, last)
            parts = [part]
        state, part = lax.scan(steps, state, stacked, reverse=region.reverse)
        parts = [[out.reshape(whole, *out.shape[2:]) for out in part], *parts]
        if whole < region.length and not region.reverse:
            state, part = steps(state, last)
            parts.append(part)
        ends, sums = state
        joined = iter([jnp.concatenate(some) if len(some) > 1 else some[0] for some in zip(*parts, strict=True)])
        totals = iter(sums)
        outs = [
            (next(totals) if axis is None else jnp.moveaxis(next(joined), 0, axis)).astype(var.aval.dtype)
            for var, axis in zip(region.outs, region.axes, strict=True)
        ]
        return outs, ends


def _wide(value: Any) -> Any:
    """The value in float32 if it has fewer bits, so that its cotangents are summed up in as many."""
    narrow = is_float(value) and jnp.dtype(value.dtype).itemsize < 4
    return value.astype(jnp.float32) if narrow else value
