"""Chains, and compiled bytes of their plans, kept for the next budget of an equal program. They save time and decide nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from memjax._core.program import costs
from memjax._plan.budget.digest import digest
from memjax._plan.budget.pieces import pieces
from memjax._plan.budget.stretches import stretches
from memjax._plan.compiled import compiled_bytes, device_of, platform_of
from memjax._plan.derivative import Derivative
from memjax._plan.layout import Layout
from memjax._plan.result import Stretch
from memjax._plan.run import run
from memjax._plan.solve.chain import Chain, Choice

_MOST_PROGRAMS = 16


class Allowed(NamedTuple):
    """What plans may do besides computing again."""

    compress: bool = False
    offload: bool = False


class Known:
    """What is known of a program. Bytes and seconds are those of a device.

    Attributes:
      chain: it as a chain, solved.
      layout: of its inputs.
      digest: of it.
      compiled: bytes of steps by what the plan keeps, shared by the chains for all that may be allowed.
    """

    def __init__(
        self,
        derivative: Derivative,
        types: Sequence[Any],
        layout: Layout,
        allowed: Allowed,
        digest: str,
        compiled: dict[Any, int | None],
    ):
        self.chain = Chain(derivative, costs.device(device_of(layout.shardings)), **allowed._asdict())
        self.digest = digest
        self._types, self.layout = types, layout
        self.compiled = compiled

    @property
    def base_seconds(self) -> float:
        """Predicted seconds of a step that computes nothing again."""
        return self.chain.base_seconds / self.layout.devices

    @property
    def frontier(self) -> list[tuple[int, float]]:
        """Predicted bytes, and seconds on top of `base_seconds`, of the plans that solve the chain."""
        return [(self.layout.local(nbytes), seconds / self.layout.devices) for nbytes, seconds in self.chain.frontier]

    def stretches(self, choices: Sequence[Choice]) -> tuple[Stretch, ...]:
        """The choices as data."""
        return stretches(self.chain, choices, self.layout)

    def step_bytes(self, stretches: tuple[Stretch, ...], in_steps: bool = False) -> int | None:
        """Temporary bytes of the step under a plan, compiled; None where it is no program of its own."""
        key = (in_steps, *((one.start, one.stop, one.turns, one.kept) for one in stretches))
        if key not in self.compiled:
            platform = self.chain.rates.platform if in_steps else None
            acting = run(self.chain.derivative, pieces(self.chain, stretches), platform)
            self.compiled[key] = compiled_bytes(acting, self._types, self.layout)
        return self.compiled[key]


_known: dict[Any, Known] = {}


def forget() -> None:
    """Forget all programs."""
    _known.clear()


def known(derivative: Derivative, types: Sequence[Any], layout: Layout, allowed: Allowed) -> Known:
    """What is known of an equal program for an equal device, or of this one from now on."""
    kind, platform = device_of(layout.shardings).device_kind, platform_of(layout.shardings)
    name = digest(derivative)
    of_program = (name, kind, platform, tuple(map(str, layout.shardings)))
    key = (of_program, allowed)
    if key in _known:
        return _known[key]
    other = next((one for (of, _), one in _known.items() if of == of_program), None)  # they have plans in common
    found = Known(derivative, types, layout, allowed, name, {} if other is None else other.compiled)
    consts = [*derivative.forward.consts, *derivative.backward.consts]
    if not any(isinstance(const, jax.core.Tracer) for const in consts):  # which would outlive its trace
        if len(_known) == _MOST_PROGRAMS:
            _known.pop(next(iter(_known)))
        _known[key] = found
    return found
