"""A rough time of what a remedy computes, or moves over the link to the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memjax._core.program.costs import Device, flops
from memjax._core.program.jaxpr import is_literal, nbytes
from memjax._core.program.primitives import ALIASES


def seconds(eqns: Iterable[Any], of: Device) -> float:
    """The time of these equations, one after the other, half of their traffic fused away."""
    return sum(max(flops(eqn) / of.flops, _traffic(eqn) / (2 * of.nbytes)) for eqn in eqns)


def _traffic(eqn: Any) -> int:
    if eqn.primitive.name in ALIASES:
        return 0
    atoms = [*(atom for atom in eqn.invars if not is_literal(atom)), *eqn.outvars]
    return sum(nbytes(atom.aval) for atom in atoms if hasattr(atom.aval, "dtype"))
