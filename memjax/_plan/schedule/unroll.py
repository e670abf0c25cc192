"""How many steps a turn of a loop takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from memjax._core.platforms import traced_device
from memjax._core.program.jaxpr import nbytes

_SMALL = 8 << 20  # bytes that a GPU reads in less time than it takes to start the kernels of a step


class Unroll(NamedTuple):
    """How many steps a turn takes, as `jax.lax.scan` has it: of loops that run forward, and of those that backpropagate.

    `ordered` says which steps of a turn run one after the other: "all", or those that keep "residuals" or read them. The compiler
    may run others side by side, in the memory of all.
    """

    forward: int | bool
    backward: int | bool
    ordered: Literal["none", "residuals", "all"] = "none"

    def orders(self, keeps: bool) -> bool:
        """Whether steps run one after the other: those with residuals (`keeps`), or those without."""
        return self.ordered == "all" or (keeps and self.ordered == "residuals")


ONE = Unroll(1, 1)
# Turns of five steps: in any order; one after the other where there are residuals; all one after the other, and one step in a
# turn that backpropagates. With each, how long a step takes, relative to one step in all turns: an LSTM on an H200.
_FAST, _KEPT_IN_ORDER, _LEAN = (Unroll(5, 5), 0.55), (Unroll(5, 5, "residuals"), 0.77), (Unroll(5, 1, "all"), 0.93)


def unrolls(unroll: int | bool, step: Iterable[Any], *, least: bool = False) -> list[tuple[Unroll, float]]:
    """What to try for a loop whose user says `unroll`, the fastest first, and how long a step takes with each.

    On a GPU small steps wait for their kernels to be launched, and for the loop to turn: with five in a turn they take less
    time. In any order they take the memory of five. One after the other they take the memory of one, but the compiler holds
    sums that the backward pass carries twice, unless its turns have one step. With these the peak is in loops that have
    residuals, so that steps without may run side by side.

    Args:
      step: arrays or types that a step reads, and that are kept of it.
      least: whether the memory is to be the least possible.
    """
    small = traced_device().platform == "gpu" and sum(map(nbytes, step)) <= _SMALL
    if unroll is True or unroll != 1 or not small:
        return [(Unroll(unroll, unroll), 1.0)]
    return [_LEAN] if least else [_FAST, _KEPT_IN_ORDER, _LEAN]
