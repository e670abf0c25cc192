"""Recurrences chunk by chunk: a loop over time, with what is computed for each step before and after it.

Nothing exists for all steps at once but what goes in. The chunks are a loop around the user's loop, which JAX differentiates and
plans divide like any other: with the state between chunks kept, a chunk runs again in its iteration of the backward pass. What
the chunks share, parameters that is, gets its gradients summed over chunks in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from memjax._core.arrays import as_array, is_float, strong, zeros
from memjax._core.backward.passes import vjp
from memjax._core.compat import primitive_name, scan_counts
from memjax._core.lists import Arrays, merge, pick
from memjax._core.positions.rules import apply_rule
from memjax._core.positions.walk import Mixed, Positions, State, Summed, Walk, shape_of, shared
from memjax._core.program.dataflow import is_literal
from memjax._core.program.jaxpr import Program, axis_sizes, bind, calls_in_place, trace
from memjax._core.program.primitives import CUSTOM_CALLS, TRACED_CUSTOM_CALLS
from memjax._core.tiles import with_size
from memjax._plan.tile.fission import TURNS, divided
from memjax._plan.tile.recurrences import Recurrence, carried, is_loop
from memjax._plan.tile.resized import Resized

_CUSTOM = CUSTOM_CALLS.keys() | TRACED_CUSTOM_CALLS


def _rule(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """The states of an equation's outputs; loops over steps keep these apart. Raises Mixed."""
    if not is_loop(eqn, walk.length):
        return apply_rule(walk, eqn, states)
    first = sum(scan_counts(eqn))
    if any(isinstance(state, Positions | Summed) for state in states[:first]):
        raise Mixed("a loop whose state has steps", eqn=eqn)
    if any(state != Positions(0, 1) for state in states[first:]):
        raise Mixed("a loop over what has its steps elsewhere", eqn=eqn)
    count, outs = scan_counts(eqn)[1], eqn.outvars
    return [*(shared(shape_of(out)) for out in outs[:count]), *[Positions(0, 1)] * (len(outs) - count)]


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
    return _for_any_length(run)


def _for_any_length(run: Callable[[Arrays], Arrays]) -> Callable[[Arrays, int], Arrays]:
    return lambda values, _: run(values)


