"""Which plan of a frontier fills a budget, found by compiling a few: interpolation between what has been compiled.

The plans are in a line, from the fewest predicted bytes to the most. Those that fit are taken to come before those that do not,
which is true as far as compiled bytes rise with predicted ones. Where none is expected to fit, one that is predicted to take
the least is compiled. Each plan that is compiled moves one of the two ends between which the answer lies; the next is where the
line through both meets the budget, less half of what may be left of it. Compiled bytes rise in stairs, so that after a
correction, while all have fitted, the next is where the whole budget is met: it may lie on the same stair, and is faster.
Stairs can also fall: where the step becomes much faster, as by the last attention that need not run again, it is cut otherwise,
and the model is off by another amount. So a plan with such a gain is tried even if it is expected to be a little over the
budget. Nothing but the frontier, the compiled bytes and the budget decides, so that equal programs have equal plans.

Plans of one kind differ in how many turns of a loop keep what, and in nothing else. By how much the model is off for one of them
it is off for the others, closely; for another kind the compiler may order all of it otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from memjax._plan.result import Try

MOST_TRIES = 4  # once, and after each of at most three corrections
# Once a plan that fits uses this fraction of the budget, only a plan that promises LARGE_GAIN is still tried. The first two
# tries, and all after one that did not fit, aim at the midpoint of this and 1.
_FULL = 0.985
GAIN = 5e-4  # of a step's time: what another try has to promise
LARGE_GAIN = 0.02  # of a step's time: for it a plan is tried that is expected to take too much
OF_ONE = 1.25  # by so much more the one plan that was compiled may take than others: these took up to 1.2 times less
DOUBTFUL = 1.05  # times the budget: the most that may be expected of such a plan
_KNOWN_AMOUNT = 1.01  # the same, where two tries have told by what amount the model is off
_AS_PREDICTED = 1.05  # of the predicted bytes, or that part of them: the model knows what takes the least there
_AS_FAST = 1e-4  # of a step's time: less is no difference
_KNOWN = 0.5  # of the predicted bytes: where the compiler takes less, the prediction says little
_STEP = 1.002  # between the predicted bytes of plans that are worth telling apart


class Patience(NamedTuple):
    """How much a search may compile.

    Attributes:
      gain: of a step's time: what another try has to promise once a plan fits.
      enough: so many tries will do if one of them fits, unless another promises a large gain.
      most: so many will do if none fits.
      off: the search ends where the first try takes so many times the predicted bytes and does not fit.
      over: it ends where nothing fits and nothing is expected to take less than so many times the budget.
      least_first: the plan of number `least` is compiled first, as nothing is known to be predicted well.
      by_amount: the model is off by an amount, however much: what each array takes is known.
    """

    gain: float = GAIN
    enough: int = MOST_TRIES
    most: int = MOST_TRIES
    off: float = math.inf
    over: float = math.inf
    least_first: bool = False
    by_amount: bool = False


def search(
    predicted: Sequence[int],
    seconds: Sequence[float],
    budget: int,
    compile: Callable[[int], int],
    kind: Callable[[int], Hashable] = lambda number: number,
    patience: Patience = Patience(),  # noqa: B008 (it is immutable)
    least: int = 0,
    above: Try | None = None,
) -> list[Try]:
    """Compiles a few plans, and returns these tries. The largest number within the budget is the fastest plan that fits.

    If none of them fits, the last is the plan of number `least`, unless patience has ended the search.

    Args:
      predicted: bytes of each plan, rising.
      seconds: of a step under each plan, falling.
      budget: bytes.
      compile: from the number of a plan to its compiled bytes. It is called at most four times.
      kind: from the number of a plan to its kind.
      patience: how much may be compiled.
      least: the number of the plan that is compiled where none is expected to fit.
      above: what was compiled before, takes more than all plans, and does not fit: the first plan is corrected by it.
    """
    tries: list[Try] = []
    fits: Try | None = None
    over: Try | None = None
    while len(tries) < (patience.most if fits is None else MOST_TRIES):
        low = 0 if fits is None else fits.number + 1
        high = len(predicted) - 1 if over is None else over.number - 1
        if low > high:
            break
        is_corrected = len(tries) + (above is not None) > 1 and over is None
        aim = budget if is_corrected else (1 + _FULL) / 2 * budget
        expected = {}
        for i in range(low, high + 1):
            alike = [one for one in tries if kind(one.number) == kind(i)]
            below = max((one for one in alike if one.number < i), default=None)
            next_above = min((one for one in alike if one.number > i), default=None)
            nearest = (below, next_above) if alike else (fits, over) if tries else (None, above)
            expected[i] = _expected(predicted[i], *nearest, alike or tries, patience)
        if tries and fits is None:
            is_off = tries[0].compiled > patience.off * tries[0].predicted
            if is_off or min(expected.values()) > patience.over * budget:
                break
        number = max(i for i in expected if expected[i] <= max(aim, expected[low]))
        if fits is None and (len(tries) == MOST_TRIES - 1 or expected[low] > budget):
            if over is not None and over.number <= least:
                break
            number = min(least, high)
        if not tries and patience.least_first:
            number = min(least, high)
        if fits is not None:
            gained = seconds[fits.number] - seconds[number]
            is_doubtful = len(tries) >= patience.enough or (patience.by_amount and expected[number] > budget)
            wanted = LARGE_GAIN if is_doubtful else patience.gain
            if fits.compiled >= _FULL * budget or gained < wanted * seconds[number]:
                fast = seconds[fits.number] / (1 + LARGE_GAIN)
                most = (DOUBTFUL if len(tries) < 2 or not patience.by_amount else _KNOWN_AMOUNT) * budget
                doubtful = [i for i in expected if seconds[i] <= fast and expected[i] <= most]
                if not doubtful:
                    break
                number = doubtful[0]
        one = Try(number, predicted[number], round(expected[number]), compile(number))
        tries.append(one)
        if one.compiled <= budget:
            fits = one
        else:
            over = one
    return tries


def is_out_of_reach(one: Try, budget: int, unsure: float = OF_ONE) -> bool:
    """Whether a plan that is predicted to take the least takes so much, compiled, that no other is expected to fit.

    So it is if the plan takes more than `unsure` times the budget, or more than the budget where the model predicted that,
    nearly right.
    Where the compiler takes far less than was predicted, the model does not know which plan takes the least.
    """
    is_as_predicted = one.predicted <= _AS_PREDICTED * one.compiled and one.compiled <= _AS_PREDICTED * one.predicted
    if is_as_predicted and min(one.predicted, one.compiled) > budget:
        return True
    return one.compiled > unsure * budget and one.compiled > _KNOWN * one.predicted


def _expected(predicted: int, below: Try | None, above: Try | None, tries: Sequence[Try], patience: Patience) -> float:
    """Estimates the compiled bytes of a plan from its predicted bytes and the tries of others: two are next to it."""
    if below is not None and above is not None:
        part = (predicted - below.predicted) / max(above.predicted - below.predicted, 1)
        return below.compiled + part * (above.compiled - below.compiled)
    one = below or above
    if one is None:
        return predicted
    return one.compiled + (predicted - one.predicted) * (1.0 if patience.by_amount else _slope(one, tries))


def _slope(one: Try, tries: Sequence[Try]) -> float:
    """Compiled bytes per predicted byte next to a try: 1 if the model is off by an amount, as mostly; or a factor, as for a
    sharded step if it is not known how arrays are split. Where it is off by so much that it may be either, two tries tell: the
    slope is theirs, between these."""
    factor = max(one.compiled, 1) / max(one.predicted, 1)
    others = [other for other in tries if other.predicted != one.predicted]
    if 2 / 3 < factor < 3 / 2 or not others:
        return 1.0 if 2 / 3 < factor < 3 / 2 else factor
    other = min(others, key=lambda other: abs(other.predicted - one.predicted))
    told = (one.compiled - other.compiled) / (one.predicted - other.predicted)
    return min(max(told, min(1.0, factor)), max(1.0, factor))


def told_apart(predicted: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """The numbers of the plans that are worth a try: the first, the last, and one of each run of nearly equal bytes.

    That is the one of the fewest bytes among those that are as fast as the run's last.
    """
    last = len(predicted) - 1
    chosen = [last]
    for number in range(last - 1, -1, -1):
        if predicted[number] * _STEP <= predicted[last]:
            chosen.append(number)
            last = number
        elif seconds[number] - seconds[last] < _AS_FAST * seconds[last]:
            chosen[-1] = number
    return sorted({0, *chosen, len(predicted) - 1})
