"""What a chain's schedule is made of, and the seconds and bytes that one takes, from the costs of the blocks."""

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
                peak = max(peak, held + gradient + int(forward_peaks(costs, blocks[0])[len(blocks) - 1]))
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


def forward_peaks(costs: Sequence[BlockCost], start: int) -> np.ndarray:
    """Bytes while blocks from `start` on run with nothing kept: entry i is the most of the first i + 1 blocks."""
    output = np.array([cost.output for cost in costs[start:]])
    before = np.concatenate([[0], output[:-1]])
    return np.maximum.accumulate(before + output + [cost.forward_work for cost in costs[start:]])
