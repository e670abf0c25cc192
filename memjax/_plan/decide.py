"""From a derivative and a budget to a plan: solve, compile, compare, and solve again with what was learnt."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from memjax._core import costs
from memjax._core.check import readable_bytes
from memjax._core.compat import source_line
from memjax._core.costs import array_bytes
from memjax._core.jaxpr import is_literal
from memjax._plan.chain import Chain, Choice
from memjax._plan.codes import BITS, Code
from memjax._plan.compiled import device_of, step_bytes
from memjax._plan.derivative import Derivative, LoopPair
from memjax._plan.result import Kept, Plan, Point, Stretch
from memjax._plan.run import Piece, Run

_MOST_COMPILED = 4  # once, and after each of at most three corrections
_FULL = 0.985  # of the budget: then there is little to gain by another try
_GAIN = 5e-4  # of the step: what another try has to promise
_MOST_POINTS = 100
_MOST_PROGRAMS = 16
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def decide(
    derivative: Derivative, types: Sequence[Any], shardings: Sequence[Any], budget: int | str, *, compress: bool = False
) -> Plan:
    """The fastest plan of which the compiled step takes no more than `budget`, or "min": the plan of the least memory.

    Raises:
      ValueError: the budget is less than the least possible.
    """
    chain, known = _known(derivative, shardings, compress)
    derivative = chain.derivative
    least = chain.frontier[0][0]
    tried: list[_Try] = []

    def attempt(predicted: int, choices: list[Choice], name: str = "") -> bool:
        """Compile a plan, unless that was done; whether it is a new one."""
        if any(one.choices == choices for one in tried):
            return False
        if (predicted, name) not in known:
            run = Run(derivative, pieces(chain, choices))
            known[predicted, name] = step_bytes(derivative, run, types, shardings)
        nbytes = known[predicted, name]
        tried.append(_Try(predicted, predicted if nbytes is None else nbytes, nbytes is not None, choices))
        return True

    def least_memory() -> _Try:
        attempt(least, chain.least_choices(), "least")
        attempt(least, chain.choices(least))
        return min(tried, key=lambda one: (one.nbytes, one.seconds))

    if budget == "min":
        best = least_memory()
        return _plan(chain, best, best.nbytes)
    assert isinstance(budget, int)
    for predicted, name in list(known):
        attempt(predicted, chain.least_choices() if name else chain.choices(predicted), name)
    for turn in range(_MOST_COMPILED):
        # Plans for budgets far from this one say little about it: begin with what is predicted for it.
        wanted = _next(tried, budget) if turn else budget
        predicted, seconds = max((point for point in chain.frontier if point[0] <= wanted), default=chain.frontier[0])
        if any(one.predicted == predicted for one in tried):  # the model may have two in the wrong order: try the next
            limit = min((one.predicted for one in tried if one.nbytes > budget), default=math.inf)
            predicted, seconds = min(
                (point for point in chain.frontier if predicted < point[0] < limit), default=(predicted, seconds)
            )
        fastest = min((one.seconds for one in tried if one.nbytes <= budget), default=math.inf)
        is_bounded = any(one.nbytes > budget for one in tried)
        if any(_FULL * budget <= one.nbytes <= budget and one.seconds == fastest for one in tried):
            break
        if is_bounded and seconds > fastest - _GAIN * chain.base_seconds:
            break
        if not attempt(predicted, chain.choices(predicted)):
            break
    if not any(one.nbytes <= budget for one in tried):
        least_memory()
    fitting = [one for one in tried if one.nbytes <= budget]
    if not fitting:
        raise ValueError(_too_little(chain, budget, min(one.nbytes for one in tried)))
    return _plan(chain, min(fitting, key=lambda one: (one.seconds, one.nbytes)), budget)


_Compiled = dict[tuple[int, str], int | None]
_solved: dict[str, tuple[Chain, _Compiled]] = {}
"""By program: its chain, and compiled bytes by what had been predicted. A plan for another budget starts from them."""


def _known(derivative: Derivative, shardings: Sequence[Any], compress: bool) -> tuple[Chain, _Compiled]:
    """What is known of an equal program, or a new chain, solved."""
    key = f"{digest(derivative)} {jax.default_backend()} {[str(sharding) for sharding in shardings]} {compress}"
    if key in _solved:
        return _solved[key]
    found: tuple[Chain, _Compiled] = Chain(derivative, costs.device(device_of(shardings)), compress=compress), {}
    consts = [*derivative.forward.consts, *derivative.backward.consts]
    if not any(isinstance(const, jax.core.Tracer) for const in consts):  # which would outlive its trace
        if len(_solved) == _MOST_PROGRAMS:
            _solved.pop(next(iter(_solved)))
        _solved[key] = found
    return found


class _Try(NamedTuple):
    """A plan that was compiled, if it could be.

    Attributes:
      predicted: bytes as the model has them.
      nbytes: as compiled.
      is_compiled: whether that is so, or `nbytes` is the prediction.
      choices: the plan.
    """

    predicted: int
    nbytes: int
    is_compiled: bool
    choices: list[Choice]

    @property
    def seconds(self) -> float:
        """Spent on running again and on keeping."""
        return sum(choice.option.seconds for choice in self.choices)


def _next(tried: Sequence[_Try], budget: int) -> float:
    """The prediction at which the compiled bytes should meet the budget: by the line through the two nearest tries."""
    points = sorted((one.nbytes, one.predicted) for one in tried)
    below = [point for point in points if point[0] <= budget]
    above = [point for point in points if point[0] > budget]
    if below and above:
        (c0, p0), (c1, p1) = below[-1], above[0]
        between = p0 + (budget - c0) * (p1 - p0) / max(c1 - c0, 1)
        return min(between, p1 - (c1 - budget)) if p1 > p0 else p0
    compiled, predicted = below[-1] if below else above[0]
    # The model is off by an amount, mostly; or, where a step is sharded, by a factor.
    far, near = predicted * budget / max(compiled, 1), predicted + (budget - compiled)
    return far if below and len(tried) > 1 else near


def pieces(chain: Chain, choices: Sequence[Choice]) -> list[Piece]:
    """The plan's stretches as they are run."""
    found = []
    for choice in choices:
        segment = chain.between(choice.start, choice.stop)
        loop = chain.loops[choice.start] if choice.option.parts else None
        parts = tuple(
            (turns, option.kept, codes_in(chain, loop, option.coded)) for turns, option in choice.option.parts
        )
        kept = [*choice.option.kept, *segment.crossing]
        found.append(Piece(segment.backward, kept, codes_in(chain, None, choice.option.coded), loop, parts))
    return found


