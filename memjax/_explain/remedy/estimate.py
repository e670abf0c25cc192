"""A rough time of what a remedy computes, or moves over the link to the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memjax._core.program.costs import Device, array_bytes, flops
from memjax._core.program.primitives import ALIASES


def seconds(eqns: Iterable[Any], of: Device) -> float:
    """The time of these equations, one after the other, half of their traffic fused away."""
    return sum(max(flops(eqn) / of.flops, _traffic(eqn) / (2 * of.nbytes)) for eqn in eqns)


def _traffic(eqn: Any) -> int:
    if eqn.primitive.name in ALIASES:
        return 0
    return sum(map(array_bytes, (*eqn.invars, *eqn.outvars)))
