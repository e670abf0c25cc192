"""How many steps a turn of a loop takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from memjax._core.platforms import traced_device
from memjax._core.program.jaxpr import nbytes

_SMALL = 4 << 20  # bytes that a step reads and writes in less time than a GPU takes to start its kernels


class Unroll(NamedTuple):
    """How many steps a turn takes, as `jax.lax.scan` has it: of loops that run forward, and of those that backpropagate.

    With `ordered` they run one after the other. Otherwise the compiler may run them side by side, in the memory of all.
    """

    forward: int | bool
    backward: int | bool
    ordered: bool = False


ONE = Unroll(1, 1)
# Turns of five steps, and how long a step then takes, in units of the second: in any order, one after the other, and only forward
# one after the other. Measured for an LSTM on an H200, where turns of one step take 1.17.
_FAST, _ORDERED, _LEAN = (Unroll(5, 5), 0.65), (Unroll(5, 5, ordered=True), 1.0), (Unroll(5, 1, ordered=True), 1.09)


def unrolls(unroll: int | bool, step: Iterable[Any], *, least: bool = False) -> list[tuple[Unroll, float]]:
    """What to try for a loop whose user says `unroll`, the fastest first, and how long a step takes with each.

    On a GPU small steps wait for their kernels to be launched, and for the loop to turn: five in a turn take less time. In any
    order they take more memory. One after the other they take none, but the compiler holds sums that the backward pass carries
    twice. Unless there are several steps in a turn forward alone: what is to try if the memory is to be the `least`.

    Args:
      step: arrays or types of the loop's state and of what is kept of a step.
    """
    if unroll is True or unroll != 1 or not _is_small(step):
        return [(Unroll(unroll, unroll), 1.0)]
    return [_LEAN] if least else [_FAST, _ORDERED, _LEAN]


def lean(unroll: int | bool, step: Iterable[Any]) -> Unroll:
    """The last of `unrolls`."""
    return unrolls(unroll, step, least=True)[-1][0]


def _is_small(step: Iterable[Any]) -> bool:
    return traced_device().platform == "gpu" and sum(map(nbytes, step)) <= _SMALL