def pieces_of_plan(chain: Chain, plan: Plan) -> list[Piece]:
    """The same for a plan that was made before, of the same program."""
    found: list[Piece] = []
    for (start, stop), same in itertools.groupby(plan.stretches, lambda stretch: (stretch.start, stretch.stop)):
        stretches = list(same)
        segment = chain.between(start, stop)
        loop = None if stretches[0].turns is None else chain.loops[start]
        program = chain.derivative.forward if loop is None else loop.program
        parts = []
        for stretch in stretches:
            kept: dict[bool, list[Any]] = {True: [], False: []}
            for one in stretch.kept:
                outs = program.invars if one.equation < 0 else program.eqns[one.equation].outvars
                kept[one.bits is not None].append(outs[one.output])
            parts.append((stretch.turns or 0, kept[False], codes_in(chain, loop, kept[True])))
        _, mine, coded = parts[0] if loop is None else (0, [], [])
        found.append(Piece(segment.backward, [*mine, *segment.crossing], coded, loop, parts if loop else ()))
    return found


def codes_in(chain: Chain, loop: LoopPair | None, coded: Iterable[Any]) -> list[Code]:
    """The codes of variables of the forward pass, or of a loop's body."""
    codes = chain.codes if loop is None else chain.codes_of_loop(loop)
    return [] if codes is None else [codes.of(var) for var in coded]


