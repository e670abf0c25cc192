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


class Stored(NamedTuple):
    """What is kept of a variable.

    Attributes:
      decode: gives its value.
      code: what that is computed from.
      waits: whether decoding waits for a cotangent.
      to_memory: in place of `decode` where the reader fuses nothing, if it is not the same.
    """

    decode: Callable[[Any], Any]
    code: Any
    waits: bool
    to_memory: Callable[[Any], Any] | None = None


class Restored:
    """The values of the forward pass's variables, each decoded or computed again once.

    Args:
      producer: the equation that makes each variable.
      nonzero: for each mask the variable that is zero where the mask is false.
      kept: the values of variables that are kept as they are.
      codes: of variables that are kept otherwise.
      normalised: variables that statistics are computed again from.
    """

    def __init__(
        self,
        producer: dict[Any, Any],
        nonzero: dict[Any, Any],
        kept: dict[Any, Any],
        codes: dict[Any, Stored],
        normalised: Set[Any] = frozenset(),
    ):
        self._producer, self._nonzero, self._values, self._codes = producer, nonzero, kept, codes
        self._normalised = normalised
        self._new: set[Any] = set()
        self._in_memory: dict[Any, Any] = {}

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
                self._values[atom] = self._decoded(atom, self._codes[atom].decode, wait)
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

    def in_memory(self, atom: Any, wait: Wait) -> Any:
        """The value of a variable for a reader that fuses nothing; None where that is decoded as for others."""
        if is_literal(atom) or atom not in self._codes or (decode := self._codes[atom].to_memory) is None:
            return None
        if atom not in self._in_memory:
            self._in_memory[atom] = self._decoded(atom, decode, wait)
        return self._in_memory[atom]

    def _decoded(self, var: Any, decode: Callable[[Any], Any], wait: Wait) -> Any:
        _, code, waits, _ = self._codes[var]
        decoded = decode(wait.barrier(code) if waits or wait.always else code)
        if not check.is_array(decoded) or (decoded.shape, decoded.dtype) != (var.aval.shape, var.aval.dtype):
            wanted = f"one that decodes to what it was given, {var.aval.str_short()}"
            raise check.fail(TypeError, "codec", wanted, decoded, "return that from its decode")
        return decoded

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
