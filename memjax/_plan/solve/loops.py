"""The ways to keep or run again what the turns of a loop make: all alike, or in two parts; on the device, or on the host.

A turn waits for its copies to and from the host, in both passes. They could run beside what it computes; on an H200 with
JAX 0.11.2 they did not: moving 1,344 MiB out and back added 40 ms to a step, 960 MiB 29 ms, which is all that the link takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from memjax._core.compat import scan_counts
from memjax._core.program import costs
from memjax._core.program.costs import array_bytes
from memjax._core.program.dataflow import variables
from memjax._plan.codes import Codes
from memjax._plan.derivative import LoopPair, can_be_split
from memjax._plan.solve.phases import available_anywhere
from memjax._plan.solve.segment import Option, Segment, options

_MOST_TURNS = 64  # of a loop that is split, so that few options arise

Parts = tuple[tuple[int, Option], ...]


def loop_options(
    pair: LoopPair, segment: Segment, rates: costs.Device, codes: Codes | None, *, offload: bool
) -> list[Option]:
    """The options for a loop.

    Args:
      pair: the loop.
      segment: it as a stretch of the program.
      rates: of the device.
      codes: of its body, if something may be kept in codes.
      offload: something may be kept on the host.
    """
    length, is_reverse = pair.forward.params["length"], pair.forward.params["reverse"]
    free = available_anywhere(pair.program, pair.free)
    found = options(_turn(pair, free), rates, free, codes, is_loop=True)
    if offload:
        found = _with_moves(found, rates)
    mixed: list[Parts] = []
    # XLA:CPU copies what loops in parts stack: more of them takes less memory there, or less takes more.
    if rates.kind != "cpu" and 1 < length <= _MOST_TURNS and can_be_split(pair):
        exact = [option for option in found if not option.coded and not option.moved]
        here = [option for option in found if not option.moved]
        pairs = [
            *pairwise(_corners(exact)),
            *(two for one in (here, found) for two in pairwise(_corners(_falling(one)))),
        ]
        for less, more in dict.fromkeys(pairs):
            mixed += [((turns, less), (length - turns, more)) for turns in range(1, length)]
    if is_reverse:  # turns are numbered by what is scanned over; those that run first keep less
        mixed = [parts[::-1] for parts in mixed]
    crossing, moving = sum(map(array_bytes, segment.crossing)), sum(map(array_bytes, segment.entering))
    if rates.platform != "cpu":  # what a loop carries to a result lies in that from its start
        carried = pair.backward.outvars[: scan_counts(pair.backward)[1]]
        moving -= sum(map(array_bytes, set(segment.results).intersection(carried)))

    def whole(parts: Parts) -> Option:
        held = peak = crossing
        # The part that runs last has its turns first in the backward pass, and nothing is kept of it afterwards.
        for turns, option in reversed(parts) if is_reverse else parts:
            # A turn has copies of what it reads of the stacks. A loop of one turn is none when it is compiled.
            peak = max(peak, held + option.working + (turns * option.nbytes if turns > 1 else 0))
            held += turns * option.nbytes
        seconds = sum(turns * option.seconds for turns, option in parts) + (len(parts) - 1) * costs.SECONDS_TO_SPLIT
        return Option((), held, seconds, peak + moving, parts)

    return [whole(parts) for parts in ([((length, option),) for option in found] + mixed)]


def _turn(pair: LoopPair, free: set[Any]) -> Segment:
    """One iteration of the loop as a stretch. The backward pass has the variables in `free` without keeping them."""
    program, pull = pair.program, pair.pull
    lost = [var for var in program.invars if var not in free]
    made = {*program.flow.place, *lost}
    read = pull.flow.read | dict.fromkeys(variables(pull.outvars))
    outs = [atom for i, atom in enumerate(program.outvars) if i not in pair.residuals]
    return Segment(
        eqns=program.eqns,
        backward=pull.eqns,
        wanted=[var for var in read if var in made],
        crossing=(),
        entering=[var for var in pull.invars if var in read],
        leaving=variables(pull.outvars),
        results=(),
        primal=program.flow.needed(outs, always=program.flow.acting),
        lost=lost,
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
    best: list[Option] = []
    for option in sorted([*found, *every], key=lambda option: (option.nbytes, option.seconds, option.working)):
        if not any(one.seconds <= option.seconds and one.working <= option.working for one in best):
            best.append(option)
    return best


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


def _corners(found: Sequence[Option]) -> list[Option]:
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
