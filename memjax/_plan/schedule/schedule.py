"""Optimal schedules for backpropagation through a chain of equal steps within a number of memory slots.

Gruslys et al. 2016, "Memory-Efficient Backpropagation Through Time" (NeurIPS). A schedule is plain data: what
to run, what to keep and where, in order.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from memjax._core import check
from memjax._plan.schedule.forward_counts import HiddenCounts, InternalCounts, MixedCounts

INIT = -1  # the state the whole chain starts from, where it is not one of the slots ("internal")
CORE = -2  # the working core: one internal state, used up by the backward step that follows


class Action(NamedTuple):
    """One move of the machine: a working hidden state, a working core and the slots.

    kind        meaning
    "load"      the working state becomes the state before step `start`, kept in `slot`
    "advance"   run steps `start` to `stop - 1` from the working state
    "store"     keep the working state, the one before step `start`, in `slot`
    "keep"      run step `start`, its internal state kept from `slot` on, or in the working core (CORE)
    "backward"  backpropagate step `start` from the internal state in `slot` or CORE, which is then free
    "free"      `slot` is free from now on
    """

    kind: str
    start: int
    stop: int
    slot: int


Strategy = Literal["hidden", "internal", "mixed", "mixed-shared"]
_MOST_ENTRIES = 50_000_000  # of a table of both kinds of states: 400 MB
_STRATEGIES = ("hidden", "internal", "mixed", "mixed-shared")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What to keep and what to recompute, for `length` steps within `slots` units of memory.

    Attributes:
      length, slots, strategy, internal_size: as given to `schedule`.
      forward_steps: forward steps in all: the first pass, and every one recomputed.
      peak_slots: units in use at once, never more than `slots`.
      actions: the moves, in order; computed when first asked for.
    """

    length: int
    slots: int
    strategy: Strategy
    internal_size: int
    forward_steps: int

    def __post_init__(self) -> None:
        check.choice("strategy", self.strategy, _STRATEGIES)
        for name, least in (("length", 0), ("slots", 1), ("internal_size", 1), ("forward_steps", 0)):
            check.integer(name, getattr(self, name), least=least)

    @functools.cached_property
    def actions(self) -> tuple[Action, ...]:
        return tuple(action for action, _ in self.with_units())

    @functools.cached_property
    def peak_slots(self) -> int:
        if self.strategy == "hidden":  # without a million actions
            return min(self.slots, max(self.length - 1, min(self.length, 1)))
        return max((units for _, _, units in self.storage()), default=0)

    def storage(self) -> Iterator[tuple[int, Action, int]]:
        """(forward steps so far, action, units in use after it) along the schedule."""
        kept = {} if self.strategy == "internal" else {0: 1}
        forward_steps, in_use, core = 0, len(kept), 0
        for action, units in self.with_units():
            if action.kind == "advance":
                forward_steps += action.stop - action.start
            elif action.kind == "keep":
                forward_steps += 1
            if action.kind in ("store", "keep") and action.slot >= 0:
                kept[action.slot] = units
                in_use += units
            elif action.kind in ("free", "backward") and action.slot >= 0:
                in_use -= kept.pop(action.slot)
            if self.strategy == "internal":
                core = int(action.kind == "keep" and action.slot == CORE)
            yield forward_steps, action, in_use + core

    def with_units(self) -> Iterator[tuple[Action, int]]:
        """The actions, each with the units it takes where it keeps something.

        Slots are a stack of units. A segment's start state is kept in unit `home`; a kept hidden state takes the next
        unit, and a kept internal state the next ones, the last of which is its output hidden state: the start of what
        follows.
        """
        if not self.length:
            return
        counts = _counts(self.length, self.slots, self.strategy, self.internal_size)
        home = INIT if self.strategy == "internal" else 0
        at = 0  # the step before which the working state stands
        todo: list[Any] = [(0, self.length, self.slots, home)]
        while todo:
            item = todo.pop()
            if isinstance(item, Action):
                if item.kind == "backward":
                    at = -1  # the working state is used up
                yield item, 0
                continue
            low, high, m, home = item
            if low == high:
                continue
            y, kind, units = counts.split(high - low, m)
            if at != low:
                yield Action("load", low, low, home), 0
            ahead = low + y if kind == "hidden" else low + y - 1
            if ahead > low:
                yield Action("advance", low, ahead, home), 0
            at = low + y
            slot = home + 1
            if kind == "hidden":
                yield Action("store", at, at, slot), units
                todo.append((low, at, m, home))
                todo.append(Action("free", at, at, slot))
                todo.append((at, high, m - units, slot))
            elif kind == "internal":
                yield Action("keep", ahead, at, slot), units
                todo.append((low, ahead, m, home))
                todo.append(Action("backward", ahead, at, slot))
                todo.append((at, high, m - units, home + units))
            else:
                yield Action("keep", high - 1, high, CORE), 0
                yield Action("backward", high - 1, high, CORE), 0
                at = -1
                todo.append((low, high - 1, m, home))

    def to_json(self) -> str:
        """The schedule as JSON; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """The schedule that `to_json` wrote; ValueError for any other text."""
        fields = check.json_fields("Schedule", text, [field.name for field in dataclasses.fields(cls)])
        plan = schedule(
            fields["length"], fields["slots"], strategy=fields["strategy"], internal_size=fields["internal_size"]
        )
        if plan.forward_steps != fields["forward_steps"]:
            raise check.fail(
                ValueError, "forward_steps", f"{plan.forward_steps} as for this schedule", fields["forward_steps"]
            )
        return plan

    def __str__(self) -> str:
        extra = "" if self.strategy in ("hidden", "internal") else f", internal states of {self.internal_size}"
        ratio = self.forward_steps / self.length if self.length else 0
        return (
            f"{self.strategy} schedule: {self.length} steps, {self.slots} slots{extra}: "
            f"{self.forward_steps} forward steps ({ratio:.2f} per step)"
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw time (actions, downwards) against stored states, as in the paper's figure 1. Needs matplotlib.

        A blue line is a run of forward steps, a red one a backward step, a dot a kept hidden state, a square a kept
        internal state; the grey or orange line below it shows for how long. Returns the axes.
        """
        check.axes(ax)
        return _draw(self.actions, str(self), start_in_slot=self.strategy != "internal", ax=ax)