class Parts(NamedTuple):
    """Variables of what one pass makes for each step and another one reads, chunk by chunk: it is never there as a whole.

    Attributes:
      stacked: the chunks, one on another.
      last: the steps that are left, fewer than a chunk has; None: there are none.
    """

    stacked: Any
    last: Any | None

    @classmethod
    def of(cls, var: Any, dim: int, length: int, chunk: int) -> Parts:
        """New ones, for a variable that has the steps of so many turns in that dimension."""
        shape = shape_of(var)
        of_turn = shape[dim] // length
        left = length % chunk * of_turn
        type_of = lambda shape: strong(var.aval).update(shape=shape)
        last = core.Var(type_of(with_size(shape, dim, left))) if left else None
        return cls(core.Var(type_of((length // chunk, *with_size(shape, dim, chunk * of_turn)))), last)

    @property
    def variables(self) -> list[Any]:
        return [self.stacked] if self.last is None else [self.stacked, self.last]


class InChunks:
    """A recurrence as a function of its shared and its mapped values and of what its loops start from.

    Args:
      region: the recurrence.
      chunk: turns of the user's loops in a chunk.
      platform: of the device, as JAX calls it.
      parts: by variable with steps, those that stand for it. They are given, or returned, in its place.
      fixed: variables that it is not differentiated with respect to. None: it is not at all, and keeps the marks of derivatives.

    Raises Mixed where it mixes steps.
    """

    def __init__(
        self,
        region: Recurrence,
        chunk: int,
        platform: str,
        parts: Collection[tuple[Any, Parts]] = (),
        *,
        fixed: Collection[Any] | None = None,
    ):
        self.region, self._chunk, self._parts = region, chunk, dict(parts)
        self._fixed = {var for var, _ in region.mapped} if fixed is None else set(fixed)
        self.starts, self.ends = list[Any](), list[Any]()
        for eqn in region.loops:
            where = carried(eqn, region.length)
            self.starts += eqn.invars[where.start : where.stop]
            self.ends += eqn.outvars[: len(where)]
        states_in = [core.Var(strong(out.aval)) for out in self.ends]
        given = iter(states_in)
        eqns = []
        for eqn in region.eqns:
            if is_loop(eqn, region.length):
                invars, where = list(eqn.invars), carried(eqn, region.length)
                invars[where.start : where.stop] = [next(given) for _ in where]
                eqn = eqn.replace(invars=invars)
            eqns.append(eqn)
        invars = [*region.shared, *(var for var, _ in region.mapped), *states_in]
        program = Program([], [], invars, [*region.outs, *self.ends], eqns)
        states: list[State] = [shared(shape_of(var)) for var in region.shared]
        place = lambda var, dim: Positions(dim, shape_of(var)[dim] // region.length)
        states += [place(var, dim) for var, dim in region.mapped]
        states += [shared(shape_of(var)) for var in states_in]
        outs = zip(region.outs, region.axes, strict=True)
        out_states: list[State] = [Summed() if axis is None else place(var, axis) for var, axis in outs]
        out_states += [shared(shape_of(var)) for var in self.ends]
        if fixed is not None:
            self._run: Resized = _Chunk(program, states, out_states, region.length, platform)
        else:
            self._run = Resized(program, states, out_states, region.length, platform, _rule, marked=True)
            for eqn in region.loops:  # the passes are two already
                if (run := divided(eqn, platform)) is not None:
                    self._run.calls[eqn.outvars[0]] = _for_any_length(run)

    @property
    def reads(self) -> list[Any]:
        """What it is called with."""
        return [*self.region.shared, *self._each(var for var, _ in self.region.mapped), *self.starts]

    @property
    def makes(self) -> list[Any]:
        """What it returns."""
        return [*self._each(self.region.outs), *self.ends]

    def _each(self, some: Iterable[Any]) -> list[Any]:
        return [one for var in some for one in (self._parts[var].variables if var in self._parts else [var])]

    def __call__(self, values: Arrays) -> Arrays:
        """The outputs, and what the loops end with."""
        region, rest = self.region, iter(values)
        common = [next(rest) for _ in region.shared]
        whole, stacked, last = dict[int, Any](), list[Any](), list[Any]()
        for k, (var, dim) in enumerate(region.mapped):
            if (parts := self._parts.get(var)) is not None:
                stacked.append(next(rest))
                last.append(None if parts.last is None else next(rest))
            elif dim and var in self._fixed:
                whole[k] = next(rest)
            else:
                row = jnp.moveaxis(next(rest), dim, 0)
                size = self._chunk * self._of_turn(var, dim)
                count = region.length // self._chunk
                stacked.append(row[: count * size].reshape(count, size, *row.shape[1:]))
                last.append(row[count * size :])
        return self._in_chunks(common, whole, (stacked, last), [as_array(start) for start in rest])

    def _of_turn(self, var: Any, dim: int) -> int:
        """Steps of a turn of the user's loops."""
        return shape_of(var)[dim] // self.region.length

    def _tiles(self, whole: dict[int, Any], rows: Arrays, number: Any, turns: int) -> Arrays:
        """The mapped values of one chunk. Those in `whole` are arrays of all steps, of which it cuts the chunk's."""
        found, rest = list[Any](), iter(rows)
        for k, (var, dim) in enumerate(self.region.mapped):
            if k in whole:
                of_turn = self._of_turn(var, dim)
                found.append(lax.dynamic_slice_in_dim(whole[k], number * self._chunk * of_turn, turns * of_turn, dim))
            else:
                found.append(next(rest) if var in self._parts else jnp.moveaxis(next(rest), 0, dim))
        return found

    def _in_chunks(self, common: Arrays, whole: dict[int, Any], rows: tuple[Arrays, Arrays], starts: Arrays) -> Arrays:
        """The outputs, by what chunks share, what is cut into chunks, and what comes in chunks and is left."""
        region, (stacked, last) = self.region, rows
        wide = [_wide(value) for value in common]
        is_sum = [axis is None for axis in region.axes]
        (count, left), number = divmod(region.length, self._chunk), len(is_sum)

        def steps(state: tuple[Arrays, Arrays], tiles: Arrays) -> tuple[tuple[Arrays, Arrays], Arrays]:
            carry, sums = state
            values = [one.astype(value.dtype) for one, value in zip(wide, common, strict=True)]
            with jax.named_scope(TURNS):
                found = self._run([*values, *tiles, *carry])
            outs, ends = found[:number], found[number:]
            new = [a + b.astype(a.dtype) for a, b in zip(sums, pick(outs, is_sum), strict=True)]
            made = [
                out if var in self._parts else jnp.moveaxis(out, axis, 0)
                for var, out, axis in zip(region.outs, outs, region.axes, strict=True)
                if axis is not None
            ]
            ends = [end.astype(one.dtype) for end, one in zip(ends, carry, strict=True)]
            return (ends, new), made

        def turn(state: Any, xs: tuple[Any, Arrays]) -> tuple[Any, Arrays]:
            return steps(state, self._tiles(whole, xs[1], xs[0], self._chunk))

        state = starts, [_wide(zeros(strong(out.aval))) for out in pick(region.outs, is_sum)]
        of_last: Arrays | None = None
        if left and region.reverse:
            state, of_last = steps(state, self._tiles(whole, last, count, left))
        xs = jnp.arange(count) if whole else None, stacked
        state, of_chunks = lax.scan(turn, state, xs, count, reverse=region.reverse)
        if left and not region.reverse:
            state, of_last = steps(state, self._tiles(whole, last, count, left))
        ends, sums = state
        totals, made = iter(sums), zip(of_chunks, of_last or [None] * len(of_chunks), strict=True)
        found: Arrays = []
        for var, axis in zip(region.outs, region.axes, strict=True):
            some = [next(totals)] if axis is None else self._joined(var, axis, *next(made))
            found += [one.astype(var.aval.dtype) for one in some]
        return [*found, *ends]

    def _joined(self, var: Any, axis: int, chunks: Any, last: Any | None) -> Arrays:
        """What was made for each step: as a whole, or in its parts."""
        if var in self._parts:
            return [chunks] if last is None else [chunks, last]
        row = chunks.reshape(chunks.shape[0] * chunks.shape[1], *chunks.shape[2:])
        return [jnp.moveaxis(row if last is None else jnp.concatenate([row, last]), 0, axis)]


def _wide(value: Any) -> Any:
    """The value in float32 if it has fewer bits, so that its cotangents are summed up in as many."""
    narrow = is_float(value) and jnp.dtype(value.dtype).itemsize < 4
    return value.astype(jnp.float32) if narrow else value
