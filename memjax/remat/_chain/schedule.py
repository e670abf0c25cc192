"""Optimal checkpoints for a chain of unequal blocks within a memory budget.

Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains: how to train deep neural networks with limited
memory" (rotor). For each block the forward pass keeps all that its backward pass needs, or the block is part of a group
of which only the input is kept: when the backward pass gets there, the group is run again, by a schedule of its own.
Costs in, a schedule out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from memjax._core.check import byte_count, fail, integer, number, readable_bytes
from memjax.remat._scan.schedule import json_fields

_STEPS = 500  # units of memory that a budget is divided into
_WORK = 1e9  # elements that the dynamic program may visit before it takes fewer units
_FEWEST_STEPS = 150


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


_FIELDS = BlockCost._fields
Items = tuple[Any, ...]  # of int (this block keeps all) and Items (a group of which the input is kept)


@dataclasses.dataclass(frozen=True)
class ChainSchedule:
    """What a chain keeps and what it recomputes, with the predicted time and memory.

    Attributes:
      items: the blocks in order. A number is a block that keeps all its backward pass needs; a tuple is a group of
        consecutive blocks of which only the input is kept, run again in the backward pass as its own items say.
      seconds: predicted time of forward and backward pass together.
      nbytes: predicted largest memory at one moment, beyond the chain's input, its parameters and their gradients.
      plain_seconds, plain_nbytes: the same with everything kept.
    """

    items: Items
    seconds: float
    nbytes: int
    plain_seconds: float
    plain_nbytes: int

    def to_json(self) -> str:
        """The schedule as JSON; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ChainSchedule:
        """The schedule that `to_json` wrote; ValueError for any other text."""
        fields = json_fields(text, "ChainSchedule", [field.name for field in dataclasses.fields(cls)])
        return cls(**fields | {"items": _as_tuples(fields["items"])})

    def __str__(self) -> str:
        return (
            f"chain of {len(list(blocks_of(self.items)))} blocks: {self.nbytes / 2**20:,.2f} MiB "
            f"({_ratio(self.nbytes, self.plain_nbytes)} of plain), time {_ratio(self.seconds, self.plain_seconds)} of plain\n"
            f"kept, and [recomputed from the input]: {_in_words(self.items)}"
        )


def chain_schedule(costs: Sequence[BlockCost], budget: int | str) -> ChainSchedule:
    """The schedule of the least time that stays within a budget.

    Args:
      costs: one per block, in order.
      budget: bytes, or a text like "12GiB", for all that exists at one moment of the forward or backward pass, beyond the
        chain's input, its parameters and their gradients. "min": the schedule of the least memory.

    Returns:
      A `ChainSchedule`. It is optimal for sizes rounded up to a 500th of the budget (fewer steps, down to a 150th, for
      more than about 200 blocks that are all different), among schedules that hold what they keep until its backward
      pass (the paper's section 4: memory persistence). What rounding up has wasted is given back: the program is solved
      for up to one and a half times the budget, and of its schedules a faster one whose exact bytes fit is taken.
      Equal stretches of the chain are solved once; 300 equal blocks take a second, 300 different ones some ten.

    Raises:
      ValueError: no blocks, a cost that is negative or not finite, or a budget below the least possible, which the message
        states.
      TypeError: what is no `BlockCost`, or a budget that is neither bytes nor text.
    """
    room = byte_count("budget", budget, words=("min",))
    costs = _checked(costs)
    everything = tuple(range(len(costs)))
    plain_seconds, plain_nbytes = predict(everything, costs)

    def result(items: Items) -> ChainSchedule:
        return ChainSchedule(items, *predict(items, costs), plain_seconds, plain_nbytes)

    if room != "min" and plain_nbytes <= room:
        return result(everything)
    least = result(_Least(costs).items(0, len(costs)))
    if room == "min":
        return least
    if least.nbytes > room:
        raise ValueError(
            f"budget is {readable_bytes(room)}, but the least possible is {readable_bytes(least.nbytes)}, at "
            f"{_ratio(least.seconds, least.plain_seconds)} of the time that everything kept takes, with "
            f'{readable_bytes(plain_nbytes)}: give a larger budget, "min" for the least, or divide the largest block'
        )
    best = least
    fastest = _Fastest(costs, room - _standing(costs))
    slower, faster = 0, len(fastest.amounts)  # by bisection: the bytes grow with the units, all but exactly
    while slower < faster:
        middle = (slower + faster) // 2
        found = result(fastest.items(fastest.amounts[middle]))
        if found.nbytes <= room:
            best, slower = min(best, found, key=lambda schedule: schedule.seconds), middle + 1
        else:
            faster = middle
    return best


def _checked(costs: Sequence[BlockCost]) -> list[BlockCost]:
    """The costs, as `BlockCost`s of Python numbers."""
    if not isinstance(costs, Sequence) or isinstance(costs, str):
        raise fail(TypeError, "costs", "a sequence of BlockCost, one for each block", costs, "see chain_costs")
    if not costs:
        raise ValueError("costs must have one entry for each block, got none: a chain has at least one block")
    found = []
    for index, cost in enumerate(costs):
        name = f"costs[{index}]"
        if not isinstance(cost, tuple | list) or not 4 <= len(cost) <= len(BlockCost._fields):
            raise fail(TypeError, name, "a BlockCost (forward, backward, output, kept, ...)", cost)
        forward, backward = (number(f"{name}.{_FIELDS[i]}", cost[i], least=0) for i in range(2))
        sizes = [
            integer(f"{name}.{_FIELDS[i]}", cost[i], least=0, what="a number of bytes") for i in range(2, len(cost))
        ]
        found.append(BlockCost(forward, backward, *sizes))
    return found


