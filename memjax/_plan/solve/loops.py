"""The ways to keep or run again what the turns of a loop make: all alike, or in two parts; on the device, or on the host; or by
running turns again in blocks, from states of the loop that are kept (Gruslys et al. 2016).

A turn waits for its copies to and from the host, in both passes. They could run beside what it computes; on an H200 with
JAX 0.11.2 they did not: moving 1,344 MiB out and back added 40 ms to a step, 960 MiB 29 ms, which is all that the link takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from memjax._core.compat import scan_counts
from memjax._core.program import costs
from memjax._core.program.costs import array_bytes
from memjax._core.program.dataflow import is_literal, variables
from memjax._core.program.jaxpr import nbytes
from memjax._plan.codes import Codes
from memjax._plan.derivative import LoopPair, can_be_split
from memjax._plan.early.options import early_options
from memjax._plan.schedule.choose import Costs, Steps, check_budget, fastest
from memjax._plan.schedule.execute import LoopPlan
from memjax._plan.solve.phases import available_anywhere, gathered
from memjax._plan.solve.segment import Option, Segment, options
from memjax._plan.solve.turn import TurnCosts

_MOST_TURNS = 64  # after which a loop may be split, so that few options arise: longer ones are split at every few turns
_FEWEST_TURNS = 8  # of a loop whose turns run again in blocks: of fewer there are few states to save
MOST_BODIES = 4  # ways to keep something of a turn, with each of which turns run again in blocks
_MOST_RUNS = 10  # of a turn, forwards: less memory is seldom worth more
_STEP = 1.25  # from one number of bytes that a schedule is made for to the next
_LAST_STEP = 1.05  # the same where that is a quarter of what keeping all turns takes, or more: little runs again there
_FINEST = 1.04  # the same between two of which one takes much longer
_WORTH_ANOTHER = 0.1  # of the time of the loop's forward pass: so much longer

Parts = tuple[tuple[int, Option], ...]


def loop_options(
    pair: LoopPair, segment: Segment, rates: costs.Device, there: set[Any], codes: Codes | None, *, offload: bool
) -> list[Option]:
    """The options for a loop.

    Args:
      pair: the loop.
      segment: it as a stretch of the program.
      rates: of the device.
      there: variables of the program that the backward pass has anyhow.
      codes: of its body, if something may be kept in codes.
      offload: something may be kept on the host.
    """
    length, is_reverse = pair.forward.params["length"], pair.forward.params["reverse"]
    free = available_anywhere(pair.program, pair.free)
    turn = turn_of(pair, free)
    found = options(turn, costs.in_turns(rates), free, codes, is_loop=True)
    if offload and pair.early is None:
        found = _with_moves(found, rates)
    mixed: list[Parts] = []
    # XLA:CPU copies what loops in parts stack: more of them takes less memory there, or less takes more.
    if rates.kind != "cpu" and pair.early is None and length > 1 and can_be_split(pair):
        exact = [option for option in found if not option.coded and not option.moved]
        here = [option for option in found if not option.moved]
        pairs = [
            *pairwise(corners(exact)),
            *(two for one in (here, found) for two in pairwise(corners(_falling(one)))),
        ]
        step = -(-length // _MOST_TURNS)
        for less, more in dict.fromkeys(pairs):
            mixed += [((turns, less), (length - turns, more)) for turns in range(step, length, step)]
    if is_reverse:  # turns are numbered by what is scanned over; those that run first keep less
        mixed = [parts[::-1] for parts in mixed]
    crossing = sum(map(array_bytes, segment.crossing))
    moving = sum(map(array_bytes, (*segment.entering, *written(pair, segment))))
    if rates.platform != "cpu":
        moving -= sum(map(array_bytes, in_results(pair, segment)))

    carry = [var.aval for var in pair.program.invars[slice(*carried(pair.forward))]]
    again_nbytes = sum(map(array_bytes, remade(pair, there)))
    timed = TurnCosts(pair.program, turn, pair.program.outvars[: len(carry)], free, rates)
    if pair.early is not None:
        bodies = corners([option for option in found if not option.coded])[:MOST_BODIES]
        return _best(early_options(pair, bodies, crossing, moving + again_nbytes, timed.forward))

    def in_blocks(option: Option, plan: LoopPlan, seconds: float) -> Option:
        state, kept = sum(map(nbytes, carry)), option.kept_nbytes
        states = plan.rows * state
        # While a block is backpropagated there are its residuals, states of the loops around it and the working one.
        inner = plan.block * kept + (sum(plan.levels[1:]) + 1) * state
        peak = crossing + states + max(plan.tail * kept, inner) + option.working + again_nbytes + moving
        held = crossing + states + plan.tail * kept
        return Option((), held, seconds, peak, ((length, option),), in_blocks=plan, states_nbytes=states)

    def whole(parts: Parts) -> Option:
        held = peak = crossing
        # The part that runs last has its turns first in the backward pass, and nothing is kept of it afterwards.
        for turns, option in reversed(parts) if is_reverse else parts:
            # A turn has copies of what it reads of the stacks. A loop of one turn is none when it is compiled.
            peak = max(peak, held + option.working + (turns * option.nbytes if turns > 1 else 0))
            held += turns * option.nbytes
        in_parts = len(parts) > 1
        slicing = {id(option): timed.slicing(option, in_parts=in_parts) for _, option in parts}
        seconds = sum(turns * (option.seconds + slicing[id(option)]) for turns, option in parts)
        seconds += (len(parts) - 1) * costs.SECONDS_TO_SPLIT
        return Option((), held, seconds, peak + moving, parts)

    # Single turns from their states, and a tail: of few turns each such plan is there in two parts.
    is_in_parts = lambda plan: bool(mixed) and length <= _MOST_TURNS and plan.block == 1 and len(plan.levels) == 1
    every = [whole(parts) for parts in ([((length, option),) for option in found] + mixed)]
    if length < _FEWEST_TURNS or not can_be_split(pair):
        return every
    again = [one for one in every if len(one.parts) == 1 and not any(part.coded or part.moved for _, part in one.parts)]
    for option in corners([part for one in again for _, part in one.parts])[:MOST_BODIES]:
        steps = Steps(length, carry, [var.aval for var in option.kept])
        again += [in_blocks(option, *one) for one in _schedules(steps, timed.of(option)) if not is_in_parts(one[0])]
    return [*every, *(one for one in _best(again) if one.in_blocks is not None)]


def in_results(pair: LoopPair, segment: Segment) -> set[Any]:
    """What the loop of the backward pass carries to a result: it lies in that from the loop's start."""
    return set(segment.results).intersection(pair.backward.outvars[: scan_counts(pair.backward)[1]])