def schedule(length: int, slots: int, *, strategy: Strategy = "mixed", internal_size: int = 1) -> Schedule:
    """The schedule with the fewest forward steps for `length` steps in `slots` units of memory.

    Args:
      length: steps of the chain, at least 0.
      slots: memory, at least 1. For "hidden", "mixed" and "mixed-shared" the unit is one hidden state; the
        state the chain starts from occupies one, and a working core with one internal state exists besides.
        For "internal" the unit is one internal state; the start state is free, and the working core is one of
        the units.
      strategy: what may be kept: "hidden" states, "internal" states, both ("mixed"), or both where an
        internal state stored right at a segment's start shares its input with the stored start
        ("mixed-shared", equation 10).
      internal_size: units of one internal state, its output hidden state included; for both mixed strategies.

    Returns:
      A `Schedule`. With m slots, "hidden" takes (r + 1) t - binom(m + r, m + 1) forward steps, r the smallest
      with binom(m + r, m) >= t, at no cost to compute; "mixed" takes a table of `length * slots` entries
      (10,000 x 100: about a second).

    Raises:
      ValueError: for a length, slots or size out of range, or an unknown strategy.

    Source: Gruslys et al. 2016, section 3, equations 2, 4, 8, 9 and 10.
    """
    check.choice("strategy", strategy, _STRATEGIES)
    length = check.integer("length", length, least=0, what="a number of steps")
    slots = check.integer("slots", slots, least=1, what="units of memory", fix="the working state needs one")
    least = 2 if strategy == "mixed-shared" else 1
    fix = "it includes the output hidden state" + (', and with "mixed-shared" the input as well' if least == 2 else "")
    internal_size = check.integer("internal_size", internal_size, least=least, what="units of memory", fix=fix)
    entries = (length + 1) * (min(slots, internal_size * length + 1) + 1)
    if strategy in ("mixed", "mixed-shared") and entries > _MOST_ENTRIES:
        raise ValueError(
            f"length and slots must give a table of at most {_MOST_ENTRIES:,} entries for {strategy!r}, got length={length} "
            f'and slots={slots}: use "hidden" or "internal", which need no table, or blocks of several steps'
        )
    forward_steps = _counts(length, slots, strategy, internal_size).count(length, slots) if length else 0
    return Schedule(length, slots, strategy, internal_size, forward_steps)


@functools.lru_cache(maxsize=4)
def _counts(length: int, slots: int, strategy: str, internal_size: int) -> HiddenCounts | InternalCounts | MixedCounts:
    if strategy == "hidden":
        return HiddenCounts()
    if strategy == "internal":
        return InternalCounts()
    return MixedCounts(length, slots, internal_size, shared=strategy == "mixed-shared")


def _draw(actions: Iterable[Action], title: str, *, start_in_slot: bool, ax: Any = None) -> Any:
    """Actions downwards, steps to the right; returns the axes. `start_in_slot`: the first state takes slot 0."""
    from matplotlib import pyplot as plt

    if ax is None:
        _, ax = plt.subplots(figsize=(7, 7))
    kept_since = {0: (0, 0, "hidden")} if start_in_slot else {}
    forward, backward, hidden, internal, lives = [], [], [], [], []
    row = 0
    for action in actions:
        if action.kind == "advance":
            forward.append((row, action.start, action.stop))
            row += 1
        elif action.kind == "store":
            hidden.append((row - 1, action.start))
            kept_since[action.slot] = (row - 1, action.start, "hidden")
        elif action.kind == "keep":
            forward.append((row, action.start, action.stop))
            if action.slot >= 0:
                internal.append((row, action.stop))
                kept_since[action.slot] = (row, action.stop, "internal")
            row += 1
        elif action.kind == "backward":
            backward.append((row, action.start, action.stop))
            row += 1
        if action.kind in ("free", "backward") and action.slot >= 0:
            lives.append((*kept_since.pop(action.slot), row))
    lives += [(*life, row) for life in kept_since.values()]

    for kind, colour in (("hidden", "0.75"), ("internal", "tab:orange")):
        spans = [(step, since, until) for since, step, of, until in lives if of == kind]
        if spans:
            at, since, until = zip(*spans, strict=True)
            ax.vlines(at, since, until, color=colour, linewidth=3, label=f"{kind} state kept")
    for spans, colour, label in ((forward, "tab:blue", "forward"), (backward, "tab:red", "backward")):
        if spans:
            rows, starts, stops = zip(*spans, strict=True)
            ax.hlines(rows, starts, stops, color=colour, linewidth=1.2, label=label)
    for marks, marker in ((hidden, "o"), (internal, "s")):
        if marks:
            rows, at = zip(*marks, strict=True)
            ax.plot(at, rows, marker, color="black", markersize=3)
    ax.invert_yaxis()
    ax.set_xlabel("step")
    ax.set_ylabel("action")
    ax.set_title(title, fontsize="small")
    ax.legend(loc="lower right", fontsize="small")
    return ax
