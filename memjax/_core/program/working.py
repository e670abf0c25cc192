"""The working memory of a stretch of equations: the most bytes alive at one moment, by a model of what the compiler fuses."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from memjax._core.compat import makes_two_words, scan_counts
from memjax._core.program.breadth_first import breadth_first
from memjax._core.program.costs import array_bytes, is_fusible, running, stored
from memjax._core.program.cpu_lowering import is_gradient_of_kernel
from memjax._core.program.dataflow import Dataflow, flow_of, made_by, read_by, variables
from memjax._core.program.jaxpr import calls_in_place
from memjax._core.program.primitives import CALLS, CALLS_OF_ONE_BODY, LOOPS, SCATTERS, WHOLE_OPERANDS, WRITTEN

PROGRAMS = LOOPS | CALLS | CALLS_OF_ONE_BODY
_OVER = SCATTERS | {WRITTEN}  # besides what is elementwise: written over an operand that is not needed any more
_WORDS = 8  # bytes of two words
_WITH_MEMORY = PROGRAMS | {"conv_general_dilated", "select_and_scatter_add", "random_bits"}  # see `_inside`


class Moment(NamedTuple):
    """A moment in a stretch of equations.

    Attributes:
      nbytes: live bytes at that moment.
      flow: the equations, in the order in which they run.
      at: the index of the equation that runs at that moment; -1: none has run.
      made: the variables that this equation writes to memory.
      over: bytes of these that are written over an operand which is no longer needed.
      inside: bytes of the equation's working memory.
      spans: (variable, first, last) for those that outlive an equation: live after equation `first`, up to `last`.
      words: bytes of the variables whose size in memory differs from that of their type.
    """

    nbytes: int
    flow: Dataflow
    at: int
    made: list[Any]
    over: int
    inside: int
    spans: list[tuple[Any, int, int]]
    words: dict[Any, int]

    @property
    def alive(self) -> list[tuple[Any, int]]:
        """The variables that are live at that moment, with their bytes."""
        there = [var for var, first, last in self.spans if first < self.at <= last] + self.made
        return [(var, self.words.get(var) or array_bytes(var)) for var in there]


def peak_bytes(*arguments: Any, **options: Any) -> int:
    """The most bytes live at one moment: see `fullest_moment`."""
    return fullest_moment(*arguments, **options).nbytes


def fullest_moment(
    eqns: Sequence[Any] | Dataflow,
    resident: Iterable[Any],
    entering: Iterable[Any],
    leaving: Iterable[Any],
    results: Iterable[Any],
    platform: str,
    names: dict[Any, Any] | None = None,
    *,
    is_loop: bool = False,
    places: Iterable[Any] = (),
) -> Moment:
    """The moment with the most live bytes.

    Args:
      eqns: in the order in which they run.
      resident: values that are in memory all the time. The caller counts them.
      entering: values that are live at the start, until their last read.
      leaving: values that stay live at the end.
      results: values that are outside of temporary memory once computed.
      platform: the platform to compile for.
      names: maps each alias to the variable whose memory it shares; None: as these equations say.
      is_loop: whether the equations are the body of a loop, whose arrays are laid out side by side with few gaps.
      places: results whose memory holds other values until they are computed, each one at a time.
    """
    flow = flow_of(eqns)
    names = flow.names if names is None else names
    roots = lambda atoms: {names.get(var, var) for var in variables(atoms)}
    resident, results = roots(resident), roots(results)
    free = roots(places).intersection(made_by(flow.eqns))
    entering, leaving = roots(entering) - resident, roots(leaving) - resident
    # On GPUs reserved memory is more than what is alive, in fragments: as if values that several equations read were written.
    written = stored(
        flow, [*resident, *entering, *leaving, *results], platform, writes_shared=platform != "cpu" and not is_loop
    )
    end = len(flow.eqns)
    last: dict[Any, int] = dict.fromkeys(leaving, end)
    read = flow.roots if names is flow.names else flow.roots_by(names)
    for i in range(end - 1, -1, -1):
        # An output that is not written to memory is fused into its consumers, so this equation's operands live until the last
        # of them.
        runs = i
        for var in flow.eqns[i].outvars:
            if var not in written and var not in names:
                runs = max(runs, last.get(var, i))
        runs = min(runs, end - 1)
        for var in read[i]:
            if last.get(var, -1) < runs:
                last[var] = runs
    random = [eqn for eqn in flow.eqns if eqn.primitive.name == "random_bits"]
    words = {out: _WORDS * out.aval.size for out in made_by(filter(_stays_words, random))}
    size = lambda var: words.get(var) or array_bytes(var)
    alive = peak = sum(map(size, entering))
    then: tuple[int, list[Any], int, int] = -1, [], 0, 0
    spans = [(var, -2, last.get(var, 0)) for var in entering]
    there = dict.fromkeys(entering)
    # What a loop carries lies in one place before, in and after it.
    of_programs = set(made_by(eqn for eqn in flow.eqns if eqn.primitive.name in PROGRAMS))
    ends: dict[int, list[Any]] = {}
    for var, _, until in spans:
        ends.setdefault(until, []).append(var)
    for i, eqn in enumerate(flow.eqns):
        found = [out for out in eqn.outvars if out in written and out not in names and out not in resident]
        if not found and i not in ends and eqn.primitive.name not in _WITH_MEMORY:
            continue
        if not is_fusible(eqn):  # others may read what lies in the place of their result
            free.difference_update(found)
        made = [out for out in found if out not in results]
        new = sum(map(size, made))
        dying = sum(map(size, ends.get(i, [])))
        over = 0  # bytes written over an operand that is not needed any more
        if is_fusible(eqn) or eqn.primitive.name in _OVER:
            over = min(new, dying)
        elif platform == "cpu":
            over = min(new, sum(map(size, roots(_carried(eqn)).intersection(ends.get(i, [])))))
        within = _inside(eqn, platform)
        now = alive + new - over + within
        if now > peak and free:
            lent = [var for var in (*there, *made) if var in free or var not in of_programs]
            now -= lent_to([*map(size, lent), *_arrays_inside(eqn, within)], map(size, free))
        if now > peak:
            peak, then = now, (i, made, over, within)
        alive += new - dying
        free.difference_update(found)
        for var in ends.get(i, []):
            there.pop(var, None)
        for out in made:
            if last.get(out, -1) > i:
                ends.setdefault(last[out], []).append(out)
                spans.append((out, i, last[out]))
                there[out] = None
            else:
                alive -= size(out)
    return Moment(peak, flow, *then, spans, words)


def _stays_words(eqn: Any) -> bool:
    """Whether the equation's random bits are stored as two words per number, which each consumer combines for itself."""
    return eqn.primitive.name == "random_bits" and makes_two_words(eqn.invars[0].aval.dtype)


