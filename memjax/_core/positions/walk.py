"""Walks through a program and infers the state of each value: how it depends on positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memjax._core.compat import primitive_name
from memjax._core.program.dataflow import is_literal
from memjax._core.program.scopes import place_of

UNKNOWN = "is not known to keep positions apart"
COMBINES = "combines every position with every other"
ALONG = "is along the positions"
TABLE = (
    "meets values that differ from position to position but are made without the arguments (an arange, random numbers, a "
    "table): a tile would get those of the first positions. Pass them as an argument with an axis of its own"
)


@dataclass(frozen=True)
class Shared:
    """A value that is the same for every position.

    Attributes:
      uneven: for each dimension, whether values differ along it. True is always safe.
    """

    uneven: tuple[bool, ...]


class Zeros(Shared):
    """A shared value that is zero everywhere: a sum over positions as well."""


@dataclass(frozen=True)
class Positions:
    """A value with positions.

    Attributes:
      dim: the dimension that holds them.
      inner: elements of that dimension from one position to the next: 1, but for dimensions that were merged.
    """

    dim: int
    inner: int


@dataclass(frozen=True)
class Summed:
    """A sum over positions, times what is the same for every position."""


State = Shared | Positions | Summed


class Mixed(Exception):
    """The reason why a program cannot run tile by tile: an operation, and the source line where that is known.

    Args:
      what: the operation, and how it mixes positions.
      where: the source line.
      eqn: the equation whose source line to report, instead of `where`. The line is looked up lazily, because most are never
        shown.
    """

    def __init__(self, what: str, where: str = "", eqn: Any = None):
        super().__init__(what, where)
        self.what, self._where, self.eqn = what, where, eqn

    @property
    def where(self) -> str:
        return self._where if self.eqn is None else place_of(self.eqn)

    def __str__(self) -> str:
        return self.what + (f", at {self.where}" if self.where else "")


def reason(eqn: Any, what: str) -> Mixed:
    return Mixed(f"{primitive_name(eqn)} {what}", eqn=eqn)


def shared(shape: Sequence[int]) -> Shared:
    return Shared(tuple(size > 1 for size in shape))


def shape_of(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def is_zero(atom: Any, state: State) -> bool:
    """Whether a value is known to be zero everywhere."""
    return not np.any(atom.val) if is_literal(atom) else isinstance(state, Zeros)


def fits(state: State, place: Positions) -> bool:
    """Whether a value has its positions at `place`, or is the same along that dimension."""
    return (isinstance(state, Positions) and state == place) or (
        isinstance(state, Shared) and not state.uneven[place.dim]
    )


def one_place(eqn: Any, states: Sequence[State]) -> Positions:
    """The one place where operands have their positions; shared operands must not vary along it. Raises Mixed."""
    places = {state for state in states if isinstance(state, Positions)}
    if len(places) != 1:
        raise reason(eqn, COMBINES)
    (place,) = places
    for state in states:
        if isinstance(state, Shared) and len(state.uneven) > place.dim and state.uneven[place.dim]:
            raise reason(eqn, TABLE)
    return place


class Seen:
    """Collects what one walk cannot judge alone: two walks, for different lengths, must collect the same.

    Attributes:
      made: equations of shared values that may depend on how large their operands are: a sum of ones.
      backward: programs of derivative rules.
    """

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.backward: list[Any] = []


class Walk:
    """A walk through a program traced for `length` positions.

    Args:
      length: at least 2.
      may_sum: whether sums over positions are of use to the caller.
      rule: gives the states of an equation's outputs for those of its inputs.
      seen: this walk adds to it.
      is_backward: whether the program is that of a derivative rule, whose own derivatives do not matter.
    """

    def __init__(self, length: int, may_sum: bool, rule: Rule, seen: Seen | None = None, *, is_backward: bool = False):
        self.length, self.may_sum, self.is_backward, self._rule = length, may_sum, is_backward, rule
        self.seen = Seen() if seen is None else seen

    def backward(self) -> Walk:
        """A walk for programs of derivative rules, in which sums over positions are of use."""
        return Walk(self.length, True, self._rule, self.seen, is_backward=True)

    def program(self, jaxpr: Any, states: Sequence[State]) -> list[State]:
        """The states of the outputs of a program for those of its inputs; its constants are shared. Raises Mixed."""
        env = self.states(jaxpr, states)
        return [_read(env, atom) for atom in jaxpr.outvars]

    def states(self, jaxpr: Any, states: Sequence[State]) -> dict[Any, State]:
        """Likewise the states of all variables."""
        env: dict[Any, State] = {var: shared(var.aval.shape) for var in jaxpr.constvars}
        env |= dict(zip(jaxpr.invars, states, strict=True))
        for eqn in jaxpr.eqns:
            operands = [_read(env, atom) for atom in eqn.invars]
            env.update(zip(eqn.outvars, self._rule(self, eqn, operands), strict=True))
        return env


def _read(env: dict[Any, State], atom: Any) -> State:
    return shared(np.shape(atom.val)) if is_literal(atom) else env[atom]


Rule = Callable[[Walk, Any, list[Any]], list[State]]
"""From an equation and the states of its inputs to those of its outputs. Raises Mixed."""
