"""From a derivative and a budget to a plan: solve, compile, compare, and choose again with what was learnt."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from memjax._core.meshes import device_of
from memjax._plan.budget.known import Allowed, Known, Measure, known
from memjax._plan.budget.plans import Plans
from memjax._plan.budget.search import (
    DOUBTFUL,
    LARGE_GAIN,
    MOST_TRIES,
    OF_ONE,
    Patience,
    is_out_of_reach,
    search,
)
from memjax._plan.budget.too_little import too_little, what_moving_saves
from memjax._plan.derivative import Passes, loop_pairs
from memjax._plan.memory.layout import Layout
from memjax._plan.result import Plan, Point, Try

_MOST_POINTS = 100
_AS_FAST = 1.005  # of a predicted time: a difference that the model of time does not tell
_AS_PREDICTED = (
    1.05  # of the predicted bytes: a plan that takes more may take less in steps, and leave room for a faster
)
_UNSURE = 1.1  # by as much more or less the compiled bytes of one plan may be off than those of another
_STEPS_DOWN = (0.98, 0.95, 0.85, 0.98)  # of the least bytes so far, to ask for where the least is wanted
_MOST_LEANER = 3  # plans with less kept than one that takes too much
_MOST_STEPS = 8  # down from there, each to what takes less
OF_PARTS = Patience(gain=5e-3, enough=3)
"""Plans of parts of a step: each try compiles the whole step."""
_OFF = 1.1  # times the predicted bytes: the compiler orders the backward pass otherwise than the model has it
_FAR_OFF = 1.4  # the same: the model may not know this program


class Effort(NamedTuple):
    """How hard to look for a plan of a part of a step, where each plan that is tried compiles the step.

    Attributes:
      thoroughly: look for the least where nothing fits. Else what was compiled may be enough to see that nothing will.
      patiently: correct predictions that are far off, though not thoroughly: whatever else there is is predicted much slower.
      as_written: predicted bytes of the step with its passes as they are, and those that were compiled, if so.
    """

    thoroughly: bool = True
    patiently: bool = False
    as_written: tuple[int, int] | None = None


_NO_EFFORT_SPARED = Effort()


class TooLittleError(ValueError):
    """The budget is less than the least possible. It has the plan of the least memory that was found."""

    def __init__(self, message: str, least: Plan):
        super().__init__(message)
        self.least = least


def is_hopeless(tries: Iterable[Try], budget: int, unsure: float = _UNSURE) -> bool:
    """Whether no plan is expected to fit, by those that were compiled, which are predicted to take the least."""
    return all(is_out_of_reach(one, budget, unsure) for one in tries)


def decide(
    derivative: Passes,
    types: Sequence[Any],
    layout: Layout,
    budget: int | str,
    *,
    compress: bool = False,
    offload: bool = False,
    measure: Measure | None = None,
    before: dict[Any, Known] | None = None,
    effort: Effort = _NO_EFFORT_SPARED,
) -> Plan:
    """The fastest plan found of which the compiled step takes no more than `budget`, or "min": the plan of the least memory.

    With more allowed the plan is never predicted slower than with less. The search among exact plans, say, may come closer to
    the budget than the search among all plans. So both are made where the exact plan could be the faster one.

    Args:
      derivative, types, layout: of the program.
      budget: of bytes.
      compress, offload: what else may be done.
      measure, before: of the step that the program is part of, as for `known`.
      effort: where the program is part of a step.

    Raises:
      TooLittleError: the budget is less than the least possible.
    """
    nothing_moves = _why_nothing_moves(derivative, layout) if offload else ""
    offload = offload and not nothing_moves
    most = Allowed(compress, offload)
    of = lambda allowed: known(derivative, types, layout, allowed, measure, before)
    found = [_decide(of(most), budget, effort)]
    for less in dict.fromkeys((most, Allowed(compress), Allowed())):
        if less == most or (budget == "min" and less.compress != compress):
            continue
        other = of(less)
        if budget == "min" or all(_can_be_faster(other, one, budget) for one in found):
            found.insert(0, _decide(other, budget, effort))  # of equals it is the one to take
    plans = [plan for plan in found if _fits(plan, budget)]
    if not plans:
        assert isinstance(budget, int)
        hint = ""
        if not (offload or _why_nothing_moves(derivative, layout)):
            hint = what_moving_saves(of(most).chain, of(most._replace(offload=True)).chain, layout)
        message = too_little(of(most).chain, budget, found[-1].nbytes, layout)
        raise TooLittleError(f"{message}{hint}", min(found, key=lambda plan: plan.nbytes))
    best = min(plans, key=lambda plan: plan.nbytes if budget == "min" else plan.seconds)
    if offload and not _fits(found[-1], budget):
        nothing_moves = (
            "offload: nothing is moved, for the plans that move something take more than the budget when compiled"
        )
    return dataclasses.replace(best, notes=(nothing_moves,)) if nothing_moves else best


def _why_nothing_moves(derivative: Passes, layout: Layout) -> str:
    """Why plans cannot move anything to the host, if so."""
    device = device_of(layout.shardings)
    if device.platform not in ("gpu", "tpu"):
        return f"offload: nothing is moved, for {device.device_kind} has no memory besides the host's"
    if not loop_pairs(derivative):
        return "offload: nothing is moved, for it frees memory only where a jax.lax.scan keeps something; the program has none"
    return ""


def _fits(plan: Plan, budget: int | str) -> bool:
    return isinstance(budget, str) or plan.nbytes <= budget


def _can_be_faster(other: Known, found: Plan, budget: int | str) -> bool:
    """Whether a plan of those with less allowed that may fill the budget is predicted to be faster than the one found, or as
    fast."""
    assert isinstance(budget, int)
    if not _fits(found, budget):  # seldom does a plan with less fit where none with more does
        return any(Plans(other, in_steps).least()[0].compiled <= budget for in_steps in (False, True))
    room = _UNSURE**2 * found.first_nbytes * budget / max(found.nbytes, 1)  # what is over may fit with less kept
    fitting = [seconds for nbytes, seconds in other.frontier if nbytes <= room]
    return bool(fitting) and other.base_seconds + min(fitting) <= found.seconds


Tried = dict[bool, list[Try]]
"""What was compiled for a budget, by whether the backward pass runs in steps."""


def _decide(program: Known, budget: int | str, effort: Effort = _NO_EFFORT_SPARED) -> Plan:
    """The plan; if none fits that of the least memory that was found."""
    tried: Tried = {}
    if isinstance(budget, int) and (found := _within(program, budget, tried, effort)):
        return found
    if isinstance(budget, int) and not effort.thoroughly:
        best = [(plans, min(tried[plans.in_steps], key=lambda one: one.compiled)) for plans in _ways(program)]
        plans, one = min(best, key=lambda one: one[1].compiled)
        return plan_of(program, plans, one, tried[plans.in_steps], budget)
    least = _least(program, budget, tried)
    # The search for the least may find what the search for the fastest does not.
    return dataclasses.replace(least, budget=budget) if isinstance(budget, int) and least.nbytes <= budget else least


def _least(program: Known, budget: int | str, tried: Tried) -> Plan:
    """The plan of the least memory, by compiling those that are predicted to take the least and then asking for less.

    What is predicted to take the least need not take the least when compiled. Where that of a whole step is so much more than
    the budget that asking for less will not do, it is left at that.
    """
    room = budget if isinstance(budget, int) and program.is_part else None
    ways = _ways_to_the_least(_ways(program), tried)
    alone = room is not None and _is_refused(ways, room)
    found = [(plans, plans.least(alone)) for plans in ways]
    plans, tries = min(found, key=lambda one: one[1][0].compiled)
    least = plan_of(program, plans, tries[0], tries, tries[0].compiled)
    if alone or (room is not None and is_hopeless((one for _, tries in found for one in tries), room)):
        return least
    for share in _STEPS_DOWN:
        least = _less(program, int(share * least.nbytes)) or least
    # A search for these bytes may find what takes less.
    for _ in range(_MOST_STEPS):
        if (less := _less(program, least.nbytes - 1)) is None:
            break
        least = less
    return least


def _less(program: Known, room: int) -> Plan | None:
    """A plan within so many bytes that says what it takes itself."""
    found = _within(program, room, {})
    return None if found is None else dataclasses.replace(found, budget=found.nbytes)


def _ways(program: Known) -> list[Plans]:
    return [Plans(program, in_steps) for in_steps in (False, True)]


def _ways_to_the_least(ways: Sequence[Plans], tried: Tried) -> list[Plans]:
    """Those ways of which the least may be the least of all, by what was compiled of each."""
    expected = {plans: plans.expected_least(tried.get(plans.in_steps, ())) for plans in ways}
    known = [nbytes for nbytes, is_compiled in expected.values() if is_compiled]
    least = min(known, default=math.inf)
    return [plans for plans, (nbytes, is_compiled) in expected.items() if is_compiled or nbytes <= least]


def _is_refused(ways: Iterable[Plans], budget: int) -> bool:
    """Whether no plan of a part of a step is expected to fit, by one for the least memory of each way."""
    return is_hopeless([plans.tried(1) for plans in ways], budget)


def _within(program: Known, budget: int, tried: Tried, effort: Effort = _NO_EFFORT_SPARED) -> Plan | None:
    """The fastest plan found that fits, if any. What is compiled is noted in `tried`.

    Where none fits otherwise, or the compiler takes so much more than was predicted that a faster plan is missed, the backward
    pass runs in steps: then what is alive at a time is what the model says, whichever kernels the compiler chooses. Where
    compiling takes long, as for a part of a step, the first plan that takes more than was predicted, and too much, is enough
    to try that.
    """
    fitted: list[tuple[Plans, Try, list[Try]]] = []
    ways = _ways(program)
    for plans in ways:
        if not (fitted or program.is_part) and plans.in_steps and plans.least()[0].compiled > budget:
            break
        patience = _patience(program, tried[False] if plans.in_steps else [], plans.in_steps, effort)
        how = plans.kind, patience, 1, _above(plans, effort.as_written, budget)
        tries = search(plans.predicted, plans.seconds, budget, plans.compiled, *how)
        tried[plans.in_steps] = tries
        if all(one.compiled > budget for one in tries):
            if not effort.thoroughly or tries[0].compiled > patience.off * tries[0].predicted:
                continue
            if program.is_part and _is_refused(_ways_to_the_least(ways, tried), budget):
                break
            tries += [one for one in plans.least() if one.number not in {other.number for other in tries}]
        compiled = len(tries) + (effort.as_written is not None)
        tries += _leaner(plans, tries, budget, OF_PARTS.enough - compiled if program.is_part else _MOST_LEANER)
        if fitting := [one for one in tries if one.compiled <= budget]:
            chosen = max(fitting)
            fitted.append((plans, chosen, tries))
            as_predicted = chosen.compiled <= _AS_PREDICTED * chosen.predicted
            by = 1 + LARGE_GAIN if as_predicted else _AS_FAST
            if program.is_part or not _faster_as_predicted(plans, chosen, budget, by):
                break
    if not fitted:
        return None
    plans, chosen, tries = min(fitted, key=lambda one: one[0].seconds[one[1].number])  # of equals the first
    return _without_a_plan(program, plans, chosen, tries, budget) or plan_of(program, plans, chosen, tries, budget)


def _above(plans: Plans, as_written: tuple[int, int] | None, budget: int) -> Try | None:
    """The step as it is written, if it was compiled, as the try that comes after all plans.

    On several devices XLA may gather what the model has as a device's part of it, and it does so in plans as well.
    """
    if as_written is None or as_written[1] <= budget:
        return None
    predicted, compiled = as_written
    return Try(plans.count, predicted, predicted, compiled)


def _patience(program: Known, before: Sequence[Try], in_steps: bool, effort: Effort) -> Patience:
    """How much a search may compile, where `before` was compiled of the backward pass that does not run in steps."""
    if not program.is_part:
        return Patience()
    patience = OF_PARTS._replace(
        most=MOST_TRIES if effort.thoroughly else 1 if before else OF_PARTS.enough,
        over=math.inf if effort.thoroughly else OF_ONE,
    )
    if program.is_split:
        # Predictions are off by what is sent, in steps as well: a few corrections do more.
        return patience._replace(enough=MOST_TRIES, by_amount=program.is_by_parts)
    return patience._replace(
        enough=max(OF_PARTS.enough - len(before), 1),
        off=math.inf if in_steps or effort.patiently else _OFF,
        least_first=bool(before) and before[0].compiled > _FAR_OFF * before[0].predicted,
    )


def _leaner(plans: Plans, tries: Sequence[Try], budget: int, most: int) -> list[Try]:
    """At most so many plans that take more than the budget, with less kept, if much faster than those that fit; compiled.

    Where the budget is what a policy by hand takes, the plan that keeps the same arrays can be a few kilobytes over it. The next
    plan that fits may run an attention again. And where the compiler takes most at another moment than the model does, plans of
    equal predicted bytes differ: what runs again there changes nothing in the prediction.
    """
    found: list[Try] = []
    while len(found) < most and not (found and found[-1].compiled <= budget):
        every = [*tries, *found]
        fits = min(
            (one for one in every if one.compiled <= budget), key=lambda one: plans.seconds[one.number], default=None
        )
        fast = math.inf if fits is None else plans.seconds[fits.number] / (1 + LARGE_GAIN)
        over = [one for one in every if one.compiled > budget and plans.seconds[one.number] <= fast]
        close = [one for one in over if one.compiled <= DOUBTFUL * budget]
        number = plans.add_leaner(max(close).number) if close and not found else None
        if number is None and over and fits is not None:
            one = min(over, key=lambda one: one.compiled)
            share = (one.compiled - budget) / (one.compiled - fits.compiled)
            number = plans.add_leaner(one.number, fits.number, one.compiled - budget, share)
        if number is None:
            break
        nbytes = plans.predicted[number]
        found.append(Try(number, nbytes, nbytes, plans.compiled(number)))
    return found


def _faster_as_predicted(plans: Plans, chosen: Try, budget: int, by: float) -> bool:
    """Whether a plan would be so much faster than the one chosen, if the compiler took what was predicted."""
    fitting = plans.seconds[: bisect.bisect_right(plans.predicted, budget, hi=plans.count)]
    return bool(fitting) and plans.seconds[chosen.number] > by * min(fitting)


def _without_a_plan(program: Known, plans: Plans, chosen: Try, tries: Sequence[Try], budget: int) -> Plan | None:
    """The plan that keeps everything, if it fits and the one chosen is predicted to be as slow.

    Running again what costs little by itself can divide what the compiler would have made one kernel of, and no model of time
    here knows it: where there is room, nothing is run again. A program with loops keeps its plan, for a loop that keeps
    everything stacks what its turns could make again in less time than the copies take.
    """
    if program.chain.loops or plans.seconds[chosen.number] > _AS_FAST * plans.seconds[plans.count - 1]:
        return None
    if program.all_kept > _UNSURE * budget:  # compiling it would tell nothing
        return None
    # A step that is worth compiling as it is was compiled before its parts were planned.
    nbytes = None if program.is_part and not program.knows_all_kept else program.step_bytes(())
    if nbytes is None or nbytes > budget:
        return None
    plan = plan_of(program, plans, chosen, [*tries, Try(len(plans.predicted), nbytes, nbytes, nbytes)], budget)
    seconds = plan.plain_seconds
    plan = dataclasses.replace(plan, nbytes=nbytes, first_nbytes=nbytes, compiled_nbytes=nbytes)
    return dataclasses.replace(plan, seconds=seconds, stretches=(), in_steps=False)


def plan_of(program: Known, plans: Plans, chosen: Try, tries: Sequence[Try], budget: int) -> Plan:
    found = program.stretches(plans.choices(chosen.number))
    added = chosen.compiled - chosen.predicted
    points = [Point(max(nbytes + added, 0), program.base_seconds + seconds) for nbytes, seconds in program.frontier]
    every = -(-len(points) // _MOST_POINTS)
    return Plan(
        budget=budget,
        nbytes=chosen.compiled,
        first_nbytes=chosen.predicted,
        compiled_nbytes=program.step_bytes(found, plans.in_steps),
        seconds=plans.seconds[chosen.number],
        plain_seconds=plans.seconds[plans.count - 1],
        stretches=found,
        points=(*points[:-1:every], points[-1]),
        tries=tuple(tries),
        program=program.digest,
        platform=program.chain.rates.platform,
        assumes=program.layout.assumes,
        in_steps=plans.in_steps,
        gathers_again=program.gathers_again,
    )
