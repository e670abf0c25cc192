"""The least number of forward steps to backpropagate through a chain, for each way of spending memory.

Gruslys et al. 2016, "Memory-Efficient Backpropagation Through Time": sections 3.1 (hidden states), 3.2
(internal states), 3.4 (both) and equation 10. Each class answers two questions about a segment of `t` steps
with `m` units of memory (one unit holds one hidden state; in `InternalCounts`, one internal state):
`count(t, m)`, the least number of forward steps, and `split(t, m)`, the first decision of a schedule with
that count.

Hidden and internal states have closed forms, so their cost is that of a few binomials. Both together need the
table, `t * m` entries, each found by looking at convex breakpoints only (see `_relax_row`): about 1 s for
10,000 by 100.
"""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

import numpy as np


class Split(NamedTuple):
    """Advance `y` steps into the segment, then keep the state there."""

    y: int
    # "hidden": the state after step y; "internal": the internal state of step y; "none": nothing is kept
    kind: str
    units: int  # memory that the kept state takes from the rest of the segment


def _repetitions(t: int, m: int) -> int:
    """The smallest r with binom(m + r, m) >= t."""
    high = 1
    while math.comb(m + high, m) < t:
        high *= 2
    return bisect.bisect_left(range(high), t, lo=high // 2, key=lambda r: math.comb(m + r, m))


class HiddenCounts:
    """Hidden states only: C(t, m) = (r + 1) t - binom(m + r, m + 1). The segment's start takes one unit."""

    def count(self, t: int, m: int) -> int:
        if t == 0:
            return 0
        r = _repetitions(t, m)
        return (r + 1) * t - math.comb(m + r, m + 1)

    def split(self, t: int, m: int) -> Split:
        if m == 1 or t <= 2:  # storing the second of two steps' states gains nothing
            return Split(t, "none", 0)
        r = _repetitions(t, m)
        # Any y with y <= binom(m+r-1, m) and t - y >= binom(m+r-2, m-1) is optimal; the largest stores the
        # least.
        y = min(math.comb(m + r - 1, m), t - math.comb(m + r - 2, m - 1))
        return Split(y, "hidden", 1)


class InternalCounts:
    """Internal states only: C(t, m) = r (t + 1) - binom(m + r, m + 1). The working core is one unit."""

    def count(self, t: int, m: int) -> int:
        # The paper's closed form, through the identity HSM(t + 1, m) = t + 1 + ISM(t, m).
        return HiddenCounts().count(t + 1, m) - (t + 1)

    def split(self, t: int, m: int) -> Split:
        if m == 1 or t == 1:
            return Split(t, "none", 0)
        y = HiddenCounts().split(t + 1, m).y
        return Split(y, "internal", 1) if y < t else Split(t, "none", 0)


class MixedCounts:
    """Hidden states (one unit) and internal states (`alpha` units, the step's output hidden state included).

    With `shared`, equation 10: an internal state stored right at the segment's start shares its input hidden
    state with the stored start, and takes `alpha - 1` units.
    """

    def __init__(self, length: int, slots: int, alpha: int, *, shared: bool):
        self.alpha, self.shared = alpha, shared
        steps = np.arange(length + 1, dtype=np.int64)
        # Beyond alpha units for each step, memory changes nothing.
        rows = min(slots, alpha * length + 1)
        self.table = np.empty((rows + 1, length + 1), np.int64)
        self.table[0] = 2**62  # no segment runs without a unit for its start
        self.table[1] = steps * (steps + 1) // 2
        same = np.zeros(rows + 1, bool)  # whether a row is the one before: so it is if those that it is made of are
        for m in range(2, rows + 1):
            self.table[m] = self.table[m - 1]
            same[m] = all(same[second] for second, *_ in self._choices(m))
            if not same[m]:
                self._relax_row(m)
                same[m] = np.array_equal(self.table[m], self.table[m - 1])

    def _choices(self, m: int):
        """(row of the second part, steps left out of the first part, last y, kind) for each way to keep a state."""
        yield m - 1, 0, None, "hidden"
        if self.shared and m - self.alpha + 1 >= 1:
            yield m - self.alpha + 1, 1, 1, "internal"
        if m - self.alpha >= 1:
            yield m - self.alpha, 1, None, "internal"

    def _relax_row(self, m: int) -> None:
        """Lower row `m` from row `m - 1`, a bound from above, to the fixed point of the recurrence, which is
        unique.

        The minimum over y of g(y) + h(t - y) is reached at an end, at a y where g's slope grows, or at one where h's
        does: elsewhere a neighbour is no worse. Both are nearly piecewise linear, so there are few such places, and each
        is one vector operation over all t.
        """
        row = self.table[m]
        length = len(row) - 1
        steps = np.arange(length + 1, dtype=np.int64)
        before = np.full_like(row, -1)  # not empty: recycled memory may hold this very row
        while not np.array_equal(before, row):
            before[:] = row
            np.minimum(row[1:], steps[1:] + row[:-1], out=row[1:])
            for second, skip, last, _ in self._choices(m):
                h = self.table[second]
                if last is not None:  # y = 1 alone
                    np.minimum(row[2:], 1 + h[1:-1], out=row[2:])
                    continue
                for tail in _growing_slopes(h[1:]):  # t - y = tail
                    new = steps[1 : length + 1 - tail] + row[1 - skip : length + 1 - tail - skip] + h[tail]
                    np.minimum(row[tail + 1 :], new, out=row[tail + 1 :])
                for y in _growing_slopes(steps[1:] + row[1 - skip : length + 1 - skip]):
                    new = y + row[y - skip] + h[1 : length + 1 - y]
                    np.minimum(row[y + 1 :], new, out=row[y + 1 :])

    def count(self, t: int, m: int) -> int:
        return int(self.table[min(m, len(self.table) - 1), t])

    def split(self, t: int, m: int) -> Split:
        m = min(m, len(self.table) - 1)
        if m == 1 or t == 1:
            return Split(t, "none", 0)
        row, best = self.table[m], self.table[m, t]
        if t + row[t - 1] == best:
            return Split(t, "none", 0)
        # Where costs are equal, an internal state saves later work: loads, stores and a second forward step.
        for second, skip, last, kind in sorted(self._choices(m), key=lambda choice: choice[-1], reverse=True):
            ys = np.arange(1, min(last or t - 1, t - 1) + 1)
            best_ys = np.nonzero(ys + self.table[second, t - ys] + row[ys - skip] == best)[0]
            if len(best_ys):
                return Split(int(ys[best_ys[-1]]), kind, m - second)
        raise AssertionError("the table is not a fixed point of its recurrence")


def _growing_slopes(values: np.ndarray) -> list[int]:
    """Indices into `values`, counted from one, where its sum with a line may be least: 1, and those where the slope grows."""
    if len(values) < 2:
        return []
    slopes = np.diff(values)
    return [1, *(np.nonzero(slopes[1:] > slopes[:-1])[0] + 2).tolist()]