def _inside(eqn: Any, platform: str) -> int:
    """Bytes of working memory inside an equation: a loop's iteration, a branch, a call, a convolution, and so on."""
    name = eqn.primitive.name
    if name in PROGRAMS:
        return max((_of_body(body, _carry(eqn, body), platform) for body in running(eqn, platform)), default=0)
    if name == "conv_general_dilated":
        return _inside_convolution(eqn, platform)
    if name == "random_bits" and platform == "cpu":
        # Threefry's rounds are a loop there, which does not write its words over those of the round before.
        return _WORDS * eqn.outvars[0].aval.size if _stays_words(eqn) else array_bytes(eqn.outvars[0])
    if name == "select_and_scatter_add" and platform in ("cuda", "rocm"):
        source = eqn.invars[0].aval  # for each window where its largest element is, in 32 bits for each dimension
        return 4 * source.ndim * source.size
    return 0


def _of_body(body: Any, carry: _Carry, platform: str) -> int:
    """The most bytes alive in a body, besides what it reads and results that are there."""
    if platform != "cpu":
        return peak_bytes(body.eqns, [*body.invars, *body.constvars], [], [], body.outvars, platform)
    moment, before = _moment_in(body, carry)
    return max(moment.nbytes - sum(map(array_bytes, before)), 0)


@functools.lru_cache(256)  # planning asks for every way to run a stretch
def _moment_in(body: Any, carry: _Carry) -> tuple[Moment, Sequence[Any]]:
    """The fullest moment of a body on a CPU, and what is carried into it.

    What reads whole operands, as a product does, has slices of stacks copied for it. The copies are made first.
    """
    closed = core.ClosedJaxpr(body, [None] * len(body.constvars))  # types are all that counts
    program = calls_in_place(closed, differentiable=False)
    before, slices = program.invars[carry.start : carry.stop], program.invars[carry.stop :]
    flow = breadth_first(Dataflow(program.eqns), program.outvars)
    whole = read_by(eqn for eqn in flow.eqns if eqn.primitive.name in WHOLE_OPERANDS)
    read = {flow.names.get(var, var) for var in whole}
    copies = [var for var in slices if var in read] if carry.has_slices else []
    others = {*program.invars, *program.constvars}.difference(before, copies)
    count = carry.stop - carry.start
    after, results = program.outvars[:count], program.outvars[count:]
    return fullest_moment(flow, others, [*before, *copies], after, results, "cpu"), before


