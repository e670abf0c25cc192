"""Chains, and compiled bytes of their plans, kept for the next budget of an equal program. They save time and decide nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from memjax._core.meshes import device_of, platform_of
from memjax._core.program import costs
from memjax._core.program.dataflow import Dataflow, variables
from memjax._plan.budget.digest import digest
from memjax._plan.budget.stretches import choices, stretches
from memjax._plan.derivative import Passes
from memjax._plan.memory.compiled import compiled_bytes
from memjax._plan.memory.layout import Layout
from memjax._plan.memory.on_device import on_device
from memjax._plan.result import Stretch
from memjax._plan.run import KeepAll, Run
from memjax._plan.solve.chain import Chain, Choice, peak_of

_MOST_PROGRAMS = 16


Key = tuple[Any, ...]
"""What tells plans of a program apart: `key_of`."""
Measure = Callable[[Run | None, Key], int | None]
"""From two passes (None: those of the program itself) and the key of their plan to temporary bytes per device, compiled."""


def key_of(stretches: Sequence[Stretch], in_steps: bool) -> Key:
    return (in_steps, *((one.start, one.stop, one.turns, one.kept, one.in_blocks) for one in stretches))


class Allowed(NamedTuple):
    """What plans may do besides computing again."""

    compress: bool = False
    offload: bool = False


class Known:
    """What is known of a program. Bytes and seconds are those of a device.

    Attributes:
      chain: it as a chain, solved; of a device's parts where it is known what these are.
      layout: of the inputs of that chain.
      is_split: whether the inputs are on several devices.
      is_by_parts: whether plans are made for a device's parts of arrays. Codes are for whole arrays.
      digest: of it.
      compiled: bytes of steps by what the plan keeps, shared by the chains for all that may be allowed, as predictions are.
      measure: compiles a step; None: value and gradient are the step.
    """

    def __init__(
        self,
        derivative: Passes,
        types: Sequence[Any],
        layout: Layout,
        allowed: Allowed,
        digest: str,
        alike: Known | None,
        measure: Measure | None = None,
    ):
        rates = costs.device(device_of(layout.shardings))
        self.is_split = layout.devices > 1
        self.is_by_parts = layout.has_parts and not allowed.compress
        options = {**allowed._asdict(), "pack": not self.is_split}  # to pack sharded arrays, all of them would be moved
        self._whole = self.chain = Chain(derivative, rates, solved=not self.is_by_parts, **options)
        if self.is_by_parts:
            self.chain = Chain(on_device(self._whole.derivative, layout), rates, whole=self._whole, **options)
        self.layout = layout.of_device if self.is_by_parts else layout
        self.digest = digest
        self._types, self._inputs = types, layout
        self._measure = measure
        self.compiled: dict[Any, int | None] = {} if alike is None else alike.compiled
        self._predicted: dict[Key, int] = {} if alike is None else alike._predicted

    @property
    def is_part(self) -> bool:
        """Whether the program is part of a step, which takes longer to compile."""
        return self._measure is not None

    @property
    def gathers_again(self) -> bool:
        """Whether what is computed again gathers sharded inputs again: on one device there is nothing to gather."""
        return self.is_split

    @property
    def base_seconds(self) -> float:
        """Predicted seconds of a step that computes nothing again."""
        return self.chain.base_seconds / self.layout.devices

    @functools.cached_property
    def frontier(self) -> list[tuple[int, float]]:
        """Predicted bytes, and seconds on top of `base_seconds`, of the plans that solve the chain."""
        around = self.chain.derivative.around
        return [
            (self.layout.local(nbytes + around), seconds / self.layout.devices)
            for nbytes, seconds in self.chain.frontier
        ]

    def nbytes_of(self, way: Sequence[Choice]) -> int:
        """Predicted bytes of a way through the chain."""
        return self.layout.local(int(peak_of(way)) + self.chain.derivative.around)

    def stretches(self, way: Sequence[Choice]) -> tuple[Stretch, ...]:
        """A way through the chain as data."""
        found = stretches(self.chain, way, self.layout)
        self._predicted[key_of(found, False)] = self.nbytes_of(way)
        return found

    def predicted(self, key: Key) -> int:
        """Temporary bytes of a plan as the model alone has them; `stretches` was called for it."""
        return self._predicted[(False, *key[1:])]

    @functools.cached_property
    def all_kept(self) -> int:
        """Predicted bytes of what lies between the passes where everything is kept."""
        passes = self.chain.derivative
        flow, results = Dataflow([*passes.forward.eqns, *passes.backward.eqns]), passes.backward.outvars
        written = costs.stored(flow, [*variables(passes.outputs), *variables(results)], self.chain.rates.platform)
        names, kept = flow.names, passes.forward.flow.place.keys() & passes.backward.flow.outside.keys()
        found = {names.get(var, var) for var in kept & written}
        return self.layout.local(sum(map(costs.array_bytes, found & passes.forward.flow.place.keys())))

    @property
    def knows_all_kept(self) -> bool:
        """Whether the step was compiled with everything kept."""
        return key_of((), False) in self.compiled

    def step_bytes(self, stretches: tuple[Stretch, ...], in_steps: bool = False) -> int | None:
        """Temporary bytes of the step under a plan, compiled; None where it is no program of its own."""
        key = key_of(stretches, in_steps)
        if key not in self.compiled:
            if self._measure is not None:
                self.compiled[key] = self._measure(self.run(stretches, in_steps) if stretches else None, key)
            else:
                found = self.run(stretches, in_steps) if stretches else KeepAll(self._whole.derivative)
                self.compiled[key] = compiled_bytes(found, self._types, self._inputs)
        return self.compiled[key]

    def run(self, stretches: tuple[Stretch, ...], in_steps: bool = False) -> Run:
        """The two passes under a plan."""
        platform = self.chain.rates.platform if in_steps else None
        return Run(self._whole, choices(self._whole, stretches), platform, gathers_again=self.gathers_again)


_known: dict[Any, Known] = {}


def forget() -> None:
    """Forget all programs."""
    _known.clear()


def known(
    derivative: Passes,
    types: Sequence[Any],
    layout: Layout,
    allowed: Allowed,
    measure: Measure | None = None,
    before: dict[Any, Known] | None = None,
) -> Known:
    """What is known of an equal program for an equal device, or of this one from now on.

    Args:
      derivative, types, layout, allowed: of the program.
      measure: compiles the step that the program is part of; None: it is one by itself.
      before: what is known of that step's plans; with `measure`.
    """
    every = _known if before is None else before
    kind, platform = device_of(layout.shardings).device_kind, platform_of(layout.shardings)
    name = digest(derivative)
    of_program = (name, kind, platform, tuple(map(str, layout.shardings)))
    key = (of_program, allowed)
    if key in every:
        return every[key]
    other = next((one for (of, _), one in every.items() if of == of_program), None)  # they have plans in common
    found = Known(derivative, types, layout, allowed, name, other, measure)
    consts = [*derivative.forward.consts, *derivative.backward.consts]
    if not any(isinstance(const, jax.core.Tracer) for const in consts):  # which would outlive its trace
        if len(every) == _MOST_PROGRAMS:
            every.pop(next(iter(every)))
        every[key] = found
    return found
