"""Optimal checkpoints for a chain of unequal blocks within a memory budget.

Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains: how to train deep neural networks with limited
memory" (rotor). For each block the forward pass keeps all that its backward pass needs, or the block is part of a group
of which only the input is kept: when the backward pass gets there, the group is recomputed, by a schedule of its own.
Costs in, a schedule out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from memjax._core import check
from memjax._core.check import readable_bytes
from memjax.remat._chain.solvers import BlockCost, Items, LeastMemory, LeastTime, blocks_of, predict, standing_bytes


@dataclasses.dataclass(frozen=True)
class ChainSchedule:
    """The blocks that a chain keeps and those that it recomputes, with the predicted time and memory.

    Attributes:
      items: the blocks in order. A number is a block that keeps all its backward pass needs; a tuple is a group of
        consecutive blocks of which only the input is kept, recomputed in the backward pass as its own items say.
      seconds: predicted time of forward and backward pass together.
      nbytes: predicted largest memory at one moment, beyond the chain's input, its parameters and their gradients.
      plain_seconds, plain_nbytes: the same with everything kept.
    """

    items: Items
    seconds: float
    nbytes: int
    plain_seconds: float
    plain_nbytes: int

    def __post_init__(self) -> None:
        if not self.items or not _are_items(self.items):
            wanted = "a tuple of numbers of blocks, and of such tuples"
            raise check.fail(TypeError, "items", wanted, self.items, "chain_schedule finds them")
        for name in ("seconds", "plain_seconds"):
            check.number(name, getattr(self, name), least=0)
        for name in ("nbytes", "plain_nbytes"):
            check.integer(name, getattr(self, name), least=0, what="a number of bytes")

    def to_json(self) -> str:
        """The schedule as JSON; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ChainSchedule:
        """Reads the schedule that `to_json` wrote; raises ValueError for any other text."""
        fields = check.json_fields("ChainSchedule", text, [field.name for field in dataclasses.fields(cls)])
        try:
            return cls(**fields | {"items": _as_tuples(fields["items"])})
        except (TypeError, ValueError) as error:
            raise check.fail(ValueError, "text", "what ChainSchedule.to_json wrote", text, str(error)) from error

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
    room = check.byte_count("budget", budget, words=("min",))
    costs = checked_costs(costs)
    everything = tuple(range(len(costs)))
    plain_seconds, plain_nbytes = predict(everything, costs)

    def result(items: Items) -> ChainSchedule:
        return ChainSchedule(items, *predict(items, costs), plain_seconds, plain_nbytes)

    if room != "min" and plain_nbytes <= room:
        return result(everything)
    least = result(LeastMemory(costs).items(0, len(costs)))
    if room == "min":
        return least
    if least.nbytes > room:
        raise ValueError(too_little(room, least.nbytes, least.seconds / (least.plain_seconds or 1.0), plain_nbytes))
    best = least
    fastest = LeastTime(costs, room - standing_bytes(costs))
    slower, faster = 0, len(fastest.amounts)  # by bisection: the bytes grow with the units, all but exactly
    while slower < faster:
        middle = (slower + faster) // 2
        candidate = result(fastest.items(fastest.amounts[middle]))
        if candidate.nbytes <= room:
            best, slower = min(best, candidate, key=lambda schedule: schedule.seconds), middle + 1
        else:
            faster = middle
    return best


def too_little(budget: int, least: int, ratio: float, plain_nbytes: int) -> str:
    """The message for a budget that no schedule fits; `ratio` is the relative time of the schedule of the least memory."""
    return (
        f"budget is {readable_bytes(budget)}, but the least possible is {readable_bytes(least, up=True)}, at {ratio:.2f} of the "
        f"time that everything kept takes, with {readable_bytes(plain_nbytes)}: give a larger budget, "
        '"min" for the least, or divide the largest block'
    )


def checked_costs(costs: Sequence[BlockCost]) -> list[BlockCost]:
    """Checks the costs; returns them as `BlockCost`s of Python numbers."""
    if not isinstance(costs, Sequence) or isinstance(costs, str):
        raise check.fail(TypeError, "costs", "a sequence of BlockCost, one for each block", costs, "see chain_costs")
    if not costs:
        raise ValueError("costs must have one entry for each block, got none: a chain has at least one block")
    checked = []
    for index, cost in enumerate(costs):
        name = f"costs[{index}]"
        if not isinstance(cost, tuple | list) or not 4 <= len(cost) <= len(BlockCost._fields):
            raise check.fail(TypeError, name, "a BlockCost (forward, backward, output, kept, ...)", cost)
        where = [f"{name}.{field}" for field in BlockCost._fields]
        forward, backward = (check.number(where[i], cost[i], least=0) for i in range(2))
        sizes = [check.integer(where[i], cost[i], least=0, what="a number of bytes") for i in range(2, len(cost))]
        for i, size in enumerate(sizes, 2):
            if size >= 2**48:  # sums of them are 64-bit integers
                raise check.fail(ValueError, where[i], "a number of bytes below 2^48", cost[i])
        checked.append(BlockCost(forward, backward, *sizes))
    return checked


def _are_items(items: Any) -> bool:
    return isinstance(items, tuple) and all(type(item) is int or (item and _are_items(item)) for item in items)


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
