"""What a chain's schedule is made of and what it takes; the schedules of the least memory, and of the least time within some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


class BlockCost(NamedTuple):
    """What one block of a chain costs: seconds (or any unit of time) and bytes.

    Attributes:
      forward: time of the forward pass.
      backward: time of the backward pass, from what is kept.
      output: bytes of the output, which is the next block's input.
      kept: bytes kept between forward and backward, the output included, the input not.
      forward_work: bytes that the forward pass needs besides its input and output.
      backward_work: bytes that the backward pass needs besides the input and what is kept: gradients of output and input,
        and what is temporary. Gradients of parameters are not counted.
      standing: bytes of arrays that depend on no input, such as indices: the compiler may make them before anything else,
        and hold them throughout, whatever runs. Blocks of equal costs are taken to have the same ones.
    """

    forward: float
    backward: float
    output: int
    kept: int
    forward_work: int = 0
    backward_work: int = 0
    standing: int = 0


Items = tuple[Any, ...]
"""The blocks of a chain in order: a number is a block that keeps all its backward pass needs, a tuple a group of blocks of
which only the input is kept."""


def predict(items: Items, costs: Sequence[BlockCost]) -> tuple[float, int]:
    """(seconds, largest number of bytes at one moment) of the schedule."""
    seconds = sum(cost.forward + cost.backward for cost in costs)
    peak = 0

    def visit(items: Items, held: int) -> None:
        nonlocal seconds, peak
        gradient = costs[last(items)].output  # that of the last output waits while blocks are recomputed
        for item in items:
            blocks = list(blocks_of(item))
            if isinstance(item, int):
                peak = max(peak, held + gradient + costs[item].kept + costs[item].forward_work)
                held += costs[item].kept
            else:
                seconds += sum(costs[i].forward for i in blocks)
                peak = max(peak, held + gradient + int(_forward_peaks(costs, blocks[0])[len(blocks) - 1]))
                held += costs[blocks[-1]].output
        for item in reversed(items):
            if isinstance(item, int):
                peak = max(peak, held + costs[item].backward_work)
                held -= costs[item].kept
            else:
                held -= costs[last(item)].output
                visit(item, held)

    visit(items, standing_bytes(costs))
    return seconds, peak


def standing_bytes(costs: Sequence[BlockCost]) -> int:
    return sum(cost.standing for cost in set(costs))


def blocks_of(item: Any) -> Iterator[int]:
    """The blocks of an item, or of several, in order."""
    if isinstance(item, int):
        yield item
    else:
        for part in item:
            yield from blocks_of(part)


def last(item: Any) -> int:
    """The last block of an item, or of several."""
    return item if isinstance(item, int) else last(item[-1])


def _forward_peaks(costs: Sequence[BlockCost], start: int) -> np.ndarray:
    """Bytes while blocks from `start` on run with nothing kept: entry i is the most of the first i + 1 blocks."""
    output = np.array([cost.output for cost in costs[start:]])
    before = np.concatenate([[0], output[:-1]])
    return np.maximum.accumulate(before + output + [cost.forward_work for cost in costs[start:]])


class LeastMemory:
    """The schedules of the least memory, exact in bytes. Among equal ones it is the fastest.

    For blocks s to t - 1 either block s keeps all, or the first k do not, k being chosen:
    M(s, t) = min(kept_s + M(s + 1, t), max over the split's parts(forward peak, output_{k-1} + M(k, t), M(s, k))).
    """

    def __init__(self, costs: Sequence[BlockCost]):
        n = len(costs)
        self.nbytes = np.zeros((n, n + 1), np.int64)
        self.seconds = np.zeros((n, n + 1))  # recomputed forward passes
        self.split = np.zeros((n, n + 1), np.int64)  # 0: block s keeps all
        output = np.array([cost.output for cost in costs])
        forward = np.concatenate([[0.0], np.cumsum([cost.forward for cost in costs])])
        for s in range(n - 1, -1, -1):
            here, peaks = costs[s], _forward_peaks(costs, s)
            for t in range(s + 1, n + 1):
                gradient = costs[t - 1].output
                keep = max(here.kept + gradient + here.forward_work, here.kept + here.backward_work)
                seconds = 0.0
                if t > s + 1:
                    keep = max(keep, here.kept + int(self.nbytes[s + 1, t]))
                    seconds = self.seconds[s + 1, t]
                best, k = (keep, seconds), 0
                if t > s + 1:
                    ks = np.arange(s + 1, t)
                    parts = np.maximum(output[ks - 1] + self.nbytes[ks, t], self.nbytes[s, ks])
                    parts = np.maximum(parts, gradient + peaks[: t - s - 1])
                    recomputed = forward[ks] - forward[s] + self.seconds[ks, t] + self.seconds[s, ks]
                    i = np.lexsort((recomputed, parts))[0]
                    if (parts[i], recomputed[i]) < best:
                        best, k = (parts[i], recomputed[i]), int(ks[i])
                self.nbytes[s, t], self.seconds[s, t] = best
                self.split[s, t] = k

    def items(self, s: int, t: int) -> Items:
        """The schedule for blocks `s` to `t - 1`."""
        items: list[Any] = []
        while s < t:
            k = int(self.split[s, t])
            items.append(self.items(s, k) if k else s)
            s = k or s + 1
        return tuple(items)


_STEPS = 500  # units of memory that a budget is divided into
_FEWEST_STEPS = 150
_WORK = 1e9  # elements that the dynamic program may visit before it takes fewer units


class LeastTime:
    """The schedules of the least time for every number of units of memory.

    C(s, t, m), the time that blocks s to t - 1 spend on recomputing within m units, the paper's equations 1 and 2:
    min(C(s + 1, t, m - kept_s), min over k of (F_s + ... + F_{k-1} + C(k, t, m - output_{k-1}) + C(s, k, m))).
    """

    def __init__(self, costs: Sequence[BlockCost], budget: int):
        self.costs, n = costs, len(costs)
        same = _first_equal(costs)
        self.segments = sum(int(same[s, t - s - 1] == s) for s in range(n) for t in range(s + 1, n + 1))
        steps = int(np.clip(_WORK / (self.segments * n / 3), _FEWEST_STEPS, _STEPS))
        self.unit = _unit(costs, budget, steps)
        fits = budget // self.unit
        self.most = fits if self.unit == 1 else fits * 3 // 2
        self.forward = np.concatenate([[0.0], np.cumsum([cost.forward for cost in costs])])
        self.peaks = [_rises(_forward_peaks(costs, s)) for s in range(n)]
        self.rows = np.full((self.segments, self.most + 1), np.inf)
        self.shifted: dict[tuple[int, int], int] = {}  # (row, units): the row, shifted by so many units, in `after`
        self.after = np.full((self.segments, self.most + 1), np.inf)
        self.row = np.zeros((n, n + 1), np.int64)
        self.row_after = np.zeros((n, n + 1), np.int64)  # of C(s, t, m - output_{s-1})
        known = 0
        for length in range(1, n + 1):
            for s in range(n - length + 1):
                t, twin = s + length, int(same[s, length - 1])
                if twin == s:
                    self.rows[known] = self._times(s, t, slice(None)).min(0)
                    self.row[s, t] = known
                    known += 1
                else:
                    self.row[s, t] = self.row[twin, twin + length]
                if s:
                    self.row_after[s, t] = self._shift(int(self.row[s, t]), self._units(costs[s - 1].output))

    def _units(self, nbytes: int) -> int:
        return min(-(-nbytes // self.unit), self.most + 1)

    def _shift(self, row: int, units: int) -> int:
        key = (row, units)
        if key not in self.shifted:
            index = self.shifted[key] = len(self.shifted)
            if index == len(self.after):
                self.after = np.concatenate([self.after, np.full_like(self.after, np.inf)])
            self.after[index, units:] = self.rows[row, : self.most + 1 - units]
        return self.shifted[key]

    def _times(self, s: int, t: int, units: slice) -> np.ndarray:
        """(choices, units) times. First block s keeps all; then, for k = s + 1, ..., the blocks before k do not."""
        here, gradient = self.costs[s], self.costs[t - 1].output
        memory = np.arange(self.most + 1)[units]
        times = np.full((t - s, len(memory)), np.inf)
        left = memory - self._units(here.kept)
        enough = max(here.kept + gradient + here.forward_work, here.kept + here.backward_work)
        fits = memory >= self._units(enough)
        if t == s + 1:
            times[0, fits] = 0.0
            return times
        times[0, fits] = self.rows[self.row[s + 1, t], left[fits]]
        np.add(self.after[self.row_after[s + 1 : t, t], units], self.rows[self.row[s, s + 1 : t], units], out=times[1:])
        times[1:] += (self.forward[s + 1 : t] - self.forward[s])[:, None]
        for first, peak in self.peaks[s]:
            times[1 + first :, memory < self._units(gradient + peak)] = np.inf
        return times

    @property
    def amounts(self) -> list[int]:
        """The numbers of units, rising, at each of which a faster schedule becomes possible."""
        times = self.rows[self.row[0, len(self.costs)]]
        return np.nonzero(times < np.concatenate([[np.inf], times[:-1]]))[0].tolist()

    def items(self, units: int) -> Items:
        """The fastest schedule within `units`."""
        return self._items(0, len(self.costs), units)

    def _items(self, s: int, t: int, units: int) -> Items:
        items: list[Any] = []
        while s < t:
            choice = int(np.argmin(self._times(s, t, slice(units, units + 1))))
            if choice:
                k = s + choice
                items.append(self._items(s, k, units))
                units -= self._units(self.costs[k - 1].output)
                s = k
            else:
                items.append(s)
                units -= self._units(self.costs[s].kept)
                s += 1
        return tuple(items)


def _rises(values: np.ndarray) -> list[tuple[int, int]]:
    """(index, value) where a sequence that never falls takes a new value."""
    at = np.nonzero(np.diff(values, prepend=-1))[0]
    return list(zip(at.tolist(), values[at].tolist(), strict=True))


def _first_equal(costs: Sequence[BlockCost]) -> np.ndarray:
    """(n, n): entry (s, l - 1) is the first start of a stretch of `l` blocks that costs the same as that from s."""
    n = len(costs)
    kinds = np.array([{cost: i for i, cost in reversed(list(enumerate(costs)))}[cost] for cost in costs])
    common = np.zeros((n + 1, n + 1), np.int64)  # blocks that the chains from i and from j have in common
    for i in range(n - 1, -1, -1):
        common[i, :n] = np.where(kinds == kinds[i], common[i + 1, 1:] + 1, 0)
    first = np.tile(np.arange(n)[:, None], (1, n))
    for s in range(n):
        for earlier in range(s - 1, -1, -1):
            first[s, : common[earlier, s]] = earlier
    return first


def _unit(costs: Sequence[BlockCost], budget: int, steps: int) -> int:
    """Bytes of one unit: the size, among those that divide the budget finely enough, with which rounding up wastes least."""
    smallest = -(-budget // steps)
    units = np.unique(np.linspace(smallest, 2 * smallest, 64).astype(np.int64)) if smallest > 1 else np.array([1])
    sizes = np.array([size for cost in costs for size in (cost.output, cost.kept)])
    waste = (-sizes[None, :] % units[:, None]).sum(1)
    return int(units[np.argmin(waste)])
