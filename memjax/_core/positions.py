"""Which dimension of each value in a program holds positions, and where positions are mixed.

A function of sequences may run tile by tile exactly if no position of a result depends on another position of an argument:
norms over features, projections and elementwise functions are such, a softmax or a convolution over the sequence is not.
The walk here goes through a program with one rule for each kind of primitive (the rules are in `position_rules`), as
`jax.vmap` does, but it changes nothing: it only follows the dimension, and refuses what mixes.

Shapes can coincide, and a program can contain the length as a number. So two programs are walked, traced with different
lengths: both have to be free of mixing, and they have to be equal but for shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import jaxprs_in_params

from memjax._core.compat import is_tracer, primitive_name, source_line
from memjax._core.jaxpr import is_literal


class Shared(NamedTuple):
    """A value that is the same for every position.

    Attributes:
      uneven: for each dimension, whether values differ along it. It is safe to say that they do.
    """

    uneven: tuple[bool, ...]


class Positions(NamedTuple):
    """A value with positions.

    Attributes:
      dim: the dimension that holds them.
      inner: elements of that dimension from one position to the next: 1, but for dimensions that were merged.
    """

    dim: int
    inner: int


class Summed(NamedTuple):
    """A sum over positions, times what is the same for every position."""


State = Shared | Positions | Summed


class Mixed(Exception):
    """The reason why a program cannot run tile by tile: an operation, and the source line where that is known."""

    def __init__(self, what: str, where: str = ""):
        super().__init__(what, where)
        self.what, self.where = what, where

    def __str__(self) -> str:
        return self.what + (f", at {self.where}" if self.where else "")


def shared(shape: Sequence[int]) -> Shared:
    return Shared(tuple(size > 1 for size in shape))


def reason(eqn: Any, what: str) -> Mixed:
    return Mixed(f"{primitive_name(eqn)} {what}", source_line(eqn))


class Walk:
    """A walk through a program traced for `length` positions.

    Args:
      length: at least 2.
      may_sum: whether sums over positions are of use to the caller.
      rule: gives the states of an equation's outputs for those of its inputs.
    """

    def __init__(self, length: int, may_sum: bool, rule: Callable[[Walk, Any, list[State]], list[State]]):
        self.length, self.may_sum, self._rule = length, may_sum, rule

    def program(self, jaxpr: Any, states: Sequence[State]) -> list[State]:
        """The states of the outputs of a program for those of its inputs, its constants being shared.

        Raises Mixed.
        """
        env: dict[Any, State] = {var: shared(var.aval.shape) for var in jaxpr.constvars}
        env |= dict(zip(jaxpr.invars, states, strict=True))
        for eqn in jaxpr.eqns:
            env.update(
                zip(eqn.outvars, self._rule(self, eqn, [state_of(env, atom) for atom in eqn.invars]), strict=True)
            )
        return [state_of(env, atom) for atom in jaxpr.outvars]

    def regrouped(self, state: Positions, old: Sequence[int], new: Sequence[int]) -> Positions | None:
        """The state after a reshape; None if it splits the positions, or puts them into two dimensions."""
        after = math.prod(old[state.dim + 1 :]) * state.inner
        stride = math.prod(new)
        for dim, size in enumerate(new):
            stride //= max(size, 1)
            if stride <= after and after * self.length <= stride * size:
                return Positions(dim, after // stride) if after % stride == 0 else None
        return None


def state_of(env: dict[Any, State], atom: Any) -> State:
    return shared(np.shape(atom.val)) if is_literal(atom) else env[atom]


def check_same(first: Any, second: Any) -> None:
    """Raises Mixed unless two programs, traced with different lengths, are equal but for shapes."""
    if [primitive_name(eqn) for eqn in first.eqns] != [primitive_name(eqn) for eqn in second.eqns]:
        raise Mixed("the program itself depends on the number of positions")
    for eqn, other in zip(first.eqns, second.eqns, strict=True):
        for atom, counterpart in zip(eqn.invars, other.invars, strict=True):
            if is_literal(atom) != is_literal(counterpart) or (
                is_literal(atom) and not _equal(atom.val, counterpart.val)
            ):
                raise reason(
                    eqn,
                    f"has the number of positions among its operands ({_number(atom)} for one length, {_number(counterpart)} "
                    "for another): a mean over positions, say, which tiles cannot take: sum here, and divide afterwards",
                )
        bodies, others = (list(jaxprs_in_params(each.params)) for each in (eqn, other))
        if len(bodies) != len(others):
            raise reason(eqn, "depends on the number of positions")
        for body, counterpart in zip(bodies, others, strict=True):
            check_same(getattr(body, "jaxpr", body), getattr(counterpart, "jaxpr", counterpart))


def check_same_constants(first: Sequence[Any], second: Sequence[Any]) -> None:
    """Raises Mixed if a constant with equal shapes in two programs of different lengths has different values."""
    for value, other in zip(first, second, strict=False):
        if value is other or is_tracer(value) or is_tracer(other) or np.shape(value) != np.shape(other):
            continue
        if np.size(value) <= 4096 and not _equal(value, other):
            raise Mixed(f"a constant of shape {np.shape(value)} depends on the number of positions")


def _equal(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.tobytes() == b.tobytes()


def _number(atom: Any) -> Any:
    return atom.val if is_literal(atom) else "a variable"
