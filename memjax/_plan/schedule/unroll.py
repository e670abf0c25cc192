"""How many steps a turn of a loop takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from memjax._core.platforms import traced_device
from memjax._core.program.jaxpr import nbytes

_SMALL = 8 << 20  # bytes that a GPU reads in less time than it takes to start the kernels of a step


class Unroll(NamedTuple):
    """How many steps a turn takes, as `jax.lax.scan` has it: of loops that run forward, and of those that backpropagate.

    With `ordered` they run one after the other. Otherwise the compiler may run them side by side, in the memory of all.
    """

    forward: int | bool
    backward: int | bool
    ordered: bool = False


ONE = Unroll(1, 1)
# Turns of five steps: in any order; one after the other; the same, but one step in a turn that backpropagates. With each, how
# long a step takes, relative to the second: measured for an LSTM on an H200, where with one step in all turns it takes 1.17.
_FAST, _ORDERED, _LEAN = (Unroll(5, 5), 0.65), (Unroll(5, 5, ordered=True), 1.0), (Unroll(5, 1, ordered=True), 1.09)


def unrolls(unroll: int | bool, step: Iterable[Any], *, least: bool = False) -> list[tuple[Unroll, float]]:
    """What to try for a loop whose user says `unroll`, the fastest first, and how long a step takes with each.

    On a GPU small steps wait for their kernels to be launched, and for the loop to turn: with five in a turn they take less
    time. In any order they take the memory of five. One after the other they take the memory of one, but the compiler holds
    sums that the backward pass carries twice, unless its turns have one step.

    Args:
      step: arrays or types that a step reads, and that are kept of it.
      least: whether the memory is to be the least possible.
    """
    small = traced_device().platform == "gpu" and sum(map(nbytes, step)) <= _SMALL
    if unroll is True or unroll != 1 or not small:
        return [(Unroll(unroll, unroll), 1.0)]
    return [_LEAN] if least else [_FAST, _ORDERED, _LEAN]