def written(pair: LoopPair, segment: Segment) -> list[Any]:
    """What the loop of the backward pass writes that is no result of the program: stacks, there in whole from the loop's start,
    and what it carries, unless that is in the memory of what enters."""
    eqn, results, entering = pair.backward, set(segment.results), set(segment.entering)
    starts = eqn.invars[slice(*carried(eqn))]
    over = {out for out, start in zip(eqn.outvars, starts) if not is_literal(start) and start in entering}  # noqa: B905
    return [out for out in eqn.outvars if out not in results and out not in over]


def carried(eqn: Any) -> tuple[int, int]:
    """Where, among the inputs of a loop's body, what it carries begins and ends."""
    consts, carried = scan_counts(eqn)
    return consts, consts + carried


def remade(pair: LoopPair, there: set[Any]) -> set[Any]:
    """What the loop reads that the loop of the backward pass does not: to run turns again it has to be there."""
    start, stop = carried(pair.forward)
    read = {*variables(pair.forward.invars[:start]), *variables(pair.forward.invars[stop:])}
    return read - {*variables(pair.backward.invars)} - there


def _schedules(steps: Steps, each: Costs) -> list[tuple[LoopPlan, float]]:
    """Plans that run turns again in blocks, each with the seconds that it takes more than keeping all that is kept of a turn."""
    within = lambda room: fastest(steps, room, each, mixed=False)
    rooms = [check_budget("min", steps.length, steps.carry_nbytes, steps.kept_nbytes)]
    most = steps.carry_nbytes + steps.length * steps.kept_nbytes
    step = lambda room: _LAST_STEP if 4 * room > most else _STEP
    while (larger := max(int(rooms[-1] * step(rooms[-1])), rooms[-1] + 1)) < most:
        rooms.append(larger)
    by_room = {room: within(room) for room in rooms if room < most}
    few = lambda room: by_room[room][0].forward_runs <= _MOST_RUNS
    between = [*pairwise(by_room)]
    while between:
        low, high = between.pop()
        middle, gained = math.isqrt(low * high), by_room[low][1] - by_room[high][1]
        if few(high) and middle > _FINEST * low and gained > _WORTH_ANOTHER * steps.length * each.forward:
            by_room[middle] = within(middle)
            between += [(low, middle), (middle, high)]
    return [
        (plan, seconds - 2 * steps.length * each.forward)
        for plan, seconds in dict(by_room[room] for room in sorted(by_room) if few(room)).items()
        if plan.rows
    ]


