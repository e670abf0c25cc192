"""A scan that stacks other values than its residuals, and the scan of the backward pass that reads these."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memjax._core.arrays import as_array, zeros
from memjax._core.barriers import barrier
from memjax._core.compat import scan_counts
from memjax._core.lists import Arrays
from memjax._core.program.dataflow import is_literal, read_by, variables
from memjax._core.program.jaxpr import Program, evaluate_in, read
from memjax._core.program.primitives import REPLICATIONS, SOURCES, VIEWS
from memjax._plan.codes import Code, Codes, codes_in, encoded
from memjax._plan.derivative import LoopPair
from memjax._plan.schedule.execute import Blocks, Execution, LoopPlan
from memjax._plan.schedule.store import at
from memjax._plan.schedule.unroll import Unroll
from memjax._plan.solve.order import in_time
from memjax._plan.solve.segment import Option
from memjax._plan.solve.steps import Step, in_steps, run_steps

Env = dict[Any, Any]
_Turn = Callable[..., tuple[Arrays, Arrays, Arrays]]
"""Runs a turn: from a body, the state and slices to the state, outputs and what is kept."""


class Loop:
    """The two loops of a pair under a plan.

    Args:
      pair: the loops.
      parts: all turns, in the order of what is scanned over: how many they are, and what is kept of each.
      codes: of the body, if anything is kept in codes.
      in_steps_on: the platform for which a turn of the backward pass runs in steps; None: the compiler has its way.
      constants: what the loops may read that is made of nothing but literals: by variable, the equations that make it. A turn
        makes it for itself: outside of the loop, where JAX puts what is the same in all turns, it would be in memory.
      in_blocks: the plan by which turns run again in blocks in the backward pass, or None. With a plan there is one part: what is
        kept of each turn while its block is backpropagated.

    Attributes:
      pair: as given.
      is_rounded: whether anything is kept in codes.
      replaced: outputs of the forward loop that it does not make any more.
      read_by_mirror: variables that `backward` reads.
      stack_count: how many stacks `forward` returns.
    """

    def __init__(
        self,
        pair: LoopPair,
        parts: Sequence[tuple[int, Option]],
        codes: Codes | None = None,
        in_steps_on: str | None = None,
        constants: Mapping[Any, Sequence[Any]] | None = None,
        in_blocks: LoopPlan | None = None,
    ):
        self.pair, self._constants, self._plan = pair, constants or {}, in_blocks
        self._turns = [turns for turns, _ in parts]
        self._bodies = [_Body(pair, option, codes_in(codes, option.coded), in_steps_on) for _, option in parts]
        self.is_rounded = any(code.rounds for body in self._bodies for code in body.codes)
        read_again = set().union(*(body.read for body in self._bodies))
        consts, carried = scan_counts(pair.forward)
        if in_blocks is not None:
            [body] = self._bodies
            read_again.update(read_by(body.forward(pair.program.outvars[:carried], keeps=True)))
        operands = list(zip(pair.forward.invars, pair.program.invars, strict=True))
        self._consts = [(atom, var) for atom, var in operands[:consts] if var in read_again]
        self._slices = [(atom, var) for atom, var in operands[consts + carried :] if var in read_again]
        self._carried = [(pair.in_place[atom], var) for atom, var in self._slices if atom in pair.in_place]
        self._slices = [(atom, var) for atom, var in self._slices if atom not in pair.in_place]
        self.replaced = [pair.forward.outvars[i] for i in pair.residuals]
        again = set(pair.again)
        self._own = [atom for i, atom in enumerate(pair.backward.invars) if i not in again]
        self.read_by_mirror = variables([*self._own, *(atom for atom, _ in (*self._consts, *self._slices))])
        self._stays = [i for i in range(len(pair.program.outvars)) if i not in set(pair.residuals)]
        self._again = list(range(carried))  # of the state what a turn makes that runs again
        self.stack_count = sum(body.stack_count for body in self._bodies)
        if in_blocks is not None:
            self.stack_count = carried + (self.stack_count if in_blocks.tail else 0)

    def forward(self, env: Env) -> Arrays:
        """Run the loop: its outputs go to `env`, all but those that are replaced; what it keeps is returned."""
        pair, program = self.pair, self.pair.program
        consts, carried = scan_counts(pair.forward)
        values = read(env, pair.forward.invars)
        outvars = [program.outvars[i] for i in self._stays]
        turn = self._forward_turn(values[:consts])
        init, xs = values[consts : consts + carried], values[consts + carried :]
        if self._plan is None:
            outs, stacks = self._run(pair.forward, turn, init, xs, outvars[carried:], None)
            kept = [stack for part in stacks for stack in part]
        else:
            init = list(map(as_array, init))  # literals are not
            blocks = _Turns(pair.forward, self._bodies[0], turn, init, xs, outvars[carried:])
            carry, ys, ((states, _), tail) = Execution(self._plan, blocks).forward(init)
            outs, kept = [*carry, *ys], [*states, *tail]
        env |= zip((pair.forward.outvars[i] for i in self._stays), outs, strict=True)
        return kept

    def _forward_turn(self, given: Arrays) -> _Turn:
        """A turn of the forward loop, whose constants are `given`."""
        pair, program = self.pair, self.pair.program
        consts, carried = scan_counts(pair.forward)

        def turn(
            body: _Body, carry: Arrays, xs: Any, *, writes: bool = True, keeps: bool = True
        ) -> tuple[Arrays, Arrays, Arrays]:
            made = self._stays if writes else self._again
            outvars = [program.outvars[i] for i in made]
            inner = program.given([*self._here(pair.forward.invars[:consts], given), *carry, *xs])
            codes: Env = {}
            if keeps:
                body.encode(program.invars, inner, codes)
            for eqn in body.forward(outvars, keeps=keeps, acts=writes):
                evaluate_in([eqn], inner)
                if keeps:
                    body.encode(eqn.outvars, inner, codes)
            outs, kept = dict(zip(made, read(inner, outvars), strict=True)), Arrays()
            if keeps:
                on_host = [jax.device_put(value, jax.memory.Space.Host) for value in read(inner, body.moved)]
                kept = [*read(inner, body.kept), *(codes[one.of] for one in body.codes), *on_host]
            return [outs.get(i) for i in range(carried)], [outs[i] for i in made if i >= carried], kept

        return turn

    def backward(self, values: Any, env: Env, stacks: Sequence[Any]) -> None:
        """Run the loop of the backward pass; its outputs go to `env`."""
        eqn, pull = self.pair.backward, self.pair.pull
        _, carried = scan_counts(eqn)
        turn, init, xs = self._backward_turn(values)
        if self._plan is not None:
            outs = self._backward_in_blocks(values, turn, init, xs, stacks)
        else:
            parts, given = [], iter(stacks)
            for body in self._bodies:
                parts.append([next(given) for _ in range(body.stack_count)])
            outs, _ = self._run(eqn, turn, init, xs, pull.outvars[carried:], parts)
        env |= zip(eqn.outvars, outs, strict=True)

    def _backward_turn(self, values: Any) -> tuple[_Turn, Arrays, tuple[Arrays, Arrays]]:
        """A turn of the backward loop, what the loop starts from, and what it scans over besides what is kept."""
        eqn, program, pull = self.pair.backward, self.pair.program, self.pair.pull
        consts, carried = scan_counts(eqn)
        own = read(values, self._own)
        atoms = [atom for atom, _ in self._consts]
        again = read(values, atoms)
        # One slice of a sharded parameter is gathered once, two slices of it would be gathered twice.
        mine_too = {atom: i for i, atom in enumerate(self._own[consts + carried :]) if not is_literal(atom)}
        known = [(mine_too[atom], var) for atom, var in self._slices if atom in mine_too]
        others = [(atom, var) for atom, var in self._slices if atom not in mine_too]
        slices = read(values, [atom for atom, _ in others])

        number, rows = self.pair.numbers, own[consts + carried :]
        rows = [
            np.arange(row.shape[0], dtype=row.dtype) if i in self.pair.counts else row for i, row in enumerate(rows)
        ]

        def turn(body: _Body, carry: Arrays, xs: Any) -> tuple[Arrays, Arrays, Arrays]:
            mine, sliced, kept = xs
            fixed = self._here(self._own[:consts], own)
            inner: Env = program.given([None] * len(program.invars))
            inner |= zip((var for _, var in self._consts), self._here(atoms, again), strict=True)
            inner |= zip((var for _, var in others), sliced, strict=True)
            inner |= {var: mine[i] for i, var in known}
            if number is not None:  # what the turn has not written yet
                inner |= {var: at(carry[k], mine[number]) for k, var in self._carried}
            for var in body.missing:  # so that nothing is taken for known that is not
                inner.pop(var, None)
            given = iter(kept)
            inner |= {var: next(given) for var in body.kept}
            inner |= {one.of: one.codec.decode(next(given)) for one in body.codes}
            inner |= {var: jax.device_put(next(given), jax.memory.Space.Device) for var in body.moved}
            if body.steps is not None:
                inner |= pull.given([*fixed, *carry, *mine])
                inner = run_steps(body.steps, inner, {*inner, *variables(pull.outvars)})
            else:
                evaluate_in(body.again, inner)
                inner |= pull.given([*fixed, *carry, *mine])
                evaluate_in(pull.eqns, inner)
            outs = read(inner, pull.outvars)
            return outs[:carried], outs[carried:], []

        return turn, own[consts : consts + carried], (rows, slices)

    def _backward_in_blocks(self, values: Any, turn: _Turn, init: Arrays, xs: Any, stacks: Sequence[Any]) -> Arrays:
        """Results of the loop of the backward pass, turns of the forward loop running again in blocks."""
        pair, plan, [body] = self.pair, self._plan, self._bodies
        assert plan is not None
        consts, carried = scan_counts(pair.forward)
        there = self._there(values)
        states, tail = list(stacks[:carried]), list(stacks[carried:])
        again = self._forward_turn(there[:consts])
        written = {
            i: pair.in_place[a] for i, a in enumerate(pair.forward.invars[consts + carried :]) if self._is_in_place(a)
        }
        blocks = _Turns(pair.forward, body, again, states, there[consts + carried :], (), written)

        def step(state: Any, kept: Arrays, i: Any) -> Any:
            carry, written = state
            slices = _mapped(lambda array: at(array, blocks.row(i)), xs)
            carry, ys, _ = turn(body, carry, (*slices, kept))
            return carry, blocks.write(written, ys, i)

        made = pair.pull.outvars[scan_counts(pair.backward)[1] :]
        none_yet = list(init), [zeros(var.aval, (blocks.length,)) for var in made]
        carry, written = Execution(plan, blocks).pull_back(((states, []), tail), none_yet, step)
        return [*carry, *written]

    def _there(self, values: Any) -> Arrays:
        """Operands of the forward loop where turns of it run again. What only outputs are made of is gone by then, nor wanted."""
        needed = set(variables(atom for atom, _ in (*self._consts, *self._slices)))
        there = [values[a] if not is_literal(a) and a in needed else None for a in self.pair.forward.invars]
        return [a.val if is_literal(a) else value for a, value in zip(self.pair.forward.invars, there, strict=True)]

    def _is_in_place(self, atom: Any) -> bool:
        return not is_literal(atom) and atom in self.pair.in_place

    def _here(self, atoms: Sequence[Any], values: Sequence[Any]) -> Arrays:
        """The first of the values, those of `atoms`; the constants among these made anew."""
        made: Env = {}
        for atom in atoms:
            evaluate_in(() if is_literal(atom) else self._constants.get(atom, ()), made)
        pairs = zip(atoms, values, strict=False)
        return [value if is_literal(atom) else made.get(atom, value) for atom, value in pairs]

    def _run(
        self,
        eqn: Any,
        turn: _Turn,
        init: Arrays,
        xs: Any,
        stacked: Sequence[Any],
        given: Sequence[Arrays] | None,
    ) -> tuple[Arrays, list[Arrays]]:
        """(carried and stacked outputs, for each part what its turns return besides).

        Parts read their slices of `xs`, and write what they stack into one array, so that nothing is copied.
        """
        settings = {name: eqn.params[name] for name in ("reverse", "unroll")}
        if len(self._bodies) == 1:

            def whole(carry: Arrays, xs: Any) -> Any:
                carry, ys, extra = turn(self._bodies[0], carry, xs)
                return carry, (ys, extra)

            if given is not None:
                init, stacks = _apart(init, given[0], self._turns[0])
                xs = (*xs, stacks)
            carry, (ys, extra) = lax.scan(whole, init, xs, length=eqn.params["length"], **settings)
            return [*carry, *ys], [extra]

        length = eqn.params["length"]
        state = list(init), [zeros(var.aval, (length,)) for var in stacked]
        extras: list[Arrays] = [[] for _ in self._bodies]
        firsts = [sum(self._turns[:i]) for i in range(len(self._turns))]
        order = list(range(len(self._bodies)))
        for part in reversed(order) if settings["reverse"] else order:
            body = self._bodies[part]

            def one(state: Any, inputs: Any, body: _Body = body) -> Any:
                (carry, buffers), (i, count, kept) = state, inputs
                slices = _mapped(lambda array: at(array, count if isinstance(array, np.ndarray) else i), xs)
                carry, ys, extra = turn(body, carry, slices if given is None else (*slices, kept))
                written = [lax.dynamic_update_index_in_dim(b, y, i, 0) for b, y in zip(buffers, ys, strict=True)]
                return (carry, written), extra

            places = jnp.arange(firsts[part], firsts[part] + self._turns[part])
            counts = firsts[part] + np.arange(self._turns[part], dtype=places.dtype) if self.pair.counts else places
            saved: Arrays = []
            if given is not None:
                carry, saved = _apart(state[0], given[part], self._turns[part])
                state = carry, state[1]
            state, extras[part] = lax.scan(one, state, (places, counts, saved), **settings)
        return [*state[0], *state[1]], extras


class _Turns(Blocks):
    """The turns of a loop, for a plan that runs them again in blocks.

    Args:
      eqn: the loop.
      body, turn: run one turn.
      carry: arrays like the state, or stacks of these.
      xs: what is scanned over; None: what no turn reads.
      stacked: variables that the loop stacks.
      in_place: by position in `xs`, where the backward pass carries that as it is by then.
    """

    def __init__(
        self,
        eqn: Any,
        body: _Body,
        turn: _Turn,
        carry: Arrays,
        xs: Arrays,
        stacked: Sequence[Any],
        in_place: Mapping[int, int] = MappingProxyType({}),
    ):
        unroll = Unroll(eqn.params["unroll"], eqn.params["unroll"])
        super().__init__(carry, [], eqn.params["length"], eqn.params["reverse"], unroll)
        self._body, self._turn, self._xs, self._stacked, self._in_place = body, turn, xs, stacked, in_place

    def beside(self, cotangents: Any) -> _Turns:
        carried, _ = cotangents
        found = copy.copy(self)
        found._xs = [carried[self._in_place[i]] if i in self._in_place else x for i, x in enumerate(self._xs)]
        return found

    def outputs(self) -> Arrays:
        return [zeros(var.aval, (self.length,)) for var in self._stacked]

    def step(self, carry: Arrays, i: Any, *, writes: bool, keeps: bool) -> tuple[Arrays, Arrays, Arrays]:
        slices = [None if one is None else at(one, self.row(i)) for one in self._xs]
        return self._turn(self._body, carry, slices, writes=writes, keeps=keeps)


class _Body:
    """The body of a loop, and what is kept of each iteration. Variables that the backward pass does not read are left out.

    Attributes:
      kept: variables that are kept as they are.
      codes: the codes of variables that are kept encoded.
      moved: variables that are offloaded to the host.
      stack_count: the number of entries in these three; the loop stacks each over its iterations.
      again: equations that are recomputed in the backward pass.
      read: variables that `again` and the backward pass read.
      missing: inputs of the body that the backward pass does not have, unless it decodes them.
      steps: the equations of one iteration of the backward pass, grouped into steps; None if the compiler orders them.
    """

    def __init__(self, pair: LoopPair, option: Option, codes: Sequence[Code], in_steps_on: str | None):
        program, pull = pair.program, pair.pull
        free = {*pair.free, *program.constvars}
        made = {*program.flow.place, *program.invars}
        wanted = [var for var in (*pull.flow.read, *variables(pull.outvars)) if var in made]
        self._program = program
        there = free | {*option.kept, *option.moved, *option.coded}
        self.again = program.flow.needed(wanted, there)
        self.read = {*read_by(self.again), *wanted}
        self.kept = [var for var in option.kept if var in self.read]
        self.codes = [code for code in codes if code.of in self.read]
        self.moved = [var for var in option.moved if var in self.read]
        self.stack_count = len(self.kept) + len(self.codes) + len(self.moved)
        self._codes = {code.of: code for code in self.codes}
        self.steps: list[Step] | None = None
        # XLA:CPU compiles some small loops as one function, and aborts if there is a barrier in it.
        if in_steps_on is not None and in_steps_on != "cpu":
            self.steps = in_steps(in_time(self.again, pull.eqns), (), variables(pull.outvars), in_steps_on)
        self.missing = [var for var in program.invars if var not in free and var not in {*self.kept, *self.moved}]

    def forward(self, outvars: Sequence[Any], *, keeps: bool = True, acts: bool = False) -> list[Any]:
        """The equations that lead to `outvars`, and to what is kept; and if it `acts` those with effects."""
        flow = self._program.flow
        kept = [*self.kept, *self.moved, *self._codes] if keeps else []
        return flow.needed([*outvars, *kept], always=flow.acting if acts else ())

    def encode(self, made: Iterable[Any], env: Env, codes: Env) -> None:
        """Add to `codes` those of the variables that have been made."""
        for var in made:
            if (code := self._codes.get(var)) is None:
                continue
            if code.rounds:
                env[var], codes[var] = encoded(env[var], code)
            else:  # without a barrier, see above: a turn ends soon
                codes[var] = code.codec.encode(env[var])


def constants_in(programs: Iterable[Program]) -> dict[Any, list[Any]]:
    """Maps each variable that is a broadcast literal or an iota, or a view of one, to the equations that make it."""
    found: dict[Any, list[Any]] = {}
    for eqn, reads in ((eqn, reads) for one in programs for eqn, reads in zip(one.eqns, one.flow.reads, strict=True)):
        if eqn.primitive.name in SOURCES | VIEWS | REPLICATIONS and all(var in found for var in reads):
            found[eqn.outvars[0]] = [*(one for var in reads for one in found[var]), eqn]
    return found


def _apart(carry: Arrays, kept: Arrays, turns: int) -> tuple[Arrays, Arrays]:
    """What a loop of the backward pass starts from and reads.

    A loop of one turn is none when it is compiled. So all of it passes a barrier then, or the compiler would find that what runs
    again has been computed already, and keep that instead.
    """
    if turns > 1:
        return carry, kept
    leaves, tree = jax.tree.flatten((carry, kept))  # what is kept may be a code, of several arrays
    return jax.tree.unflatten(tree, barrier(leaves))


def _mapped(f: Callable[[Any], Any], tree: Any) -> Any:
    return [_mapped(f, one) for one in tree] if isinstance(tree, list | tuple) else f(tree)
