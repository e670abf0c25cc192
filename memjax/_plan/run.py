"""Acting on a plan: the forward pass that keeps what the plan says, and the backward pass, stretch by stretch.

Before a stretch has its turn, what it reads passes a barrier together with the cotangents that have arrived, so that the compiler
cannot compute it earlier, nor find that it has been computed already and keep that instead. A plan without stretches keeps all
that the backward pass reads: the two passes are those that JAX makes, so that the step is the program it is without a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from memjax._core.barriers import barrier
from memjax._core.compat import is_ordered
from memjax._core.lists import Arrays
from memjax._core.program.costs import is_fusible
from memjax._core.program.dataflow import made_by, read_by, variables
from memjax._core.program.jaxpr import bind, read
from memjax._plan.codes import Code, encoded
from memjax._plan.derivative import Derivative, LoopPair, Passes
from memjax._plan.loop import Loop, Part, constants_in, evaluate_in
from memjax._plan.solve.order import in_time
from memjax._plan.solve.steps import Step, in_steps, run_steps

Env = dict[Any, Any]

# Compilers for GPUs find the largest element of each window from the operand alone, and may do so before the backward pass.
_OF_POOLS = "select_and_scatter_add"


class Piece(NamedTuple):
    """One stretch of a plan.

    Attributes:
      backward: the equations of the backward pass that have their turn with it.
      kept: variables of the forward pass.
      coded: codes of further ones.
      loop: the loop that it is, or None.
      parts: of the loop.
    """

    backward: Sequence[Any]
    kept: Sequence[Any]
    coded: Sequence[Code] = ()
    loop: LoopPair | None = None
    parts: Sequence[Part] = ()


@jax.tree_util.register_static
class KeepAll:
    """The two passes of a derivative as JAX makes them.

    Attributes:
      derivative: of the program.
    """

    def __init__(self, derivative: Passes):
        assert isinstance(derivative, Derivative)
        self.derivative = derivative

    def forward(self, inputs: Sequence[Any]) -> tuple[Arrays, Any]:
        """(outputs, pullback)."""
        return self.derivative.vjp(inputs)

    def backward(self, inputs: Sequence[Any], kept: Any, cotangents: Sequence[Any]) -> Arrays:
        """The cotangents of the inputs that are differentiated."""
        return jax.tree.leaves(kept(cotangents))


@jax.tree_util.register_static
class Run:
    """The two passes of a derivative under a plan.

    Args:
      derivative: of the program.
      pieces: in the order of the forward pass.
      in_steps_on: the platform for which the turns of the backward pass run in steps; None: the compiler has its way.

    Attributes:
      derivative: as given.
      kept: variables of the forward pass that are kept.
      coded: codes of those that are kept in codes.
      is_rounded: whether anything is kept in codes, in loops as well.
    """

    def __init__(self, derivative: Passes, pieces: Sequence[Piece], in_steps_on: str | None = None):
        program, backward = derivative.forward, derivative.backward
        self.derivative = derivative
        self._inputs = {*program.invars, *program.constvars}
        constants = constants_in((program, backward))
        loops = {
            id(one.loop.forward): Loop(one.loop, one.parts, in_steps_on, constants)
            for one in pieces
            if one.loop is not None
        }
        self._loops = loops
        self.is_rounded = any(one.coded or any(part.codes for part in one.parts) for one in pieces)
        self._mirrors = {id(loop.pair.backward): loop for loop in loops.values()}
        flow = program.flow
        known = {var for piece in pieces for var in piece.kept} | self._inputs
        reads: list[Any] = variables(backward.outvars)
        # (equations to run again, equations of the backward pass, codes, both kinds of equations in steps)
        self._turns: list[tuple[list[Any], list[Any], list[Code], list[Step] | None]] = []
        self.coded: list[Code] = []
        for piece in reversed(pieces):
            read = (var for eqn in piece.backward for var in self._read_by(eqn))
            wanted = [var for var in read if var in flow.place or var in self._inputs]
            codes = [code for code in piece.coded if code.of not in known]
            in_codes = {code.of for code in codes}
            again = flow.needed(wanted, known | in_codes)
            here = [*read_by(again), *wanted]
            codes = [code for code in codes if code.of in here]
            steps = None
            if in_steps_on is not None and piece.loop is None and not any(map(is_ordered, piece.backward)):
                steps = self._steps(again, piece.backward, in_steps_on)
            self._turns.append((again, list(piece.backward), codes, steps))
            self.coded += codes
            reads += here
        self.kept = [var for var in dict.fromkeys(reads) if var in known and var not in self._inputs]
        self._fusible = {var for var in self.kept if is_fusible(flow.makers[var])}
        stacked = {var for loop in loops.values() for var in loop.replaced}
        self._encoded = {code.of: code.codec for code in self.coded}
        wanted = variables([*derivative.outputs, *self.kept, *self._encoded])
        eqns = flow.needed([var for var in wanted if var not in stacked], always=flow.acting)
        chosen = {id(eqn) for eqn in eqns} | loops.keys()
        self._forward = [eqn for eqn in program.eqns if id(eqn) in chosen]

    def _steps(self, again: Sequence[Any], eqns: Sequence[Any], platform: str) -> list[Step]:
        """The equations of a turn in steps."""
        backward, mine = self.derivative.backward, {id(eqn) for eqn in eqns}
        others = {var for eqn in backward.eqns if id(eqn) not in mine for var in self._read_by(eqn)}
        return in_steps(in_time(again, eqns), variables(backward.outvars), others, platform)

    def _read_by(self, eqn: Any) -> list[Any]:
        """What an equation of the backward pass reads."""
        loop = self._mirrors.get(id(eqn))
        return variables(eqn.invars) if loop is None else loop.read_by_mirror

    def forward(self, inputs: Sequence[Any]) -> tuple[Arrays, Arrays]:
        """(outputs, what is kept)."""
        program = self.derivative.forward
        env: Env = dict(zip([*program.constvars, *program.invars], [*program.consts, *inputs], strict=True))
        stacks: Arrays = []
        codes: Env = {}
        for eqn in self._forward:
            if (loop := self._loops.get(id(eqn))) is not None:
                stacks += loop.forward(env)
            else:
                evaluate_in(eqn, env)
            for var in eqn.outvars:
                if var in self._encoded:
                    env[var], codes[var] = encoded(env[var], self._encoded[var])
        # Or else the compiler may fuse a kept mask, say, into its readers, and keep the larger array that it was made from.
        kept = [
            barrier([value])[0] if var in self._fusible else value
            for var, value in zip(self.kept, read(env, self.kept), strict=True)
        ]
        return read(env, self.derivative.outputs), [*kept, *(codes[code.of] for code in self.coded), *stacks]

    def backward(self, inputs: Sequence[Any], kept: Sequence[Any], cotangents: Sequence[Any]) -> Arrays:
        """The cotangents of the inputs that are differentiated."""
        program, backward = self.derivative.forward, self.derivative.backward
        known: Env = dict(zip([*program.constvars, *program.invars], [*program.consts, *inputs], strict=True))
        known |= zip(self.kept, kept[: len(self.kept)], strict=True)
        at = len(self.kept) + len(self.coded)
        code_of = dict(zip((code.of for code in self.coded), kept[len(self.kept) : at], strict=True))
        stacks = {}
        for eqn in self._forward:
            if (loop := self._loops.get(id(eqn))) is not None:
                stacks[id(loop)] = kept[at : at + loop.stack_count]
                at += loop.stack_count
        env: Env = dict(zip([*backward.constvars, *backward.invars], [*backward.consts, *cotangents], strict=True))
        cts = set(backward.invars)
        for again, eqns, codes, steps in self._turns:
            mine = dict.fromkeys(var for eqn in eqns for var in self._read_by(eqn))
            leaves = [var for var in read_by(again) if var in known]
            turn = {var: known[var] for var in mine if var in known}
            waiting = [var for var in mine if var in cts]
            if again or codes:
                planes, tree = jax.tree.flatten([code_of[code.of] for code in codes])
                passed = barrier([*read(env, waiting), *read(known, leaves), *planes])
                env |= zip(waiting, passed, strict=False)
                turn |= zip(leaves, passed[len(waiting) :], strict=False)
                found = jax.tree.unflatten(tree, passed[len(waiting) + len(leaves) :])
                turn |= {code.of: code.codec.decode(one) for code, one in zip(codes, found, strict=True)}
                for eqn in again if steps is None else ():
                    evaluate_in(eqn, turn)
            if steps is not None:
                env |= run_steps(steps, env | turn, made_by(eqns).keys() | cts)
            for eqn in eqns if steps is None else ():
                if (mirror := self._mirrors.get(id(eqn))) is not None:
                    mirror.backward(_Both(env, turn), env, stacks[id(mirror)])
                else:
                    values = read(_Both(env, turn), eqn.invars)
                    if eqn.primitive.name == _OF_POOLS:
                        values = barrier(values)
                    env |= zip(eqn.outvars, bind(eqn, values), strict=True)
            cts.update(made_by(eqns))
        return read(_Both(env, known), backward.outvars)


class _Both(dict):
    """Values in one of two environments."""

    def __init__(self, first: Env, second: Env):
        self._first, self._second = first, second

    def __getitem__(self, var: Any) -> Any:
        return self._first[var] if var in self._first else self._second[var]


def run(derivative: Passes, pieces: Sequence[Piece], in_steps_on: str | None = None) -> Run | KeepAll:
    """The two passes, by what a plan's pieces keep; with no pieces, all is kept."""
    return Run(derivative, pieces, in_steps_on) if pieces else KeepAll(derivative)
