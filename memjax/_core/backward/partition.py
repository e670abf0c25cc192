"""The part of a program that leads from known variables to wanted ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from memjax._core.program.jaxpr import bind, read, variables


class Part:
    """The equations of `jaxpr` that lead from `known` variables to `wanted` ones, in order.

    With `effects`, equations with effects (callbacks) run even if nothing wanted depends on them.
    """

    def __init__(self, jaxpr: Any, known: Iterable[Any], wanted: Sequence[Any], *, effects: bool):
        self.known, self.wanted = list(known), list(wanted)
        have = set(self.known)
        needed = set(variables(self.wanted)) - have
        self.eqns: list[Any] = []
        for eqn in reversed(jaxpr.eqns):
            if needed.intersection(eqn.outvars) or (effects and eqn.effects):
                self.eqns.append(eqn)
                needed -= set(eqn.outvars)
                needed |= set(variables(eqn.invars)) - have
        self.eqns.reverse()
        if needed:
            raise AssertionError(f"not computable from what is known: {needed}")

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        env = dict(zip(self.known, values, strict=True))
        for eqn in self.eqns:
            for var, value in zip(eqn.outvars, bind(eqn, read(env, eqn.invars)), strict=True):
                env.setdefault(var, value)  # a known value is not replaced by its recomputation
        return read(env, self.wanted)
