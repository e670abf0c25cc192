"""From a value back to the array that it is a cheap function of.

What `jax.vjp` saves is often a scaled, shifted, reshaped or cast copy of something else that it saves, too. The way back
goes through equations with one large operand; their small operands, a batch norm's mean for one, are kept beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memjax._core.program.jaxpr import Program, consumers, is_literal, producers, variables
from memjax._core.program.primitives import AFFINE, VIEWS
from memjax.compress._codecs.codec import DTYPES

UNCHANGED = VIEWS | {"stop_gradient"}
"""Primitives whose output is their operand, except for its shape and a rounding."""
_MANY = 16  # a small operand has at most a 16th of the values of the array that it is combined with


class Origins:
    """Where the values of a program come from.

    Attributes:
      producer: the equation that makes each variable.
      consumers: the equations that read each variable.
      constants: variables that depend on no input.
    """

    def __init__(self, program: Program):
        self.producer, self.consumers = producers(program), consumers(program)
        self._place = {out: i for i, eqn in enumerate(program.eqns) for out in eqn.outvars}
        self.constants: set[Any] = set()
        for eqn in program.eqns:
            if not eqn.effects and self.constants.issuperset(variables(eqn.invars)):
                self.constants.update(eqn.outvars)

    def place(self, var: Any) -> int:
        """Where the program makes `var`; inputs come first."""
        return self._place.get(var, -1)

    def parent(self, var: Any) -> tuple[Any, list[Any]] | None:
        """The array as large as `var` that it is a cheap function of, and the small operands of that function."""
        eqn = self.producer.get(var)
        if eqn is None or eqn.primitive.name not in AFFINE | UNCHANGED:
            return None
        operands = variables(eqn.invars)
        small = [atom for atom in operands if _is_small(atom, var) or self.repeated(atom) is not None]
        large = [atom for atom in operands if atom.aval.size == var.aval.size and atom not in small]
        if len(large) != 1 or len(large) + len(small) != len(operands):
            return None
        return large[0], small

    def repeated(self, var: Any) -> Any | None:
        """The small array, or the literal, that `var` repeats; None if it repeats nothing."""
        eqn = self.producer.get(var)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return None
        source = eqn.invars[0]
        return source if is_literal(source) or _is_small(source, var) else None

    def path(self, var: Any, *, exact: bool = False, to_input: bool = False) -> list[Any]:
        """From `var` back to where it comes from.

        Args:
          var: where to begin.
          exact: pass only equations that change no value.
          to_input: also pass roundings, which cannot be undone, but can be repeated from an input.
        """
        path = [var]
        while (step := self.parent(path[-1])) is not None:
            source, last = step[0], path[-1]
            if exact and self.producer[last].primitive.name not in UNCHANGED:
                break
            is_narrower = source.aval.dtype in DTYPES and source.aval.dtype.itemsize <= last.aval.dtype.itemsize
            if not (is_narrower or to_input):
                break
            path.append(source)
        return path

    def small_operands(self, path: Sequence[Any]) -> list[Any]:
        """The small operands that are needed to compute the first variable of a path from the last."""
        steps = [self.parent(var) for var in path[:-1]]
        repeated = [(small, self.repeated(small)) for step in steps if step is not None for small in step[1]]
        return variables(small if source is None else source for small, source in repeated)

    def uses(self, vars: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Pairs of an equation and the one of `vars` that it reads. If none reads them, the equations that make them."""
        pairs = [(eqn, var) for var in dict.fromkeys(vars) for eqn in self.consumers.get(var, [])]
        return pairs or [(self.producer[var], var) for var in vars if var in self.producer]


def _is_small(operand: Any, var: Any) -> bool:
    return operand.aval.size * _MANY <= var.aval.size
