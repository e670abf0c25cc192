"""The values of the forward pass in the backward pass: kept, decoded, or computed again on demand."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from memjax._core import check
from memjax._core.program.jaxpr import bind, is_literal
from memjax._core.program.primitives import expensive


class Wait(NamedTuple):
    """How values wait for a cotangent.

    Attributes:
      barrier: makes a value wait for it.
      always: whether all codes wait, and not only those whose decoding is fused into nothing.
    """

    barrier: Callable[[Any], Any]
    always: bool


NO_WAIT = Wait(lambda value: value, False)


class Restored:
    """The values of the forward pass's variables, each decoded or computed again once.

    Args:
      producer: the equation that makes each variable.
      nonzero: for each mask the variable that is zero where the mask is false.
      kept: the values of variables that are kept as they are.
      codes: for each variable with a code: its decoder, the code, and whether decoding waits.
      normalised: variables that statistics are computed again from.
    """

    def __init__(
        self,
        producer: dict[Any, Any],
        nonzero: dict[Any, Any],
        kept: dict[Any, Any],
        codes: dict[Any, tuple[Callable[[Any], Any], Any, bool]],
        normalised: Set[Any] = frozenset(),
    ):
        self._producer, self._nonzero, self._values, self._codes = producer, nonzero, kept, codes
        self._normalised = normalised
        self._new: set[Any] = set()

    def has(self, var: Any) -> bool:
        return var in self._values

    def is_new(self, var: Any) -> bool:
        """Whether its value is not the one that the forward pass computed."""
        return var in self._new

    def value(self, atom: Any, wait: Wait) -> Any:
        """The value of a variable. Codes that wait do so as `wait` says."""
        if is_literal(atom):
            return atom.val
        if atom not in self._values:
            if atom in self._codes:
                decode, code, waits = self._codes[atom]
                decoded = decode(wait.barrier(code) if waits or wait.always else code)
                if not check.is_array(decoded) or (decoded.shape, decoded.dtype) != (atom.aval.shape, atom.aval.dtype):
                    wanted = f"one that decodes to what it was given, {atom.aval.str_short()}"
                    raise check.fail(TypeError, "codec", wanted, decoded, "return that from its decode")
                self._values[atom] = decoded
            elif atom in self._nonzero:
                # The output of a ReLU may have been decoded without signs, but not to zero. The mask of a NaN is false.
                source = self.value(self._nonzero[atom], wait)
                self._values[atom] = jnp.abs(source) > jnp.zeros((), source.dtype)
            else:
                eqn = self._producer[atom]
                is_expensive = expensive(eqn)
                inner = Wait(wait.barrier, True) if is_expensive else wait
                operands = [self._operand(operand, inner) for operand in eqn.invars]
                if is_expensive:
                    operands = wait.barrier(operands)
                outs = bind(eqn, operands)
                self._new.update(eqn.outvars)
                for var, out in zip(eqn.outvars, outs, strict=True):
                    self._values.setdefault(var, out)
            self._new.add(atom)
        return self._values[atom]

    def _operand(self, atom: Any, wait: Wait) -> Any:
        """An operand of what is computed again. It passes a barrier: without, the compiler sees that the result has been computed
        before, and keeps it.

        The barrier has no cotangents: what computes these could not be fused then. Only what is summed up for statistics
        waits for them: otherwise a compiler normalises all such arrays before the backward pass begins.
        """
        value = self.value(atom, wait)
        if not is_literal(atom) and atom not in self._new:
            barrier = wait.barrier if atom in self._normalised else lax.optimization_barrier
            value = self._values[atom] = barrier(value)
            self._new.add(atom)
        return value
