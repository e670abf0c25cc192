"""A rough time of what a remedy computes, or moves over the link to the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from memjax._core.costs import flops
from memjax._core.jaxpr import is_literal, nbytes
from memjax._core.primitives import ALIASES


class Rates(NamedTuple):
    """Operations, bytes of memory and bytes over the link to the host, per second."""

    flops: float
    nbytes: float
    link: float


def rates() -> Rates:
    """Those of the default device, roughly."""
    on_cpu = jax.default_backend() == "cpu"
    return Rates(5e10, 1e10, 1e10) if on_cpu else Rates(4e14, 3e12, 4e10)


def seconds(eqns: Iterable[Any], of: Rates) -> float:
    """The time of these equations, one after the other, half of their traffic fused away."""
    return sum(max(flops(eqn) / of.flops, _traffic(eqn) / (2 * of.nbytes)) for eqn in eqns)


def _traffic(eqn: Any) -> int:
    if eqn.primitive.name in ALIASES:
        return 0
    atoms = [*(atom for atom in eqn.invars if not is_literal(atom)), *eqn.outvars]
    return sum(nbytes(atom.aval) for atom in atoms if hasattr(atom.aval, "dtype"))
