"""What to keep of a stretch: the subsets of candidates that are on the frontier of bytes and seconds.

Candidates are what a minimum cut keeps at one price of memory or another. With codes there are two cuts for each price: one for
what has to be exact, from exact values alone, and one for the rest, where an array costs its code, if that is cheaper. Subsets
in which something exact would follow from a rounded value are left out. Booleans as bits are exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from memjax._core.backward.minimum_cut import Graph, cheapest
from memjax._core.program.costs import array_bytes
from memjax._core.program.dataflow import Dataflow, made_by, read_by
from memjax._core.program.primitives import expensive
from memjax._plan.codes import Code, Codes, rounds

_PRICES = 12
_MOST_CANDIDATES = 12  # all subsets of which are looked at
_MOST_WITH_CODES = 14
_MOST_OPTIONS = 24
_SOME_TIME = 1e-15  # seconds of what takes none, so that of equal cuts the one that runs fewer equations again is taken
_SMALL = 64  # bytes of all that is wanted to those of a statistic, at least, that is kept beside whatever codes


class Problem(NamedTuple):
    """The values that the backward pass of a stretch needs, and the costs of keeping or recomputing them.

    Attributes:
      again: equations that can be rerun, with their dependences.
      wanted: variables that the backward pass reads.
      known: variables that are available in the backward pass without being kept.
      seconds: the time of each equation, by its `id`.
      to_keep: seconds that keeping a variable takes.
      to_code: seconds that keeping a variable in a code of so many bytes takes.
      names: maps each alias to the variable whose memory it shares.
    """

    again: Dataflow
    wanted: Sequence[Any]
    known: set[Any]
    seconds: dict[int, float]
    to_keep: Callable[[Any], float]
    to_code: Callable[[Any, int], float]
    names: dict[Any, Any]

    def to_rerun(self, eqn: Any) -> float:
        """Seconds that running an equation again takes."""
        return max(self.seconds[id(eqn)], _SOME_TIME)

    def prices(self) -> list[float]:
        """Seconds that a byte is worth: several; one where nothing can run again, for what is wanted can only be kept there."""
        total_bytes = sum(map(array_bytes, self.again.place))
        total_seconds = sum(self.seconds[id(eqn)] for eqn in self.again.eqns)
        if not total_bytes or not total_seconds:
            return [0.0]
        return [0.0, *(total_seconds / total_bytes * np.logspace(-2, 3, _PRICES))]


class Subset(NamedTuple):
    """The variables that are kept uncoded, and those kept in codes."""

    kept: list[Any]
    coded: list[Code]


def exact_subsets(problem: Problem) -> list[Subset]:
    """The subsets without codes; the fewest bytes first."""
    names = problem.names
    roots = lambda kept: dict.fromkeys(names.get(var, var) for var in kept)
    cuts = [[var for var in roots(kept) if var not in problem.known] for kept in kept_at_prices(problem)]
    votes = {var: tuple(i for i, cut in enumerate(cuts) if var in cut) for cut in cuts for var in cut}
    # Sums over devices cannot run again. Those of statistics are many, and small: they are no choice.
    total = sum(map(array_bytes, problem.wanted))
    is_small = lambda var: _SMALL * array_bytes(var) <= total
    once = made_by(problem.again.eqns[i] for i in problem.again.acting)
    always = [var for var in votes if var in once and is_small(var)]
    # Of statistics that the same cuts keep all are kept or none, so that there is room for what is large.
    together: dict[Any, list[Any]] = {}
    for var in votes:
        if var not in always:
            together.setdefault((votes[var],) if is_small(var) else var, []).append(var)
    candidates = sorted(together.values(), key=lambda group: -len(votes[group[0]]))[:_MOST_CANDIDATES]
    wanted = [var for var in problem.wanted if var not in always]
    found = _on_frontier(problem._replace(wanted=wanted, known={*problem.known, *always}), candidates, [], None)
    # Where what has to be kept is not all among the candidates, no subset of them will do; each of the cuts does.
    return [Subset([*always, *subset.kept], []) for subset in found] or [
        Subset(cut, []) for cut in sorted(cuts, key=lambda cut: sum(map(array_bytes, cut)))
    ]


def coded_subsets(problem: Problem, codes: Codes) -> list[Subset]:
    """The subsets with codes; statistics are kept in all of them."""
    if all(codes.codec(var) is None for var in (*problem.again.place, *problem.wanted)):
        return []
    total = sum(map(array_bytes, problem.wanted))
    again = problem.again
    at_hand = made_by(
        eqn
        for eqn, reads in zip(again.eqns, again.reads, strict=True)
        if problem.known.issuperset(reads) and not expensive(eqn)
    )
    small = [
        var
        for var in problem.wanted
        if var in codes.statistics and var not in at_hand and _SMALL * array_bytes(var) <= total
    ]
    problem = problem._replace(
        wanted=[var for var in problem.wanted if var not in small], known={*problem.known, *small}
    )
    votes: dict[tuple[Any, bool], int] = {}
    for price in problem.prices():
        for var, is_coded in _kept_with_codes(price, problem, codes):
            root = problem.names.get(var, var)
            if root not in problem.known:
                key = root, is_coded and codes.nbytes(root) is not None
                votes[key] = votes.get(key, 0) + 1
    best = sorted(votes, key=lambda key: -votes[key])[:_MOST_WITH_CODES]
    coded = [codes.of(var) for var, is_coded in best if is_coded]
    if not coded:
        return []
    found = _on_frontier(problem, [[var] for var, is_coded in best if not is_coded], coded, codes)
    return [Subset([*small, *subset.kept], subset.coded) for subset in found]


def _kept_with_codes(price: float, problem: Problem, codes: Codes) -> list[tuple[Any, bool]]:
    """Chooses the variables to keep at one price of memory; returns (variable, whether it is kept in a code)."""

    def in_code(var: Any) -> int | None:
        """Bytes of the code, if it is worth that."""
        few = codes.nbytes(var)
        if few is None:
            return None
        more = problem.to_code(var, few) - problem.to_keep(var)
        return few if price * (array_bytes(var) - few) > more else None

    def in_exact_code(var: Any) -> int | None:
        return None if rounds(codes.bits(var)) else in_code(var)

    def kept_at(
        wanted: Iterable[Any], known: set[Any], in_code: Callable[[Any], int | None], **never: Any
    ) -> list[Any]:
        nbytes = lambda var: in_code(var) or array_bytes(var)
        to_keep = lambda var: problem.to_code(var, few) if (few := in_code(var)) else problem.to_keep(var)
        return _kept_at(price, problem, wanted, known, nbytes, to_keep, **never)

    strict = [var for var in problem.wanted if var in codes.exact]
    kept = kept_at(strict, problem.known, in_exact_code)
    known = {*problem.known, *kept}
    known.update(made_by(problem.again.needed(strict, known)))
    # Values that can be computed without a code's rounding, from values known or kept uncoded.
    exact = problem.again.following(known, lambda eqn: True)

    def never(eqn: Any) -> bool:
        is_exact = exact.issuperset(read_by([eqn]))
        return bool(eqn.effects) or not (is_exact or codes.keeps_errors_small(eqn))

    rest = kept_at(problem.wanted, known, in_code, never=never)
    found = [*((var, in_exact_code(var)) for var in kept), *((var, in_code(var)) for var in rest)]
    return [(var, few is not None) for var, few in found]


def kept_at_prices(problem: Problem) -> list[list[Any]]:
    """The variables to keep at each of the prices, which rise.

    What a cut costs is linear in the price: one that is the best at two prices is so at all between, which need no search.
    """
    graph = Graph(problem.wanted, problem.again.makers, problem.known, lambda eqn: not eqn.effects)
    costs = {var: (max(array_bytes(var), 1), problem.to_keep(var)) for var in graph.variables}

    @functools.cache
    def at(price: float) -> list[Any]:
        return graph.cheapest(lambda var: price * costs[var][0] + costs[var][1], problem.to_rerun)

    def kept(prices: Sequence[float]) -> list[list[Any]]:
        if len(prices) < 3 or at(prices[0]) == at(prices[-1]):
            return [at(prices[0])] * (len(prices) - 1) + [at(prices[-1])]
        middle = len(prices) // 2
        return kept(prices[: middle + 1])[:-1] + kept(prices[middle:])

    return kept(problem.prices())


def _kept_at(
    price: float,
    problem: Problem,
    wanted: Iterable[Any],
    known: set[Any],
    nbytes: Callable[[Any], int],
    to_keep: Callable[[Any], float],
    never: Callable[[Any], bool] = lambda eqn: bool(eqn.effects),
) -> list[Any]:
    """Chooses the variables to keep if a byte costs `price` seconds; `never` says which equations must not be rerun."""
    return cheapest(
        wanted,
        problem.again.makers,
        known,
        lambda var: price * max(nbytes(var), 1) + to_keep(var),
        lambda eqn: None if never(eqn) else problem.to_rerun(eqn),
    )


def _on_frontier(
    problem: Problem, exact: Sequence[Sequence[Any]], coded: Sequence[Code], codes: Codes | None
) -> list[Subset]:
    """The subsets of candidates that are on the frontier of bytes and seconds.

    Args:
      problem: the stretch.
      exact: variables that may be kept uncoded, in groups of which all are kept or none.
      coded: what may be kept in codes.
      codes: of the program, if something is.
    """
    masks = np.arange(1 << (len(exact) + len(coded)))
    bit = lambda i: (masks >> i & 1).astype(bool)
    nothing = np.zeros(len(masks), bool)
    as_it_is = {var: bit(i) for i, group in enumerate(exact) for var in group}
    in_code = {code.of: bit(len(exact) + i) for i, code in enumerate(coded)}
    there = dict(as_it_is)
    for var, mask in in_code.items():
        there[var] = there.get(var, nothing) | mask
    nbytes, times = np.zeros(len(masks)), np.zeros(len(masks))
    for var, mask in as_it_is.items():
        nbytes += mask * array_bytes(var)
        times += mask * problem.to_keep(var)
        if var in in_code:
            times[mask & in_code[var]] = np.inf
    for code in coded:
        nbytes += in_code[code.of] * code.nbytes
        times += in_code[code.of] * problem.to_code(code.of, code.nbytes)

    needed = {var: ~there.get(var, nothing) for var in problem.wanted}
    running: list[tuple[Any, np.ndarray]] = []
    for eqn, reads in zip(reversed(problem.again.eqns), reversed(problem.again.reads), strict=True):
        runs = np.logical_or.reduce([needed.get(out, nothing) for out in eqn.outvars])
        if not runs.any():
            continue
        running.append((eqn, runs))
        times[runs] += np.inf if eqn.effects else problem.seconds[id(eqn)]
        for var in dict.fromkeys(reads):
            if var not in problem.known:
                needed[var] = needed.get(var, nothing) | (runs & ~there.get(var, nothing))
    for var in needed.keys() - problem.again.place.keys():
        times[needed[var]] = np.inf
    if codes is not None:
        times[_breaks(problem, running[::-1], there, in_code, codes)] = np.inf
    return [
        Subset(
            [var for var, mask in as_it_is.items() if mask[i]],
            [code for code in coded if in_code[code.of][i]],
        )
        for i in _frontier(nbytes, times)
    ]


def _breaks(
    problem: Problem,
    running: Sequence[tuple[Any, np.ndarray]],
    there: dict[Any, np.ndarray],
    in_code: dict[Any, np.ndarray],
    codes: Codes,
) -> np.ndarray:
    """Marks the subsets in which a value that must be exact would be computed from a rounded one, or errors would grow.

    Args:
      problem: the stretch.
      running: equations with the subsets in which they are rerun, in order.
      there: for each variable, the subsets in which it is kept.
      in_code: for each variable, the subsets in which it is kept in a code.
      codes: the codes of the program.
    """
    nothing = np.zeros_like(next(iter(in_code.values())))
    rounded = {var: mask for var, mask in in_code.items() if rounds(codes.bits(var))}
    broken = nothing.copy()
    for eqn, runs in running:
        mine = runs & np.logical_or.reduce([nothing, *(rounded[v] for v in read_by([eqn]) if v in rounded)])
        if not mine.any():
            continue
        if not codes.keeps_errors_small(eqn):
            broken |= mine
        for out in eqn.outvars:
            rounded[out] = rounded.get(out, nothing) | (mine & ~there.get(out, nothing))
    for var in problem.wanted:
        if var in codes.exact and var in rounded:
            broken |= rounded[var]
    return broken


def _frontier(nbytes: np.ndarray, times: np.ndarray) -> list[int]:
    """The indices of the Pareto-optimal points in bytes and times; the fewest bytes first."""
    order = np.lexsort((times, nbytes))
    found, best = [], np.inf
    for i in order:
        if times[i] < best * (1 - 1e-4):
            best = times[i]
            found.append(int(i))
    if len(found) > _MOST_OPTIONS:  # those that are left out lie closest to the line between their neighbours
        found = _thinned(found, nbytes, times)
    return found


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