def _plan(chain: Chain, chosen: _Try, budget: int) -> Plan:
    added = chosen.nbytes - chosen.predicted
    base = chain.base_seconds
    points = [Point(max(nbytes + added, 0), base + seconds) for nbytes, seconds in chain.frontier]
    every = -(-len(points) // _MOST_POINTS)
    return Plan(
        budget=budget,
        nbytes=chosen.nbytes,
        first_nbytes=chosen.predicted,
        compiled_nbytes=chosen.nbytes if chosen.is_compiled else None,
        seconds=base + chosen.seconds,
        plain_seconds=base + chain.frontier[-1][1],
        stretches=tuple(stretch for choice in chosen.choices for stretch in _stretches(chain, choice)),
        points=(*points[:-1:every], points[-1]),
        program=digest(chain.derivative),
    )


def _stretches(chain: Chain, choice: Choice) -> list[Stretch]:
    """One stretch, or one for each part of a loop."""
    option = choice.option
    program = chain.loops[choice.start].program if option.parts else chain.derivative.forward
    place = {out: (i, k, eqn) for i, eqn in enumerate(program.eqns) for k, out in enumerate(eqn.outvars)}
    place |= {var: (-1, k, None) for k, var in enumerate(program.invars)}
    inside = [(turns or None, one) for turns, one in option.parts or ((0, option),)]
    handed_on = option.nbytes - option.kept_nbytes
    found = []
    for turns, one in inside:
        kept = []
        codes = codes_in(chain, chain.loops[choice.start] if turns else None, one.coded)
        bits = [*((var, array_bytes(var), None) for var in one.kept), *((code.of, code.nbytes, BITS) for code in codes)]
        for var, nbytes, few in bits:
            equation, output, eqn = place[var]
            made = "carried by the loop" if eqn is None else f"{eqn.primitive.name} {source_line(eqn)}".strip()
            kept.append(Kept(equation, output, nbytes, f"{var.aval.str_short()} {made}", few))
        seconds = one.seconds * (turns or 1)
        found.append(Stretch(choice.start, choice.stop, tuple(kept), handed_on, turns, seconds, option.working))
        handed_on = 0
    return found


def _too_little(chain: Chain, budget: int, least: int) -> str:
    choices = chain.least_choices()
    held = 0
    top, where = 0, choices[0]
    for choice in choices:
        if held + choice.option.working > top:
            top, where = held + choice.option.working, choice
        held += choice.option.nbytes
    lines = [line for eqn in chain.derivative.forward.eqns[where.start : where.stop] if (line := source_line(eqn))]
    plain = chain.frontier[-1][0] + least - chain.frontier[0][0]
    ratio = (chain.base_seconds + chain.frontier[0][1]) / (chain.base_seconds + chain.frontier[-1][1])
    return (
        f"budget is {readable_bytes(budget)}, but the least possible is {readable_bytes(least)}, at {ratio:.2f} of the time that "
        f"takes {readable_bytes(plain)}. The backward pass of equations {where.start} to {where.stop} "
        + (f"(from {lines[0]} to {lines[-1]}) " if lines else "")
        + f'holds it up, with {readable_bytes(where.option.working)} of its own: give a larger budget, or "min" for the least; '
        "divide the batch, or the sequence with memjax.remat.tiled"
    )


def digest(derivative: Derivative) -> str:
    """Equal for equal programs, however their variables are called."""
    number: dict[Any, int] = {}
    parts: list[str] = [str(derivative.wrt), str(derivative.outs)]
    for program in (derivative.forward, derivative.backward):
        for eqn in program.eqns:
            parts.append(f"{eqn.primitive.name} {_ADDRESS.sub('', str(eqn.params))}")
            for atom in (*eqn.invars, *eqn.outvars):
                name = f"literal {atom.val}" if is_literal(atom) else str(number.setdefault(atom, len(number)))
                parts.append(f"{name}:{atom.aval.str_short()}")
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]
