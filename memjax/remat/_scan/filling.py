"""Finds the plan of a scan for a budget: chooses by the model, compiles, and chooses again, corrected by the model's error.

The model counts the bytes that are kept. The compiler's other bytes, for outputs, their gradients and the working memory of a
step, differ little from plan to plan.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from memjax._core import check
from memjax._core.barriers import barrier
from memjax._core.compat import names_an_axis
from memjax._core.lists import Arrays, drop, pick
from memjax._core.meshes import device_of
from memjax._core.program.jaxpr import nbytes, trace
from memjax._plan.budget.digest import digest_of
from memjax._plan.memory.alone import temporary
from memjax._plan.memory.compiled import compile_step
from memjax._plan.memory.layout import layout_of
from memjax._plan.schedule.execute import Execution
from memjax._plan.schedule.unroll import Unroll
from memjax.remat._scan.step import ScanBlocks, StepBackward
from memjax.remat._scan.ways import Way

_MOST_TRIES = 5
_FULL = 0.95  # of the budget
_A_LITTLE_LESS = 0.93
_HOPE = 1.1  # times what the leanest turns would take with the whole budget: plans that take longer are not tried
_ABOUT = 1.02  # times the fewest bytes: no more than that is taken in order to be faster
_MOST_RUNS = 10  # of a step, forwards: more is said
_MOST_KNOWN = 256

_known: dict[str, int | None] = {}


def filling(
    budget: int | str,
    least: int,
    choose: Callable[[int], Way],
    compiled: Callable[[Way], int | None],
    outputs: int,
    *,
    worth: Callable[[Way], bool] | None = None,
) -> Way | None:
    """Returns the fastest plan found for which the compiled scan and its gradient take no more than `budget`.

    Args:
      budget: bytes, or "min": about the fewest.
      least: the fewest bytes by the model.
      choose: from bytes by the model to a way.
      compiled: from a way to its compiled bytes, or None if these cannot be known: then the model decides.
      outputs: bytes of the outputs and their gradients.
      worth: whether a way is worth a compilation; where one is not, the search ends, and the result may be None. Without it
        the plan of the fewest bytes is looked for where no other fits.

    Raises:
      ValueError: not even the plan of the fewest bytes fits.
    """
    if budget == "min":
        return _least(least, choose, compiled)[0]
    assert isinstance(budget, int)
    tried: dict[Way, int] = {}
    fits: Way | None = None
    low, high = 0, 0  # the most room of which the way fits, and the least of which it does not; 0: none is known
    room = max(budget - outputs, least)
    again = False
    while len(tried) < _MOST_TRIES:
        way = choose(room)
        is_new = way not in tried
        if is_new:
            if worth is not None and not worth(way):
                break
            taken = compiled(way)
            if taken is None:  # what takes more memory is not tried without knowing how much
                return way if worth is None else None
            tried[way] = taken
        taken = tried[way]
        if taken <= budget:
            fits, low = way, room
            if taken >= _FULL * budget or way.plan.forward_runs == 1:
                break
        else:
            high = room
        # The model's error is nearly the same for all plans, so correct `room` by it.
        room += budget - taken
        if room < least and worth is not None and not low and high != least:
            room = least  # by the model nothing fits: see whether the least is worth a compilation
            continue
        if not is_new or room <= low or (high and room >= high):
            # At first a little less than does not fit, lest much of the budget be left.
            middle = math.isqrt(high * max(low, least))
            room, again = middle if again else max(int(_A_LITTLE_LESS * high), middle), True
        if room <= max(low, least):
            if low or high == least:
                break
            room = least
    if fits is not None or worth is not None:
        return fits
    way, taken = _least(least, choose, compiled)
    if taken <= budget:
        return way
    raise ValueError(
        f"budget is {check.readable_bytes(budget)}, but the least possible is {taken} bytes, of which "
        f"{check.readable_bytes(outputs)} are outputs of the steps and their gradients. There each step runs forward "
        f'{way.plan.forward_runs:.1f} times on average; give that or more, or "min"'
        + ("; return None as y where outputs are not used" if 2 * outputs > taken else "")
    )


def with_unroll(
    unrolls: Sequence[tuple[Unroll, float]],
    found: Callable[[Unroll, Callable[[Way], bool] | None], Way | None],
    seconds: Callable[[Way], float],
    expected: Callable[[], float],
) -> Way:
    """The best of the ways that are `found` for each of `unrolls`, which comes with how long a step then takes.

    Those that make steps fast leave less of the budget for the plan, which runs more steps then. The next is tried only if it
    would be better with a plan of the `expected` seconds, which has the whole budget. A plan is not worth a compilation that
    takes longer than the best so far, or much longer than the last turns would take with such a plan. The last, which take the
    least memory, have to be found if no others fit.
    """
    best: tuple[float, Way] | None = None
    *_, (last, slowest) = unrolls
    for unroll, relative in unrolls:
        if best is not None and best[0] <= relative * expected():
            break
        worth = None
        if best is not None or unroll != last:
            most = min(math.inf if best is None else best[0], _HOPE * slowest * expected()) / relative
            worth = lambda way, most=most: seconds(way) < most
        if (way := found(unroll, worth)) is not None:
            score = relative * seconds(way)
            if best is None or score < best[0]:
                best = score, way
    assert best is not None
    return best[1]


def _least(least: int, choose: Callable[[int], Way], compiled: Callable[[Way], int | None]) -> tuple[Way, int]:
    """(way, its compiled bytes): the fastest of those that take about the fewest bytes when compiled.

    The plan that keeps the least is seldom worth its time: it runs a step hundreds of times to save what is little beside outputs
    and working memory.
    """
    found: list[tuple[Way, int]] = []
    for i in range(_MOST_TRIES):
        way = choose(least * 2**i)
        taken = compiled(way)
        if taken is None:
            return (way, least) if not i else found[-1]
        found.append((way, taken))
    fewest = min(taken for _, taken in found)
    return [(way, taken) for way, taken in found if taken <= _ABOUT * fewest][-1]


def said(way: Way) -> Way:
    """The way, after a warning if it takes long."""
    plan = way.plan
    if plan.forward_runs > _MOST_RUNS:
        warnings.warn(
            f"remat.scan: within this budget each of {plan.length} steps runs forward {plan.forward_runs:.0f} times on average. "
            "A larger budget takes much less time: the docstring of remat.scan says from which on a step runs twice",
            UserWarning,
            stacklevel=2,
        )
    return way


def compiled_bytes(way: Way, init: Arrays, xs: Arrays, reverse: bool) -> int | None:
    """Temporary bytes of the scan and its gradient, its outputs and their cotangents included, compiled by itself, per device.

    None where it is no program of its own.
    """
    backward, plan, unroll = way
    step = backward.step
    groups = [step.consts, init, xs]
    values = [value for group in groups for value in group]
    wrt = [*backward.wrt_consts, *backward.wrt_carry, *backward.wrt_x]
    n, m = len(step.consts), len(step.consts) + len(init)

    def plain(*values: Any) -> Any:
        consts, carry, xs = values[:n], list(values[n:m]), list(values[m:])
        return lax.scan(lambda carry, x: step.run(consts, carry, x), carry, xs, plan.length, reverse)

    def gradient(inputs: Sequence[Any], _: Sequence[Any]) -> Any:
        blocks = ScanBlocks(backward, list(inputs[:n]), list(inputs[m:]), plan.length, reverse, unroll)
        execution = Execution(plan, blocks, None)
        carry, ys, saved = execution.forward(list(inputs[n:m]))
        outs = [*carry, *ys]
        cts = barrier([out + out for out in pick(outs, backward.out_float)])
        size = sum(backward.wrt_carry)
        found = blocks.pull_back(execution, saved, cts[:size], cts[size:])
        return drop(outs, backward.out_float), [ct for group in found for ct in group]

    types = [jax.typeof(value) for value in values]
    closed = trace(plain, types, step.axes)
    layout = layout_of(closed, values, wrt)
    kind = device_of(layout.shardings).device_kind
    name = digest_of(closed, wrt, plan, backward.kept_places, reverse, unroll, *layout.shardings, kind)
    if name not in _known:
        if len(_known) == _MOST_KNOWN:
            _known.pop(next(iter(_known)))
        has_axes = any(names_an_axis(effect) for effect in closed.jaxpr.effects)
        program = compile_step(gradient, types, [], layout, wrt, has_axes=has_axes)
        _known[name] = None if program is None else temporary(program)
    return _known[name]


def output_bytes(length: int, backward: StepBackward) -> int:
    """Bytes of the outputs of all steps, and of the cotangents of their floats."""
    floats = backward.out_float[len(backward.step.carry) :]
    return length * sum(
        (1 + has_cotangent) * nbytes(y) for y, has_cotangent in zip(backward.step.y, floats, strict=True)
    )
