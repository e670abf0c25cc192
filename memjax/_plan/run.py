"""Acting on a plan: the forward pass that keeps what the plan says, and the backward pass, stretch by stretch.

Before a stretch has its turn, what it reads passes a barrier together with the cotangents that have arrived, so that the compiler
cannot compute it earlier, nor find that it has been computed already and keep that instead. A plan without stretches keeps all
that the backward pass reads: the two passes are those that JAX makes, so that the step is the program it is without a plan.

On several devices the barrier also waits for what the turn before the last has made for later: gradients of weights, say. XLA's
latency hiding scheduler hides sending behind computing as long as memory lasts, all that the device has and not the budget, and
puts off the products that make gradients. Then what these read of many layers is alive at once. One turn is
left to send a gradient in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from memjax._core.arrays import is_float
from memjax._core.barriers import barrier
from memjax._core.compat import is_ordered
from memjax._core.lists import Arrays
from memjax._core.program.costs import is_fusible
from memjax._core.program.dataflow import made_by, read_by, variables
from memjax._core.program.jaxpr import bind, evaluate_in, read
from memjax._core.program.primitives import RANDOM
from memjax._plan.codes import Code, codes_in, encoded
from memjax._plan.derivative import Passes
from memjax._plan.early.loop import EarlyLoop
from memjax._plan.loop import Loop, constants_in
from memjax._plan.solve.chain import Chain, Choice
from memjax._plan.solve.order import in_time
from memjax._plan.solve.steps import Step, in_steps, run_steps
from memjax._plan.solve.transposed import read_transposed

Env = dict[Any, Any]

# What compilers make of one operand as soon as it is there, which may be before the backward pass. Those for GPUs find the
# largest element of each window, XLA:CPU transposes what convolutions read.
_MADE_EARLY = {"cpu": frozenset(("conv_general_dilated",))}
_MADE_EARLY_ELSEWHERE = frozenset(("select_and_scatter_add",))


@jax.tree_util.register_static
class KeepAll:
    """The two passes of a derivative as JAX makes them.

    Args:
      derivative: of a program, or what else has a method `vjp`, from inputs to outputs and their pullback.
    """

    def __init__(self, derivative: Any):
        self.derivative = derivative

    def forward(self, inputs: Sequence[Any]) -> tuple[Arrays, Any]:
        """(outputs, pullback)."""
        return self.derivative.vjp(inputs)

    def backward(self, inputs: Sequence[Any], kept: Any, cotangents: Sequence[Any]) -> Arrays:
        """The cotangents of the inputs that are differentiated."""
        return jax.tree.leaves(kept(cotangents))


class Turn(NamedTuple):
    """What runs in the backward pass when a stretch has its turn.

    Attributes:
      again: equations of the forward pass.
      backward: equations of the backward pass.
      codes: what is decoded.
      gathered: inputs that the backward equations read, to be gathered again if they are sharded.
      steps: both kinds of equations in steps, or None.
    """

    again: list[Any]
    backward: list[Any]
    codes: list[Code]
    gathered: list[Any]
    steps: list[Step] | None


@jax.tree_util.register_static
class Run:
    """The two passes of a derivative under a plan.

    Args:
      chain: of the program.
      choices: its stretches, in the order of the forward pass, and what is kept of each.
      in_steps_on: the platform for which the turns of the backward pass run in steps; None: the compiler has its way.
      derivative: of which less is differentiated than of the chain's; None: that one.
      gathers_again: whether sharded inputs are gathered again for the backward pass of a stretch that runs again.
        `jax.checkpoint` does so. Otherwise the compiler keeps them gathered from the forward pass on. With that, a turn waits
        for what the turn before the last has made.

    Attributes:
      derivative: as given.
      kept: variables of the forward pass that are kept.
      coded: codes of those that are kept in codes.
      is_rounded: whether anything is kept in codes, in loops as well.
      turns: what runs in the backward pass, by stretch.
    """

    def __init__(
        self,
        chain: Chain,
        choices: Sequence[Choice],
        in_steps_on: str | None = None,
        derivative: Passes | None = None,
        *,
        gathers_again: bool = False,
    ):
        self.derivative = derivative = derivative or chain.derivative
        program, backward, flow = derivative.forward, derivative.backward, derivative.forward.flow
        self._inputs = {*program.invars, *program.constvars}
        self._is_cpu = chain.rates.platform == "cpu"
        # Not in loops: XLA:CPU compiles some small ones as one function, and aborts if there is a barrier in it.
        self._written = read_transposed(backward.flow) if self._is_cpu else set[Any]()
        self._made_early = _MADE_EARLY.get(chain.rates.platform, _MADE_EARLY_ELSEWHERE)
        there = set(map(id, backward.eqns))
        constants = constants_in((program, backward))
        self._loops: dict[int, Loop] = {}
        for one in choices:
            if one.option.parts and id((pair := chain.loops[one.start]).backward) in there:
                of_loop = chain.codes_of_loop(pair), in_steps_on, constants, one.option.in_blocks
                loop = (Loop if pair.early is None else EarlyLoop)(pair, one.option.parts, *of_loop)
                self._loops[id(pair.forward)] = loop
        self._mirrors = {id(loop.pair.backward): loop for loop in self._loops.values()}
        stretches = [(one, chain.between(one.start, one.stop)) for one in choices]
        known = {var for one, segment in stretches for var in (*one.option.kept, *segment.crossing)} | self._inputs
        reads: list[Any] = variables(backward.outvars)
        self.turns: list[Turn] = []
        for one, segment in reversed(stretches):
            eqns = [eqn for eqn in segment.backward if id(eqn) in there]
            read = (var for eqn in eqns for var in self._read_by(eqn))
            wanted = [var for var in read if var in flow.place or var in self._inputs]
            coded = [var for var in one.option.coded if var not in known]
            again = flow.needed(wanted, known.union(coded))
            here = [*read_by(again), *wanted]
            codes = codes_in(chain.codes, [var for var in coded if var in here])
            steps = None
            # A loop that runs by the plan has steps of its own. Its backward pass may run in the turn of an earlier stretch.
            is_in_order = any(id(eqn) in self._mirrors or is_ordered(eqn) for eqn in eqns)
            if in_steps_on is not None and not is_in_order:
                steps = self._steps(again, eqns, in_steps_on)
            # The last of several stretches, which is the first here, has just gathered its own.
            gathered = self._gathered(eqns) if gathers_again and (self.turns or len(stretches) == 1) else []
            self.turns.append(Turn(again, eqns, codes, gathered, steps))
            reads += here
        self._for_later = self._made_for_later() if gathers_again else [[] for _ in self.turns]
        self.coded = [code for turn in self.turns for code in turn.codes]
        self.is_rounded = any(code.rounds for code in self.coded) or any(
            loop.is_rounded for loop in self._loops.values()
        )
        self.kept = [var for var in dict.fromkeys(reads) if var in known and var not in self._inputs]
        self._fusible = {var for var in self.kept if is_fusible(flow.makers[var])}
        self._encoded = {code.of: code for code in self.coded}
        stacked = {var for loop in self._loops.values() for var in loop.replaced}
        wanted = variables([*derivative.outputs, *self.kept, *self._encoded])
        eqns = flow.needed([var for var in wanted if var not in stacked], always=flow.acting)
        chosen = {id(eqn) for eqn in eqns} | self._loops.keys()
        self._forward = [eqn for eqn in program.eqns if id(eqn) in chosen]
        self._bits_after = self._random_bits_after()

    @property
    def has_loops(self) -> bool:
        """Whether iterations of loops run by the plan."""
        return bool(self._loops)

    def _steps(self, again: Sequence[Any], eqns: Sequence[Any], platform: str) -> list[Step]:
        """The equations of a turn in steps."""
        backward, mine = self.derivative.backward, {id(eqn) for eqn in eqns}
        others = {var for eqn in backward.eqns if id(eqn) not in mine for var in self._read_by(eqn)}
        return in_steps(in_time(again, eqns), variables(backward.outvars), others, platform)

    def _random_bits_after(self) -> dict[int, Any]:
        """For each equation that makes random bits the kept array before it.

        They need a key alone, so that a compiler may make those of all layers before the first one runs.
        """
        found: dict[int, Any] = {}
        before = None
        kept = set(self.kept)
        for eqn in self._forward:
            if eqn.primitive.name in RANDOM and before is not None:
                found[id(eqn)] = before
            before = next((var for var in eqn.outvars if var in kept and is_float(var.aval)), before)
        return found

    def _made_for_later(self) -> list[list[Any]]:
        """For each turn what it makes that the turn after it does not read, and that is a result or read later."""
        found: list[list[Any]] = []
        later, following = set(variables(self.derivative.backward.outvars)), set[Any]()
        for turn in reversed(self.turns):
            found.append([var for var in made_by(turn.backward) if var in later and var not in following])
            following = {var for eqn in turn.backward for var in self._read_by(eqn)}
            later |= following
        return found[::-1]

    def _gathered(self, eqns: Sequence[Any]) -> list[Any]:
        """The arrays among the inputs that these equations read; loops gather slices, each in its turn."""
        found = read_by(eqn for eqn in eqns if id(eqn) not in self._mirrors)
        return [var for var in found if var in self._inputs and var.aval.shape]

    def _read_by(self, eqn: Any) -> list[Any]:
        """What an equation of the backward pass reads."""
        loop = self._mirrors.get(id(eqn))
        return variables(eqn.invars) if loop is None else loop.read_by_mirror

    def forward(self, inputs: Sequence[Any]) -> tuple[Arrays, Arrays]:
        """(outputs, what is kept)."""
        program = self.derivative.forward
        env = program.given(inputs)
        stacks: Arrays = []
        codes: Env = {}
        for eqn in self._forward:
            if (loop := self._loops.get(id(eqn))) is not None:
                stacks += loop.forward(env)
            elif (before := self._bits_after.get(id(eqn))) is not None:
                key, *counts = read(env, eqn.invars)
                key, _ = barrier((key, env[before]))
                env |= zip(eqn.outvars, bind(eqn, [key, *counts]), strict=True)
            else:
                evaluate_in([eqn], env)
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
        known = program.given(inputs)
        known |= zip(self.kept, kept[: len(self.kept)], strict=True)
        at = len(self.kept) + len(self.coded)
        code_of = dict(zip((code.of for code in self.coded), kept[len(self.kept) : at], strict=True))
        stacks = {}
        for eqn in self._forward:
            if (loop := self._loops.get(id(eqn))) is not None:
                stacks[id(loop)] = kept[at : at + loop.stack_count]
                at += loop.stack_count
        env = backward.given(cotangents)
        cts = set(backward.invars)
        late: list[Any] = []  # that no barrier has waited for
        for number, (again, eqns, codes, gathered, steps) in enumerate(self.turns):
            mine = dict.fromkeys(var for eqn in eqns for var in self._read_by(eqn))
            # XLA:CPU runs what it can before cotangents arrive: where little room is left, all that the turn reads waits.
            early = mine if self._is_cpu and steps is not None else ()
            leaves = [var for var in dict.fromkeys([*read_by(again), *gathered, *early]) if var in known]
            turn = {var: known[var] for var in mine if var in known}
            waiting = [var for var in mine if var in cts]
            late += self._for_later[number - 2] if number > 1 else []
            if again or codes or (early and number):
                waiting, late = [*dict.fromkeys((*waiting, *late))], []
                planes, tree = jax.tree.flatten([code_of[code.of] for code in codes])
                passed = barrier([*read(env, waiting), *read(known, leaves), *planes])
                env |= zip(waiting, passed, strict=False)
                turn |= zip(leaves, passed[len(waiting) :], strict=False)
                found = jax.tree.unflatten(tree, passed[len(waiting) + len(leaves) :])
                turn |= {code.of: code.codec.decode(one) for code, one in zip(codes, found, strict=True)}
                evaluate_in(again if steps is None else (), turn)
            if steps is not None:
                env |= run_steps(steps, env | turn, made_by(eqns).keys() | cts)
            for eqn in eqns if steps is None else ():
                if (mirror := self._mirrors.get(id(eqn))) is not None:
                    mirror.backward(_Both(env, turn), env, stacks[id(mirror)])
                else:
                    values = read(_Both(env, turn), eqn.invars)
                    if eqn.primitive.name in self._made_early:
                        values = barrier(values)
                    made = bind(eqn, values)
                    made = made if self._written.isdisjoint(eqn.outvars) else barrier(made)
                    env |= zip(eqn.outvars, made, strict=True)
            cts.update(made_by(eqns))
        return read(_Both(env, known), backward.outvars)


class _Both(dict):
    """Values in one of two environments."""

    def __init__(self, first: Env, second: Env):
        self._first, self._second = first, second

    def __getitem__(self, var: Any) -> Any:
        return self._first[var] if var in self._first else self._second[var]
