"""A stretch of a program with its part of the backward pass, and the ways to keep or run again what that part reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from memjax._core import costs
from memjax._core.costs import array_bytes, origins_of_names
from memjax._core.jaxpr import variables
from memjax._core.working import hoisted_bytes, needed_for, peak_bytes
from memjax._plan.order import freeing_first, in_time
from memjax._plan.price_cut import kept_at

_PRICES = 12
_MOST_CANDIDATES = 12  # all subsets of which are looked at
_MOST_OPTIONS = 24


class Segment(NamedTuple):
    """A stretch of the forward pass and what of the backward pass has its turn with it.

    Attributes:
      eqns: of the forward pass.
      backward: of the backward pass, in order.
      wanted: what `backward` reads that `eqns` make.
      crossing: what later stretches read of this one: always kept.
      entering, leaving: cotangents alive before and after.
      results: cotangents of the program's inputs.
      primal: those of `eqns` that run in the forward pass whatever is kept.
      lost: inputs of `eqns` that are gone in the backward pass: what a loop carries.
      outputs: of the forward pass.
    """

    eqns: Sequence[Any]
    backward: Sequence[Any]
    wanted: Sequence[Any]
    crossing: Sequence[Any]
    entering: Sequence[Any]
    leaving: Sequence[Any]
    results: Sequence[Any]
    primal: Sequence[Any]
    lost: Sequence[Any] = ()
    outputs: Sequence[Any] = ()


class Option(NamedTuple):
    """What to keep of a segment.

    Attributes:
      kept: variables, besides what crosses to later segments.
      nbytes: of these and of what crosses.
      seconds: spent on running again, and on keeping.
      working: the most bytes alive in the backward pass of the segment, on CPUs also in its forward pass, what is kept of it
        included.
      parts: of a loop, for each part of its turns how many they are, in the order of what is scanned over, and the option for its
        body.
    """

    kept: tuple[Any, ...]
    nbytes: int
    seconds: float
    working: int
    parts: tuple[tuple[int, Option], ...] = ()


def options(segment: Segment, rates: costs.Device, free: set[Any], *, is_loop: bool = False) -> list[Option]:
    """The options of which none takes more of both bytes and seconds than another; the fewest bytes first.

    What `free` has, and what earlier stretches make, is there anyhow; but not what is `lost`, which can only be kept.
    """
    made = {out for eqn in segment.eqns for out in eqn.outvars}
    outside = _read(segment.eqns) - made - set(segment.lost)
    is_known = (free & made) | set(segment.crossing) | outside
    wanted = [var for var in dict.fromkeys(segment.wanted) if var not in is_known]
    again = needed_for(segment.eqns, wanted, is_known)
    names = origins_of_names(segment.eqns)
    in_memory = costs.stored(
        [*again, *segment.backward], [*is_known, *segment.results, *segment.leaving], rates.platform
    )
    seconds = {id(eqn): costs.seconds(eqn, rates, in_memory.__contains__) for eqn in again}
    written = costs.stored(segment.primal, segment.crossing, rates.platform, writes_shared=True)

    def to_keep(var: Any) -> float:
        """It is read, and, unless the forward pass does so anyway, written."""
        return array_bytes(var) * (1 if var in written else 2) / rates.nbytes

    candidates = _candidates(again, wanted, is_known, lambda eqn: seconds[id(eqn)], to_keep, names)
    found = []
    crossing = sum(map(array_bytes, segment.crossing)) + hoisted_bytes(segment.backward, rates.platform)
    for kept in _subsets(again, wanted, is_known, candidates, seconds, to_keep):
        rerun = needed_for(again, wanted, is_known | set(kept))
        time = sum(seconds[id(eqn)] for eqn in rerun) + sum(map(to_keep, kept))
        # On CPUs all that can run does, so that several operators may run at a time.
        order = [*rerun, *segment.backward] if rates.platform == "cpu" else in_time(rerun, segment.backward)
        read = _read(order)
        here = [var for var in (*kept, *segment.crossing) if var in read]
        elsewhere = read - set(here) - set(segment.entering) - {out for eqn in order for out in eqn.outvars}
        entering = [*segment.entering, *here]
        if is_loop and rates.platform != "cpu":
            # The compiler's best schedule for all of a program is not the best for each part.
            order = freeing_first(order, segment.results, [*segment.leaving, *elsewhere], rates.platform)
        working = peak_bytes(order, elsewhere, entering, segment.leaving, segment.results, rates.platform)
        if rates.platform == "cpu":
            working = max(working, _forward_bytes(segment, kept, rates.platform))
        found.append(Option(tuple(kept), crossing + sum(map(array_bytes, kept)), time, working))
    return found


def _forward_bytes(segment: Segment, kept: Sequence[Any], platform: str) -> int:
    """The most bytes alive in the forward pass of the segment, besides what was there before."""
    stays = [*segment.crossing, *kept]
    made = {out for eqn in segment.eqns for out in eqn.outvars}
    chosen = {id(eqn) for eqn in (*segment.primal, *needed_for(segment.eqns, stays, set()))}
    eqns = [eqn for eqn in segment.eqns if id(eqn) in chosen]
    return peak_bytes(eqns, _read(eqns) - made, [], stays, segment.outputs, platform)


def _read(eqns: Sequence[Any]) -> set[Any]:
    return {var for eqn in eqns for var in variables(eqn.invars)}


def _candidates(
    again: Sequence[Any],
    wanted: Sequence[Any],
    known: set[Any],
    seconds: Callable[[Any], float],
    to_keep: Callable[[Any], float],
    names: dict[Any, Any],
) -> list[Any]:
    """What is worth keeping at one price of memory or another; what is at more prices comes first."""
    total_bytes = sum(array_bytes(out) for eqn in again for out in eqn.outvars)
    total_seconds = sum(map(seconds, again))
    if not total_bytes or not total_seconds:
        return []
    middle = total_seconds / total_bytes
    votes: dict[Any, int] = {}
    for price in (0.0, *(middle * np.logspace(-2, 3, _PRICES))):
        kept = kept_at(price, again, wanted, known, seconds, array_bytes, to_keep, lambda eqn: bool(eqn.effects))
        for var in dict.fromkeys(names.get(var, var) for var in kept if names.get(var, var) not in known):
            votes[var] = votes.get(var, 0) + 1
    return sorted(votes, key=lambda var: -votes[var])[:_MOST_CANDIDATES]


def _subsets(
    again: Sequence[Any],
    wanted: Sequence[Any],
    known: set[Any],
    candidates: Sequence[Any],
    seconds: dict[int, float],
    to_keep: Callable[[Any], float],
) -> list[list[Any]]:
    """The subsets of candidates that are on the frontier of bytes and seconds."""
    masks = np.arange(1 << len(candidates))
    chosen = {var: (masks >> i & 1).astype(bool) for i, var in enumerate(candidates)}
    nbytes = sum((chosen[var] * array_bytes(var) for var in candidates), np.zeros(len(masks)))
    times = sum((chosen[var] * to_keep(var) for var in candidates), np.zeros(len(masks)))
    nothing = np.zeros(len(masks), bool)
    needed = {var: ~chosen.get(var, nothing) for var in wanted}
    for eqn in reversed(again):
        runs = np.logical_or.reduce([needed.get(out, nothing) for out in eqn.outvars])
        if not runs.any():
            continue
        times[runs] += np.inf if eqn.effects else seconds[id(eqn)]
        for var in dict.fromkeys(variables(eqn.invars)):
            if var not in known:
                needed[var] = needed.get(var, nothing) | (runs & ~chosen.get(var, nothing))
    made = {out for eqn in again for out in eqn.outvars}
    for var in needed.keys() - made:
        times[needed[var]] = np.inf
    order = np.lexsort((times, nbytes))
    found, best = [], np.inf
    for i in order:
        if times[i] < best * (1 - 1e-4):
            best = times[i]
            found.append(int(i))
    if len(found) > _MOST_OPTIONS:  # those that are left out lie closest to the line between their neighbours
        found = _thinned(found, nbytes, times)
    return [[var for i, var in enumerate(candidates) if mask >> i & 1] for mask in found]


def _thinned(found: list[int], nbytes: np.ndarray, times: np.ndarray) -> list[int]:
    """The points that a frontier needs most: both ends, and again and again what lies furthest below the line between two."""
    points = [(nbytes[i] / max(nbytes.max(), 1), times[i] / max(times[found].max(), 1e-30)) for i in found]
    chosen = [0, len(found) - 1]
    while len(chosen) < _MOST_OPTIONS:
        best, where = 0.0, None
        for low, high in pairwise(chosen):
            left, right = points[low], points[high]
            for k in range(low + 1, high):
                x, y = points[k]
                gain = (right[0] - x) * (left[1] - y)  # the area that the frontier loses without it
                if gain > best:
                    best, where = gain, k
        if where is None:
            break
        chosen = sorted([*chosen, where])
    return [found[k] for k in chosen]


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
