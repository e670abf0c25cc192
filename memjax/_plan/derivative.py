"""The derivative of a program as two programs: one forwards, which gives residuals, and one backwards, which reads them.

Both are straight lines of equations, rules of custom derivatives included, so that what the backward pass reads can be kept
or computed again one by one. A scan is one equation in each; `loop_pairs` finds the two, and their bodies are such a pair, too.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Collection, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from memjax._core.arrays import is_on_host, strong
from memjax._core.backward.passes import TracedPasses, vjp
from memjax._core.compat import bodies, eval_jaxpr, primitive_name, scan_counts
from memjax._core.lists import Arrays, pick
from memjax._core.program.dataflow import Dataflow, is_literal, read_by, renamed, variables
from memjax._core.program.jaxpr import Program, as_closed, calls_in_place, instead, trace, without_dead_equations
from memjax._core.program.primitives import CHECKPOINTS
from memjax._plan.early.ended import in_loop, with_ends
from memjax._plan.early.turns import Early, early, in_one
from memjax._plan.solve.concatenations import late_concatenations
from memjax._plan.solve.pools import with_indices
from memjax._plan.solve.ties import with_orders
from memjax._plan.tile.fission import with_fission


class Passes:
    """A forward and a backward pass, whoever made them.

    Attributes:
      forward: from the inputs to the outputs, then residuals. Concatenations are where they are read: `late_concatenations`.
      backward: from cotangents to results. It reads variables of `forward`: the residuals.
      outputs: the outputs among `forward.outvars`.
      wrt: which inputs are differentiated.
      outs: which outputs have a cotangent.
      of_blocks: they are those of a chain of blocks inside of a larger program: outputs and cotangents are temporary.
      in_use: results whose memory holds something else until they are made: donated arguments, what a loop carries.
      constants: by position, inputs that are NumPy arrays which the function holds.
      around: bytes of temporary memory that hold something else while the passes run: of a step, see `Body.note_around`.
      axes: sizes of the named axes that collectives run over.
    """

    forward: Program
    backward: Program
    outputs: list[Any]
    wrt: tuple[bool, ...]
    outs: tuple[bool, ...]
    of_blocks: bool = False
    in_use: Set[Any] = frozenset()
    constants: Mapping[int, np.ndarray] = MappingProxyType({})
    around: int = 0
    axes: Mapping[str, int] = MappingProxyType({})
    _found: tuple[Program, Program, list[LoopPair]] | None = None
    _in_plans: tuple[str, Program, Program, Passes] | None = None

    def in_plans(self, platform: str) -> Passes:
        """The passes as plans run them on a platform: `with_indices` and `with_orders`, in loops as well, and there
        `with_fission`. The same each time."""
        found = self._in_plans
        now = platform, self.forward, self.backward
        if found is None or found[0] != platform or not all(map(operator.is_, found[1:3], now[1:])):
            self._in_plans = found = *now, self._as_planned(platform)
        found[3].in_use, found[3].around = self.in_use, self.around  # which are noted later
        return found[3]

    def _as_planned(self, platform: str) -> Passes:
        of = self
        forward, backward = (with_fission(one, self.axes, platform) for one in (self.forward, self.backward))
        if forward is not self.forward or backward is not self.backward:
            of = copy.copy(self)
            of.forward, of.backward = forward, backward  # with loops of their own
        changed = lambda forward, backward: with_orders(*with_indices(forward, backward, self.axes))
        inside = [(pair, *changed(pair.program, pair.pull)) for pair in of.loops]
        forward, backward = changed(of.forward, of.backward)
        same = all(a is pair.program and b is pair.pull for pair, a, b in inside)
        if same and forward is of.forward and backward is of.backward:
            return of
        return of.with_loops(forward, backward, [pair._replace(program=a, pull=b) for pair, a, b in inside])

    @property
    def loops(self) -> list[LoopPair]:
        """The scans whose bodies can be planned. Their bodies have the same variables each time."""
        found = self._found
        if found is None or found[0] is not self.forward or found[1] is not self.backward:
            self._found = found = self.forward, self.backward, loop_pairs(self)
        return found[2]

    @loops.setter
    def loops(self, pairs: list[LoopPair]) -> None:
        self._found = self.forward, self.backward, pairs

    def with_loops(self, forward: Program, backward: Program, loops: list[LoopPair]) -> Passes:
        """Those with other equations, and with the pairs of loops in them."""
        found = copy.copy(self)
        found.forward, found.backward, found._found = forward, backward, (forward, backward, loops)
        return found

    def of_fewer(self, wrt: Sequence[bool]) -> Passes:
        """Those with respect to some of the inputs only: the same forward pass, and less of the backward pass."""
        found = copy.copy(self)
        found.wrt = tuple(wrt)
        here = self.backward
        outs = pick(here.outvars, pick(wrt, self.wrt))
        found.backward = without_dead_equations(Program(here.constvars, here.consts, here.invars, outs, here.eqns))
        return found


class Derivative(Passes):
    """The derivative of a closed jaxpr with respect to some of its inputs.

    Args:
      closed: the program. Its constants and inputs together are the inputs here. Checkpoints in it are taken out: what to keep
        is the plan's choice.
      types: of the inputs.
      wrt: which inputs to differentiate with respect to.
      outs: which outputs have a cotangent.
      axes: sizes of the named axes that its collectives run over.
      of_blocks: the program is a chain of blocks inside of a larger one: its outputs and their cotangents are temporary.
    """

    def __init__(
        self,
        closed: Any,
        types: Sequence[Any],
        wrt: Sequence[bool],
        outs: Sequence[bool],
        axes: dict[str, int],
        *,
        of_blocks: bool = False,
    ):
        self.wrt, self.outs, self.of_blocks, self.axes = tuple(wrt), tuple(outs), of_blocks, axes
        self._primal, self._n_consts = without_checkpoints(closed), len(closed.consts)
        self.constants = {i: value for i, value in enumerate(closed.consts) if isinstance(value, np.ndarray)}
        cotangents = [strong(aval.to_ct_aval()) for aval in pick(closed.out_avals, outs)]
        in_one_loop = in_one(self._primal)
        self._set(in_one_loop, types, cotangents)
        if in_one_loop is self._primal:
            return
        pairs = loop_pairs(self)
        paired = {id(pair.forward) for pair in pairs if pair.early is not None}
        left = [eqn for eqn in self.forward.eqns if eqn.primitive.name == "scan" and id(eqn) not in paired]
        if any(scan_counts(eqn)[1] < len(eqn.outvars) and in_loop(eqn) is not None for eqn in left):
            self._set(self._primal, types, cotangents)  # a plan could not leave out the turns that do nothing
        else:
            self.forward = with_ends(self.forward, {id(pair.forward) for pair in pairs}, axes)

    def _set(self, primal: Any, types: Sequence[Any], cotangents: Sequence[Any]) -> None:
        """The passes of a program."""
        outputs, axes = functools.partial(self._outputs, primal), dict(self.axes)
        traced = TracedPasses(outputs, types, self.wrt, self.outs, axes)
        self.forward, self.outputs = late_concatenations(traced.forward), traced.outputs
        backward = without_dead_equations(traced.backward(cotangents))
        self.backward = with_copies(backward, self.forward.flow.place.keys(), axes)

    def vjp(self, inputs: Sequence[Any]) -> tuple[Arrays, Any]:
        """The outputs and the pullback of those in `outs`, as JAX makes them: with all that the backward pass reads kept."""
        return vjp(functools.partial(self._outputs, self._primal), inputs, self.wrt, self.outs)

    def _outputs(self, primal: Any, inputs: Arrays) -> Arrays:
        n = self._n_consts
        return eval_jaxpr(primal.jaxpr, [*inputs[:n], *primal.consts[n:]], inputs[n:])  # the first constants are inputs


def with_copies(backward: Program, made: Collection[Any], axes: dict[str, int]) -> Program:
    """The program in which an equation makes each result that is one of `made`, so that it is read in a turn like the others.

    Rules of custom derivatives may return a residual as it is.
    """
    eqns, outs = list(backward.eqns), list(backward.outvars)
    for i, atom in enumerate(outs):
        if not is_literal(atom) and atom in made:
            copy = trace(jnp.copy, [atom.aval], axes).jaxpr.eqns[0].replace(invars=[atom])
            eqns.append(copy)
            [outs[i]] = copy.outvars
    return Program(backward.constvars, backward.consts, backward.invars, outs, eqns)


def without_checkpoints(closed: Any) -> Any:
    """The closed jaxpr with the bodies of checkpoints in their place, in scans as well."""
    if not _has_checkpoints(closed.jaxpr):
        return closed
    program = calls_in_place(closed, differentiable=True, checkpoints=True)
    eqns = []
    for eqn in program.eqns:
        if eqn.primitive.name == "scan":
            body = without_checkpoints(as_closed(eqn.params["jaxpr"]))
            eqn = eqn.replace(params=eqn.params | {"jaxpr": body})
        eqns.append(eqn)
    debug = closed.jaxpr.debug_info
    jaxpr = core.Jaxpr(program.constvars, program.invars, program.outvars, eqns, closed.jaxpr.effects, debug)
    return core.ClosedJaxpr(jaxpr, program.consts)


def _has_checkpoints(jaxpr: Any) -> bool:
    inside = (body for eqn in jaxpr.eqns for body in bodies(eqn))
    return any(primitive_name(eqn) in CHECKPOINTS for eqn in jaxpr.eqns) or any(map(_has_checkpoints, inside))


class LoopPair(NamedTuple):
    """A scan of the forward pass and the scan of the backward pass that reads what it stacks.

    Attributes:
      forward, backward: the equations.
      program: the body of the forward scan: (constants, carried, slices) to (carried, stacked).
      pull: the body of the backward scan. What the forward scan stacks for it alone it reads as variables of `program`.
      again: positions, among the operands of `backward`, of what `pull` reads as such variables instead.
      free: inputs of `program` that are there again in the backward pass: all but what is carried.
      residuals: positions, among the outputs of `forward`, of what nothing but `backward` reads.
      in_place: by operand of `backward` that it carries, its position among what is carried: a stacked array of which a turn
        writes the slice that has its number. What the forward scan reads of such an operand is in what the other carries.
      early: of a loop that ends early, its turns; `program` and `pull` are what runs before it ends. Else None.
    """

    forward: Any
    backward: Any
    program: Program
    pull: Program
    again: list[int]
    free: list[Any]
    residuals: list[int]
    in_place: dict[Any, int]
    early: Early | None = None

    @property
    def numbers(self) -> int | None:
        """Position, among what the backward loop scans over, of the number of a turn; None if it writes nothing in place."""
        stacks = sorted(self.in_place, key=lambda atom: is_on_host(atom.aval))
        return self._number_of(self.in_place[stacks[0]]) if stacks else None

    @property
    def counts(self) -> set[int | None]:
        """Positions of such numbers of turns that count slices on the host. XLA copies these without a kernel, while others run,
        if it sees by constants that they follow one another."""
        return {self._number_of(k) for atom, k in self.in_place.items() if is_on_host(atom.aval)}

    def _number_of(self, k: int) -> int | None:
        return _number_of(self.pull, scan_counts(self.backward), k)

    @property
    def writes(self) -> list[Any]:
        """The equations of `pull` that write in place."""
        return [self.pull.flow.makers[self.pull.outvars[k]] for k in self.in_place.values()]


def loop_pairs(derivative: Passes) -> list[LoopPair]:
    """The scans whose bodies can be planned."""
    forward, backward = derivative.forward, derivative.backward
    readers = backward.flow.readers
    elsewhere = {*read_by(forward.eqns), *variables([*derivative.outputs, *backward.outvars])}
    found = []
    for eqn in forward.eqns:
        if eqn.primitive.name != "scan":
            continue
        for i in dict.fromkeys(i for out in eqn.outvars for i in readers.get(out, [])):
            if _mirrors(eqn, backward.eqns[i]):
                only = {out for out in eqn.outvars if readers.get(out, [i]) == [i]} - elsewhere
                pair = _pair(eqn, backward.eqns[i], only, backward.flow)
                if pair.again:
                    found.append(pair)
                    break
    return found


def can_be_split(pair: LoopPair) -> bool:
    """Whether both loops can run in parts: what they stack has to be written into arrays of zeros."""
    stacked = [*pair.forward.outvars, *pair.backward.outvars]
    return not any(jnp.issubdtype(var.aval.dtype, jax.dtypes.extended) for var in stacked)


def _mirrors(forward: Any, backward: Any) -> bool:
    same = backward.primitive.name == "scan" and backward.params["length"] == forward.params["length"]
    return same and backward.params["reverse"] != forward.params["reverse"]


def _pair(forward: Any, backward: Any, only: set[Any], flow: Dataflow) -> LoopPair:
    """The pair, of what the forward scan stacks those in `only` being residuals."""
    program = calls_in_place(as_closed(forward.params["jaxpr"]), differentiable=False)
    pull = without_dead_equations(calls_in_place(as_closed(backward.params["jaxpr"]), differentiable=False))
    consts, carried = scan_counts(forward)
    positions = {out: i for i, out in enumerate(forward.outvars) if i >= carried and out in only}
    names, residuals, again = {}, set(), []
    for i, (atom, var) in enumerate(zip(backward.invars, pull.invars, strict=True)):
        position = None if is_literal(atom) else positions.get(atom)
        if i >= sum(scan_counts(backward)) and position is not None and not is_literal(program.outvars[position]):
            names[var] = program.outvars[position]
            residuals.add(position)
            again.append(i)
    free = [*program.constvars, *program.invars[:consts], *program.invars[consts + carried :]]
    pull = instead(pull, names)
    if (ends := _early(forward, backward, program, pull, len(residuals))) is not None:
        found, program, pull = ends
        free = [*program.constvars, *program.invars[:consts]]
        return LoopPair(forward, backward, program, pull, again, free, sorted(residuals), {}, found)
    own = [atom for i, atom in enumerate(backward.invars) if i not in set(again)]
    in_place = _in_place(own, scan_counts(backward), pull, flow)
    return LoopPair(forward, backward, program, pull, again, free, sorted(residuals), in_place)


def _early(
    forward: Any, backward: Any, program: Program, pull: Program, residuals: int
) -> tuple[Early, Program, Program] | None:
    """How two loops end early, and what their turns do before that. None if they do not.

    Args:
      forward, backward: the loops.
      program, pull: their bodies, the second with what it reads of the first.
      residuals: of the forward loop, all it stacks if it is one.
    """
    (consts, carried), (consts_back, carried_back) = scan_counts(forward), scan_counts(backward)
    is_plain = consts + carried == len(program.invars) and carried + residuals == len(program.outvars)
    if not is_plain or carried_back != len(pull.outvars) or consts_back + carried_back != len(pull.invars):
        return None
    one, other = early(program, consts, carried), early(pull, consts_back, carried_back)
    if one is None or other is None or one.running != other.running or one.asks.outvars != other.asks.outvars:
        return None
    # What the forward loop stacks has other names in the branch. Of those that do not run nothing is read.
    names = dict(zip(program.outvars[carried:], one.turn.outvars[carried:], strict=True))
    names = {var: other for var, other in names.items() if not is_literal(var)}
    renamed_pull = Program(
        other.turn.constvars,
        other.turn.consts,
        other.turn.invars,
        renamed(other.turn.outvars, names),
        [eqn.replace(invars=renamed(eqn.invars, names)) for eqn in other.turn.eqns],
    )
    return one, one.turn, without_dead_equations(renamed_pull)


def _in_place(own: Sequence[Any], counts: tuple[int, int], pull: Program, flow: Dataflow) -> dict[Any, int]:
    """Which of the operands that `pull` reads are carried and written in place, a slice a turn: see `LoopPair`."""
    consts, carried = counts
    found = {}
    for k, atom in enumerate(own[consts : consts + carried]):
        number = None if is_literal(atom) else _number_of(pull, counts, k)
        if number is not None:
            maker = flow.makers.get(own[consts + carried + number])
            if maker is not None and maker.primitive.name == "iota":
                found[atom] = k
    return found


def _number_of(pull: Program, counts: tuple[int, int], k: int) -> int | None:
    """Where, among what a loop scans over, the number is of the slice of the array carried at `k` that a turn writes."""
    consts, carried = counts
    out = pull.outvars[k]
    eqn = None if is_literal(out) else pull.flow.makers.get(out)
    rows = pull.invars[consts + carried :]
    if eqn is None or eqn.primitive.name != "dynamic_update_slice" or eqn.invars[0] is not pull.invars[consts + k]:
        return None
    written, number, others = eqn.invars[1], eqn.invars[2], eqn.invars[3:]
    is_whole = written.aval.shape == (1, *out.aval.shape[1:]) and all(is_literal(a) and not a.val for a in others)
    return rows.index(number) if is_whole and number in rows else None
