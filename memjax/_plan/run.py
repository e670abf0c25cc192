"""Acting on a plan: the forward pass that keeps what the plan says, and the backward pass, stretch by stretch.

Before a stretch has its turn, what it reads passes a barrier together with the cotangents that have arrived, so that the compiler
cannot compute it earlier, nor find that it has been computed already and keep that instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from memjax._core.barriers import barrier
from memjax._core.compat import scan_counts
from memjax._core.jaxpr import Program, bind, read, variables
from memjax._core.lists import Arrays
from memjax._plan.derivative import Derivative, LoopPair
from memjax._plan.working import needed_for

Env = dict[Any, Any]


class Piece(NamedTuple):
    """One stretch of a plan.

    Attributes:
      backward: the equations of the backward pass that have their turn with it.
      kept: variables of the forward pass.
      loop: the loop that it is, or None.
      kept_in_loop: variables of the loop's body.
    """

    backward: Sequence[Any]
    kept: Sequence[Any]
    loop: LoopPair | None = None
    kept_in_loop: Sequence[Any] = ()


@jax.tree_util.register_static
class Run:
    """The two passes of a derivative under a plan, `pieces` in the order of the forward pass.

    Attributes:
      derivative: as given.
      kept: variables of the forward pass that are kept.
    """

    def __init__(self, derivative: Derivative, pieces: Sequence[Piece]):
        program, backward = derivative.forward, derivative.backward
        self.derivative = derivative
        self._inputs = {*program.invars, *program.constvars}
        loops = {id(one.loop.forward): _Loop(one.loop, one.kept_in_loop) for one in pieces if one.loop is not None}
        self._loops = loops
        self._mirrors = {id(loop.pair.backward): loop for loop in loops.values()}
        known = {var for piece in pieces for var in piece.kept} | self._inputs
        forward_vars = {out for eqn in program.eqns for out in eqn.outvars} | self._inputs
        reads: list[Any] = variables(backward.outvars)
        self._turns: list[tuple[list[Any], list[Any]]] = []  # (equations to run again, equations of the backward pass)
        for piece in reversed(pieces):
            wanted = [var for eqn in piece.backward for var in self._read_by(eqn) if var in forward_vars]
            again = needed_for(program.eqns, wanted, known)
            self._turns.append((again, list(piece.backward)))
            reads += [var for eqn in again for var in variables(eqn.invars)] + wanted
        self.kept = [var for var in dict.fromkeys(reads) if var in known and var not in self._inputs]
        stacked = {var for loop in loops.values() for var in loop.stacks}
        wanted = [*derivative.outputs, *self.kept]
        eqns = needed_for(program.eqns, [var for var in wanted if var not in stacked], self._inputs)
        chosen = {id(eqn) for eqn in eqns} | {id(eqn) for eqn in program.eqns if eqn.effects} | loops.keys()
        self._forward = [eqn for eqn in program.eqns if id(eqn) in chosen]

    def _read_by(self, eqn: Any) -> list[Any]:
        """What an equation of the backward pass reads."""
        loop = self._mirrors.get(id(eqn))
        return variables(eqn.invars) if loop is None else loop.read_by_mirror

    def forward(self, inputs: Sequence[Any]) -> tuple[Arrays, Arrays]:
        """(outputs, what is kept)."""
        program = self.derivative.forward
        env: Env = dict(zip([*program.constvars, *program.invars], [*program.consts, *inputs], strict=True))
        stacks: Arrays = []
        for eqn in self._forward:
            if (loop := self._loops.get(id(eqn))) is not None:
                stacks += loop.forward(env)
            else:
                _evaluate(eqn, env)
        return read(env, self.derivative.outputs), [*read(env, self.kept), *stacks]

    def backward(self, inputs: Sequence[Any], kept: Sequence[Any], cotangents: Sequence[Any]) -> Arrays:
        """The cotangents of the inputs that are differentiated."""
        program, backward = self.derivative.forward, self.derivative.backward
        known: Env = dict(zip([*program.constvars, *program.invars], [*program.consts, *inputs], strict=True))
        known |= zip(self.kept, kept[: len(self.kept)], strict=True)
        stacks, at = {}, len(self.kept)
        for eqn in self._forward:
            if (loop := self._loops.get(id(eqn))) is not None:
                stacks[id(loop)] = kept[at : at + len(loop.kept)]
                at += len(loop.kept)
        env: Env = dict(zip([*backward.constvars, *backward.invars], [*backward.consts, *cotangents], strict=True))
        cts = set(backward.invars)
        for again, eqns in self._turns:
            mine = dict.fromkeys(var for eqn in eqns for var in self._read_by(eqn))
            leaves = list(dict.fromkeys(var for eqn in again for var in variables(eqn.invars) if var in known))
            turn = {var: known[var] for var in mine if var in known}
            waiting = [var for var in mine if var in cts]
            if again:
                passed = barrier([*read(env, waiting), *read(known, leaves)])
                env |= zip(waiting, passed, strict=False)
                turn |= zip(leaves, passed[len(waiting) :], strict=True)
                for eqn in again:
                    _evaluate(eqn, turn)
            for eqn in eqns:
                if (mirror := self._mirrors.get(id(eqn))) is not None:
                    mirror.backward(_Both(env, turn), env, stacks[id(mirror)])
                else:
                    env |= zip(eqn.outvars, bind(eqn, read(_Both(env, turn), eqn.invars)), strict=True)
                cts.update(eqn.outvars)
        return read(_Both(env, known), backward.outvars)


class _Both(dict):
    """Values in one of two environments."""

    def __init__(self, first: Env, second: Env):
        self._first, self._second = first, second

    def __getitem__(self, var: Any) -> Any:
        return self._first[var] if var in self._first else self._second[var]


def _evaluate(eqn: Any, env: Env) -> None:
    for var, value in zip(eqn.outvars, bind(eqn, read(env, eqn.invars)), strict=True):
        env.setdefault(var, value)  # a known value is not replaced by its recomputation


class _Loop:
    """A scan that stacks other values than its residuals, and the scan of the backward pass that reads these."""

    def __init__(self, pair: LoopPair, kept: Sequence[Any]):
        self.pair = pair
        program, pull = pair.program, pair.pull
        free = {*pair.free, *program.constvars}
        made = {out for eqn in program.eqns for out in eqn.outvars} | set(program.invars)
        wanted = [var for eqn in pull.eqns for var in variables(eqn.invars) if var in made]
        wanted += [var for var in variables(pull.outvars) if var in made]
        self._again = needed_for(program.eqns, wanted, free | set(kept))
        read_again = {var for eqn in self._again for var in variables(eqn.invars)} | set(wanted)
        self.kept = [var for var in kept if var in read_again]
        consts, self._carried = scan_counts(pair.forward)
        operands = list(zip(pair.forward.invars, program.invars, strict=True))
        self._consts = [(atom, var) for atom, var in operands[:consts] if var in read_again]
        self._slices = [(atom, var) for atom, var in operands[consts + self._carried :] if var in read_again]
        self.stacks = [pair.forward.outvars[i] for i in pair.residuals]
        again = set(pair.again)
        own = [atom for i, atom in enumerate(pair.backward.invars) if i not in again]
        self.read_by_mirror = variables([*own, *(atom for atom, _ in (*self._consts, *self._slices))])
        self._stays = [i for i in range(len(program.outvars)) if i not in set(pair.residuals)]

    def forward(self, env: Env) -> Arrays:
        """Run the loop: its outputs go to `env`, all but the residuals; what it keeps is returned."""
        pair, program = self.pair, self.pair.program
        consts, carried = scan_counts(pair.forward)
        values = read(env, pair.forward.invars)
        outvars = [program.outvars[i] for i in self._stays]
        eqns = needed_for(program.eqns, [*outvars, *self.kept], {*program.invars, *program.constvars})
        chosen = {id(eqn) for eqn in eqns}
        eqns = [eqn for eqn in program.eqns if id(eqn) in chosen or eqn.effects]

        def body(carry: Any, slices: Any) -> Any:
            inner = _inputs(program, [*values[:consts], *carry, *slices])
            for eqn in eqns:
                _evaluate(eqn, inner)
            outs = read(inner, outvars)
            return outs[:carried], (outs[carried:], read(inner, self.kept))

        init, xs = values[consts : consts + carried], values[consts + carried :]
        carry, (ys, stacks) = lax.scan(body, init, xs, **_settings(pair.forward))
        for i, value in zip(self._stays, [*carry, *ys], strict=True):
            env[pair.forward.outvars[i]] = value
        return stacks

    def backward(self, values: Any, env: Env, stacks: Sequence[Any]) -> None:
        """Run the loop of the backward pass; its outputs go to `env`."""
        eqn, program, pull = self.pair.backward, self.pair.program, self.pair.pull
        consts, carried = scan_counts(eqn)
        again = set(self.pair.again)
        own = read(values, [atom for i, atom in enumerate(eqn.invars) if i not in again])
        fixed = _inputs(program, [None] * len(program.invars))
        fixed |= zip((var for _, var in self._consts), read(values, [atom for atom, _ in self._consts]), strict=True)
        slices = read(values, [atom for atom, _ in self._slices])

        def body(carry: Any, xs: Any) -> Any:
            mine, sliced, kept = xs
            inner: Env = dict(fixed)
            inner |= zip((var for _, var in self._slices), sliced, strict=True)
            inner |= zip(self.kept, kept, strict=True)
            for one in self._again:
                _evaluate(one, inner)
            inner |= _inputs(pull, [*own[:consts], *carry, *mine])
            for one in pull.eqns:
                _evaluate(one, inner)
            outs = read(inner, pull.outvars)
            return outs[:carried], outs[carried:]

        init, mine = own[consts : consts + carried], own[consts + carried :]
        carry, ys = lax.scan(body, init, (mine, slices, list(stacks)), **_settings(eqn))
        env |= zip(eqn.outvars, [*carry, *ys], strict=True)


def _inputs(program: Program, values: Iterable[Any]) -> Env:
    return dict(zip([*program.constvars, *program.invars], [*program.consts, *values], strict=True))


def _settings(eqn: Any) -> dict[str, Any]:
    return {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