def _best(found: Sequence[Option]) -> list[Option]:
    """The options of which none takes more bytes, working memory and seconds than another."""
    best: list[Option] = []
    for option in sorted(found, key=lambda option: (option.nbytes, option.seconds, option.working)):
        if not any(one.seconds <= option.seconds and one.working <= option.working for one in best):
            best.append(option)
    return best


def turn_of(pair: LoopPair, free: set[Any]) -> Segment:
    """One iteration of the loop as a stretch. The backward pass has the variables in `free` without keeping them."""
    program, pull = pair.program, pair.pull
    lost = [var for var in program.invars if var not in free]
    made = {*program.flow.place, *lost}
    read = pull.flow.read | dict.fromkeys(variables(pull.outvars))
    outs = [atom for i, atom in enumerate(program.outvars) if i not in pair.residuals]
    writes, stacks = set(map(id, pair.writes)), {eqn.invars[0] for eqn in pair.writes}
    return Segment(
        eqns=program.eqns,
        backward=[eqn for eqn in pull.eqns if id(eqn) not in writes],
        wanted=[var for var in read if var in made],
        crossing=(),
        entering=[var for var in pull.invars if var in read and var not in stacks],
        leaving=[out for out in variables(pull.outvars) if id(pull.flow.makers.get(out)) not in writes],
        results=(),
        primal=program.flow.needed(outs, always=program.flow.acting),
        lost=lost,
        gathered=[*gathered(program, free)],
        slices=program.invars[carried(pair.forward)[1] :],
    )


def _with_moves(found: Sequence[Option], rates: costs.Device) -> list[Option]:
    """The options for a turn, and those in which the largest of what they keep lies on the host.

    Of these none takes more bytes, working memory and seconds than another.
    """
    every = []
    for option in found:
        largest = sorted(filter(lambda var: _is_worth_a_copy(var, rates), option.kept), key=array_bytes, reverse=True)
        for count in range(1, len(largest) + 1):
            moved = largest[:count]
            nbytes = sum(map(array_bytes, moved))
            every.append(
                option._replace(
                    kept=tuple(var for var in option.kept if var not in moved),
                    moved=tuple(moved),
                    nbytes=option.nbytes - nbytes,
                    seconds=option.seconds + costs.moving_seconds(nbytes, rates),
                )
            )
    return _best([*found, *every])


def _is_worth_a_copy(var: Any, rates: costs.Device) -> bool:
    is_key = jnp.issubdtype(var.aval.dtype, jax.dtypes.extended)
    return not is_key and array_bytes(var) > rates.start * rates.link


def _falling(found: Sequence[Option]) -> list[Option]:
    """Those, in order of bytes, that are faster than all before."""
    chosen: list[Option] = []
    for option in found:
        if not chosen or option.seconds < chosen[-1].seconds:
            chosen.append(option)
    return chosen


def corners(found: Sequence[Option]) -> list[Option]:
    """The options that no mixture of two others beats; those found rise in bytes."""
    hull: list[Option] = []
    for option in found:
        while len(hull) > 1 and _lies_above(hull[-2], hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _lies_above(left: Option, middle: Option, right: Option) -> bool:
    """Whether the middle one is no better than a mixture of the others."""
    over, step = right.nbytes - left.nbytes, middle.nbytes - left.nbytes
    return (middle.seconds - left.seconds) * over >= (right.seconds - left.seconds) * step