def predict(items: Items, costs: Sequence[BlockCost]) -> tuple[float, int]:
    """(seconds, largest number of bytes at one moment) of the schedule."""
    seconds = sum(cost.forward + cost.backward for cost in costs)
    peak = 0

    def visit(items: Items, held: int) -> None:
        nonlocal seconds, peak
        gradient = costs[last(items)].output  # that of the last output waits while blocks run again
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

    visit(items, _standing(costs))
    return seconds, peak


def _standing(costs: Sequence[BlockCost]) -> int:
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


def _rises(values: np.ndarray) -> list[tuple[int, int]]:
    """(index, value) where a sequence that never falls takes a new value."""
    at = np.nonzero(np.diff(values, prepend=-1))[0]
    return list(zip(at.tolist(), values[at].tolist(), strict=True))


class _Least:
    """The schedules of the least memory, exact in bytes; of equal ones the fastest.

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
                    again = forward[ks] - forward[s] + self.seconds[ks, t] + self.seconds[s, ks]
                    i = np.lexsort((again, parts))[0]
                    if (parts[i], again[i]) < best:
                        best, k = (parts[i], again[i]), int(ks[i])
                self.nbytes[s, t], self.seconds[s, t] = best
                self.split[s, t] = k

    def items(self, s: int, t: int) -> Items:
        """The schedule for blocks `s` to `t - 1`."""
        found: list[Any] = []
        while s < t:
            k = int(self.split[s, t])
            found.append(self.items(s, k) if k else s)
            s = k or s + 1
        return tuple(found)


class _Fastest:
    """The schedules of the least time for every number of units of memory.

    C(s, t, m), the time that blocks s to t - 1 spend on running again within m units, the paper's equations 1 and 2:
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
        self.moved: dict[tuple[int, int], int] = {}  # (row, units): the row, moved by so many units, in `after`
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
                    self.row_after[s, t] = self._move(int(self.row[s, t]), self._units(costs[s - 1].output))

    def _units(self, nbytes: int) -> int:
        return min(-(-nbytes // self.unit), self.most + 1)

    def _move(self, row: int, units: int) -> int:
        key = (row, units)
        if key not in self.moved:
            index = self.moved[key] = len(self.moved)
            if index == len(self.after):
                self.after = np.concatenate([self.after, np.full_like(self.after, np.inf)])
            self.after[index, units:] = self.rows[row, : self.most + 1 - units]
        return self.moved[key]

    def _times(self, s: int, t: int, units: slice) -> np.ndarray:
        """(choices, units): block s keeps all; then for k = s + 1, ... the blocks before k do not."""
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
        found: list[Any] = []
        while s < t:
            choice = int(np.argmin(self._times(s, t, slice(units, units + 1))))
            if choice:
                k = s + choice
                found.append(self._items(s, k, units))
                units -= self._units(self.costs[k - 1].output)
                s = k
            else:
                found.append(s)
                units -= self._units(self.costs[s].kept)
                s += 1
        return tuple(found)


def _first_equal(costs: Sequence[BlockCost]) -> np.ndarray:
    """(n, n): entry (s, l - 1) is the first start of a stretch of `l` blocks that costs the same as that from s."""
    n = len(costs)
    kinds = np.array([{cost: i for i, cost in reversed(list(enumerate(costs)))}[cost] for cost in costs])
    common = np.zeros((n + 1, n + 1), np.int64)  # blocks that the chains from i and from j have in common
    for i in range(n - 1, -1, -1):
        common[i, :n] = np.where(kinds == kinds[i], common[i + 1, 1:] + 1, 0)
    found = np.tile(np.arange(n)[:, None], (1, n))
    for s in range(n):
        for earlier in range(s - 1, -1, -1):
            found[s, : common[earlier, s]] = earlier
    return found


def _unit(costs: Sequence[BlockCost], budget: int, steps: int) -> int:
    """Bytes of one unit: of the sizes that divide the budget finely enough the one that rounding up wastes least with."""
    smallest = -(-budget // steps)
    units = np.unique(np.linspace(smallest, 2 * smallest, 64).astype(np.int64)) if smallest > 1 else np.array([1])
    sizes = np.array([size for cost in costs for size in (cost.output, cost.kept)])
    waste = (-sizes[None, :] % units[:, None]).sum(1)
    return int(units[np.argmin(waste)])


def _as_tuples(items: Any) -> Any:
    return tuple(map(_as_tuples, items)) if isinstance(items, list) else items


def _ratio(value: float, plain: float) -> str:
    return f"{value / plain:.2f}" if plain else "1.00"


def _in_words(items: Items) -> str:
    """Runs of kept blocks as "3-7", groups in brackets."""
    words: list[str] = []
    run: list[int] = []
    for item in (*items, None):
        if isinstance(item, int):
            run.append(item)
            continue
        if run:
            words.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
            run = []
        if item is not None:
            words.append(f"[{_in_words(item)}]")
    return " ".join(words)
