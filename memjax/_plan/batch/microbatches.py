"""A traced step in microbatches: the derivative in it runs for some examples at a time, and its gradients are added up.

Factors such as one over the number of examples are written in the program and stay as they are. So gradients are the same but
for the order of their sums; masks of dropout are the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.random import threefry2x32_p

from memjax._core.arrays import filled, is_float
from memjax._core.compat import scan_counts
from memjax._core.lists import Arrays
from memjax._core.positions.bodies import row
from memjax._core.positions.walk import Mixed, Positions, Shared, State, Summed, Walk, reason, shared
from memjax._core.program.cpu_convolutions import convolution_for_loops, is_slow_in_loops
from memjax._core.program.dataflow import is_literal
from memjax._core.program.jaxpr import Program, as_closed, calls_in_place, trace
from memjax._core.program.primitives import CHECKPOINTS
from memjax._core.tiles import made_after
from memjax._plan.batch.examples import Batch, rule, settled
from memjax._plan.tile.resized import Resized
from memjax._plan.tile.rewrite import in_order

PASSES_OF_SUMS = 1
"""Over the gradients, for each microbatch: sums are read where gradients are written."""


class Sums(NamedTuple):
    """Bytes of sums over microbatches that lie beside results, and seconds that adding up takes."""

    nbytes: int = 0
    seconds: float = 0.0


def sum_bytes(batch: Batch) -> int:
    """Bytes of what is added up over microbatches."""
    sums = [_wide(var.aval) for var in batch.makes if isinstance(batch.states[var], Summed)]
    return sum(aval.size * aval.dtype.itemsize for aval in sums)


class _Part(Resized):
    """Equations for any number of examples.

    Args:
      program, states, out_states, length, platform: as for `Resized`.
    """

    def __init__(
        self, program: Program, states: Sequence[State], out_states: Sequence[State], length: int, platform: str
    ):
        super().__init__(program, states, out_states, length, platform, rule, marked=True)
        walk, self._is_on_cpu = Walk(length, True, rule), platform == "cpu"
        self.first: Any = 0  # of the examples that it is run for
        for eqn in self._program.eqns:
            outs = [self._states[out] for out in eqn.outvars]
            if eqn.primitive.name == "random_bits" and isinstance(outs[0], Positions):
                if isinstance(self._states[eqn.invars[0]], Shared):
                    self.calls[eqn.outvars[0]] = _Bits(self, eqn)
            elif eqn.primitive.name == "scan" and not all(isinstance(state, Shared) for state in outs):
                read = [shared(np.shape(a.val)) if is_literal(a) else self._states[a] for a in eqn.invars]
                self.calls[eqn.outvars[0]] = _Loop(self, walk, eqn, read, platform)
            elif eqn.primitive.name in CHECKPOINTS and not all(isinstance(state, Shared) for state in outs):
                read = [shared(np.shape(a.val)) if is_literal(a) else self._states[a] for a in eqn.invars]
                self.calls[eqn.outvars[0]] = _Checkpoint(self, eqn, read, outs, platform)

    def bind(self, eqn: Any, values: Sequence[Any]) -> Arrays:
        try:
            if self._is_on_cpu and is_slow_in_loops(eqn):
                with self.scope(eqn):
                    return [convolution_for_loops(eqn, *values)]
            return super().bind(eqn, values)
        except (TypeError, ValueError) as error:
            raise reason(eqn, "names sizes that are not known to follow the batch") from error

    def run(self, inputs: Arrays, first: Any, size: int) -> Arrays:
        """The outputs for `size` examples, from the one with number `first` on."""
        self.first = first
        return self(inputs, size)


class _Bits:
    """The random bits of some of the examples: those that `jax.random.bits` makes for all of them, counted from the first."""

    def __init__(self, part: _Part, eqn: Any):
        self._part, self._eqn = part, eqn

    def __call__(self, values: Arrays, size: int) -> Arrays:
        [key], eqn = values, self._eqn
        shape = (size, *eqn.params["shape"][1:])
        of_one = math.prod(shape[1:])
        place = jnp.uint32(0)
        for dim in range(len(shape)):
            along = lax.broadcasted_iota("uint32", shape, dim) * jnp.uint32(math.prod(shape[dim + 1 :]))
            place = place + along
        place = place + jnp.asarray(self._part.first).astype("uint32") * jnp.uint32(of_one)
        words = jax.random.key_data(key)
        high, low = threefry2x32_p.bind(words[0], words[1], jnp.zeros_like(place), place)
        if eqn.params["bit_width"] == 64:
            return [(high.astype("uint64") << 32) | low.astype("uint64")]
        return [(high ^ low).astype(eqn.outvars[0].aval.dtype)]


class _Loop:
    """A loop over another axis for some of the examples."""

    def __init__(self, part: _Part, walk: Walk, eqn: Any, states: Sequence[State], platform: str):
        self._part, self._eqn, self._states = part, eqn, list(states)
        body = as_closed(eqn.params["jaxpr"])
        self._consts, self._carried = scan_counts(eqn)
        self._carry, outs = settled(walk, eqn, states)
        rows = [*map(row, states[self._consts + self._carried :])]
        program = calls_in_place(body, differentiable=False)
        inputs = [*states[: self._consts], *self._carry, *rows]
        self._body = _Part(program, inputs, [*self._carry, *outs[self._carried :]], walk.length, platform)
        self._types = body.out_avals

    def __call__(self, values: Arrays, size: int) -> Arrays:
        consts, rest = values[: self._consts], values[self._consts :]
        first = self._part.first

        def iteration(carry: Arrays, rows: Arrays) -> tuple[Arrays, Arrays]:
            outs = self._body.run([*consts, *carry, *rows], first, size)
            # A sum is rounded here as in the loop over all examples.
            outs = [out.astype(aval.dtype) for out, aval in zip(outs, self._types, strict=True)]
            return outs[: self._carried], outs[self._carried :]

        begin = [
            _fewer(value, before, after, self._part, size)
            for value, before, after in zip(
                rest[: self._carried], self._states[self._consts :][: self._carried], self._carry, strict=True
            )
        ]
        params = self._eqn.params
        carry, rows = lax.scan(
            iteration,
            begin,
            rest[self._carried :],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *rows]


class _Checkpoint:
    """A `jax.checkpoint`, of either pass, for some of the examples: it stays one, or nothing would be computed again."""

    def __init__(self, part: _Part, eqn: Any, states: Sequence[State], outs: Sequence[State], platform: str):
        self._part, self._eqn = part, eqn
        program = calls_in_place(as_closed(eqn.params["jaxpr"]), differentiable=False)
        self._body = _Part(program, states, outs, part.length, platform)

    def __call__(self, values: Arrays, size: int) -> Arrays:
        eqn = self._eqn
        inputs = [jnp.asarray(self._part.first), *values]

        def run(first: Any, *values: Any) -> Arrays:
            outs = self._body.run(list(values), first, size)
            return [out.astype(var.aval.dtype) for out, var in zip(outs, eqn.outvars, strict=True)]

        closed = trace(run, [*map(jax.typeof, inputs)], {})
        jaxpr = closed.jaxpr
        body = core.Jaxpr(
            (),
            [*jaxpr.constvars, *jaxpr.invars],
            jaxpr.outvars,
            jaxpr.eqns,
            jaxpr.effects,
            jaxpr.debug_info.with_unknown_names(),
        )
        return list(eqn.primitive.bind(*closed.consts, *inputs, **eqn.params | {"jaxpr": body}))


def _fewer(value: Any, before: State, after: State, part: _Part, size: int) -> Any:
    """A value with which a loop begins, the same for all examples, for `size` of them."""
    if isinstance(before, Shared) and isinstance(after, Positions):
        value = jnp.asarray(value)
        return lax.slice_in_dim(value, 0, value.shape[after.dim] // part.length * size, axis=after.dim)
    return value


class Microbatches:
    """A part of a program, run for some positions after the others.

    Args:
      batch: the part.
      size: how many positions run at a time; of the last ones there may be fewer.
      platform: of the device, as JAX calls it.

    Attributes:
      region: it.
      reads, makes: what it reads and makes.

    Raises Mixed where positions turn out to be mixed.
    """

    def __init__(self, batch: Batch, size: int, platform: str):
        self.region, self.reads, self.makes, self._size = batch, batch.reads, batch.makes, size
        program = Program([], [], batch.reads, batch.makes, batch.eqns)
        self._states = [batch.states[var] for var in batch.reads]
        self._outs = [batch.states[var] for var in batch.makes]
        self._part = _Part(program, self._states, self._outs, batch.length, platform)

    def __call__(self, values: Arrays) -> Arrays:
        def some(first: Any, size: int, made: Arrays) -> Arrays:
            """`made` with what follows from `size` positions, from the one with number `first` on."""
            inputs = [_cut(value, state, first, size) for value, state in zip(values, self._states, strict=True)]
            outs = self._part.run(inputs, first, size)
            return [_put(*one, first) for one in zip(made, outs, self._outs, strict=True)]

        types = [
            _wide(var.aval) if isinstance(state, Summed) else var.aval
            for var, state in zip(self.makes, self._outs, strict=True)
        ]
        starts, values = made_after([(jnp.zeros((), aval.dtype), aval) for aval in types], values)
        made = [filled(*start) for start in starts]
        count, last = divmod(self.region.length, self._size)
        starts = jnp.arange(count, dtype="uint32") * jnp.uint32(self._size)
        made, _ = lax.scan(lambda made, first: (some(first, self._size, made), None), made, starts)
        if last:
            made = some(jnp.uint32(count * self._size), last, made)
        return [value.astype(var.aval.dtype) for value, var in zip(made, self.makes, strict=True)]


def _cut(value: Any, state: State, first: Any, size: int) -> Any:
    """The positions from `first` on of a value that has them."""
    if not isinstance(state, Positions):
        return value
    start, of_each = first.astype("int32") * state.inner, size * state.inner
    return lax.dynamic_slice_in_dim(value, start, of_each, axis=state.dim, allow_negative_indices=False)


def _put(whole: Any, part: Any, state: State, first: Any) -> Any:
    """A whole value with these positions written into it; a sum with theirs."""
    if not isinstance(state, Positions):
        return whole + part.astype(whole.dtype)
    start = first.astype("int32") * state.inner
    return lax.dynamic_update_slice_in_dim(whole, part, start, axis=state.dim, allow_negative_indices=False)


def _wide(aval: Any) -> Any:
    """The type that sums over microbatches have: float32 at least."""
    narrow = is_float(aval) and jnp.dtype(aval.dtype).itemsize < 4
    return aval.update(dtype=jnp.dtype("float32")) if narrow else aval


def in_microbatches(closed: Any, batch: Batch, count: int, platform: str) -> Any:
    """The traced step, a closed jaxpr, with that part of it in `count` microbatches. Raises `Mixed` where it cannot run so."""
    if batch.length % count:
        raise Mixed(f"{count} does not divide the {batch.length} examples")
    program = batch.program
    try:
        run = Microbatches(batch, batch.length // count, platform)
        inside, order = run_as_program(run), in_order(program, [run])
    except (TypeError, ValueError) as error:
        raise Mixed("a loop or a result has sizes that are not known to follow the batch") from error
    eqns = [eqn for step in order for eqn in (inside.eqns if step is run else [step])]
    constvars, consts = [*program.constvars, *inside.constvars], [*program.consts, *inside.consts]
    jaxpr = core.Jaxpr(constvars, program.invars, program.outvars, eqns, closed.jaxpr.effects, closed.jaxpr.debug_info)
    return core.ClosedJaxpr(jaxpr, consts)


def run_as_program(run: Microbatches) -> Program:
    """The equations that run a part, of its own variables."""
    types = [var.aval for var in run.reads]
    inside = calls_in_place(trace(lambda *values: run(list(values)), types, {}), differentiable=False)
    return inside.between(run.reads, run.makes)