def _arrays_inside(eqn: Any, within: int) -> list[int]:
    """Bytes of the arrays that are the working memory of an equation on a CPU, `within` in all."""
    if eqn.primitive.name not in PROGRAMS:
        return [within]
    moments = [_moment_in(body, _carry(eqn, body)) for body in running(eqn, "cpu")]
    if not moments:
        return []
    moment, before = max(moments, key=lambda one: one[0].nbytes - sum(map(array_bytes, one[1])))
    return [*(nbytes for var, nbytes in moment.alive if var not in before), moment.inside]


class _Carry(NamedTuple):
    """What a loop carries, among the inputs of its body.

    Attributes:
      start, stop: where it begins and ends. New values go where the old ones lie, if these are needed no more then.
      has_slices: whether the inputs after it are slices of stacks.
    """

    start: int
    stop: int
    has_slices: bool = False


def _carry(eqn: Any, body: Any) -> _Carry:
    """What a body carries: nothing, unless it is that of a loop."""
    if eqn.primitive.name == "scan":
        constants, carried = scan_counts(eqn)
        return _Carry(constants, constants + carried, has_slices=True)
    is_body = eqn.primitive.name == "while" and len(body.outvars) == len(eqn.outvars)
    return _Carry(len(body.invars) - len(body.outvars), len(body.invars)) if is_body else _Carry(0, 0)


def _carried(eqn: Any) -> Sequence[Any]:
    """What an equation starts from and changes, if it is a loop."""
    if eqn.primitive.name == "scan":
        consts, carried = scan_counts(eqn)
        return eqn.invars[consts : consts + carried]
    return eqn.invars[-len(eqn.outvars) :] if eqn.primitive.name == "while" else ()


def _padded_size(eqn: Any) -> int:
    """The number of elements of a pool's input, which its gradient has as well, padding included."""
    shape, padding = eqn.outvars[0].aval.shape, eqn.params["padding"]
    return math.prod(size + low + high for size, (low, high) in zip(shape, padding, strict=True))


def _inside_convolution(eqn: Any, platform: str) -> int:
    """On CPUs the operands of the gradient of a kernel, transposed; on GPUs an operand that is padded more on one side."""
    if platform == "cpu":
        return sum(map(array_bytes, eqn.invars)) if is_gradient_of_kernel(eqn) else 0
    if platform not in ("cuda", "rocm"):
        return 0
    # Of the gradient of a kernel with strides, which dilate here, the kernel's last steps may have left a part out.
    dilation = eqn.params["rhs_dilation"]
    if all(high <= low < high + step for (low, high), step in zip(eqn.params["padding"], dilation, strict=True)):
        return 0
    shape = list(eqn.invars[0].aval.shape)
    for dim, (low, high) in zip(eqn.params["dimension_numbers"].lhs_spec[2:], eqn.params["padding"], strict=True):
        shape[dim] += max(low, 0) + max(high, 0)
    return math.prod(shape) * eqn.invars[0].aval.dtype.itemsize


def hoisted_bytes(eqns: Iterable[Any], platform: str) -> int:
    """Bytes of the values that the compiler computes at the start of the program for these equations.

    On CPUs, for the gradients of pools: each element's index in each of its dimensions, and a zero, padding included.
    """
    pools = [eqn for eqn in eqns if eqn.primitive.name == "select_and_scatter_add"] if platform == "cpu" else []
    return sum(4 * (eqn.outvars[0].aval.ndim + 1) * _padded_size(eqn) for eqn in pools)


def lent_to(arrays: Iterable[int], places: Iterable[int]) -> int:
    """Bytes of the arrays that find a place, the largest first, each in the smallest that is large enough."""
    free, total = sorted(places), 0
    for size in sorted(arrays, reverse=True):
        place = bisect_left(free, size)
        if place < len(free):
            free.pop(place)
            total += size
    return total
