"""Runs a pullback so that each residual is decoded when an equation first needs it together with a cotangent.

Decoding waits behind a barrier on that cotangent, so that the compiler cannot begin earlier. Decoding that is to be fused into an
elementwise equation does not wait; that for a product, which reads its operands from memory, always does.

A residual is decoded once, and once more for each chain (`Keep.chained`) that reads it. In a gated feed-forward layer a compiler
then makes the gated product and the gradients of gate and up in one pass, beside the cotangent that it reads: four wide arrays at
once. With the gated product made before, in a pass of its own, there are three; but to decode gate and up twice took 2.8% of the
step of Llama layers on an H100, for 6% to 9% of the memory. Fewer bits save more for that time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from memjax._core import check
from memjax._core.barriers import barrier, joint_barrier
from memjax._core.compat import bodies
from memjax._core.program.dataflow import is_literal, variables
from memjax._core.program.jaxpr import Program, bind, read
from memjax._core.program.primitives import PRODUCTS, WHOLE_OPERANDS, expensive


def run_late(
    program: Program,
    cotangents: Sequence[Any],
    restored: Restored,
    see: Callable[[Any, dict[Any, Any]], None] = lambda eqn, env: None,
) -> list[Any]:
    """The outputs of a pullback, which reads residuals as variables of the forward pass.

    Args:
      see: called with each equation that runs and the values known then, which include those of its operands.
    """
    producer = program.flow.makers
    env, late = program.given(cotangents), program.flow.depending(program.invars)

    def get(atom, wait):
        if is_literal(atom):
            return atom.val
        if atom not in env:
            if atom in producer:
                run(producer[atom], wait)
            else:
                env[atom] = restored.value(atom, wait)
        return env[atom]

    def run(eqn, wait):
        in_memory = {}
        for atom in variables(eqn.invars):
            if _reads_memory(eqn) and (value := restored.in_memory(atom, wait)) is not None:
                in_memory[atom] = value
            else:
                get(atom, wait)
        if eqn.primitive is lax.optimization_barrier_p and late.isdisjoint(variables(eqn.invars)):
            # This barrier is there so that something is recomputed. A value that is new is already: let it be fused.
            for atom, out in zip(eqn.invars, eqn.outvars, strict=True):
                is_new = not is_literal(atom) and atom in restored.new
                env[out] = get(atom, wait) if is_new else barrier(get(atom, wait))
            return
        see(eqn, env)
        operands = read(env | in_memory if in_memory else env, eqn.invars)
        env.update(zip(eqn.outvars, bind(eqn, operands), strict=True))
        if _is_product(eqn):
            release(eqn)

    def release(product):
        """If it is the last one that reads a decoded array, let the backward pass go on when all of these are made.

        A compiler would put them off, since the array is large, and the cotangents that they take stay until then.
        """
        for atom in filter(restored.is_released, variables(product.invars)):
            readers = list(filter(_is_product, program.flow.consumers[atom]))
            if all(reader.outvars[0] in env for reader in readers):
                cotangents = [cotangent for reader in readers if (cotangent := _cotangent(reader, late)) is not None]
                together = list(dict.fromkeys([*(reader.outvars[0] for reader in readers), *cotangents]))
                env.update(zip(together, barrier(read(env, together)), strict=True))

    for eqn in _gradients_first(program, late, restored):
        cotangent = _cotangent(eqn, late)
        if cotangent is None:
            continue

        def waiting(code, cotangent=cotangent):
            # The cotangent goes on from the barrier too: a barrier with an unused output loses the input.
            code, env[cotangent] = joint_barrier((code, env[cotangent]))
            return code

        run(eqn, _Wait(waiting, _reads_memory(eqn)))
    return [get(atom, NO_WAIT) for atom in program.outvars]


def _gradients_first(program: Program, late: Set[Any], restored: Restored) -> list[Any]:
    """The equations. A product that makes the next cotangent is after those that read a released array and the same cotangent:
    where its result is read first.
    """

    def makes_gradient(eqn):
        return any(map(restored.is_released, variables(eqn.invars)))

    def gives_way(eqn):
        if not _is_product(eqn) or makes_gradient(eqn) or (cotangent := _cotangent(eqn, late)) is None:
            return False
        others = filter(_is_product, program.flow.consumers[cotangent])
        return eqn.outvars[0] in program.flow.consumers and any(map(makes_gradient, others))

    order: list[Any] = []
    waiting: dict[Any, Any] = {}

    def place(eqn):
        for var in variables(eqn.invars):
            if var in waiting:
                place(waiting.pop(var))
        order.append(eqn)

    for eqn in program.eqns:
        if gives_way(eqn):
            waiting[eqn.outvars[0]] = eqn
        else:
            place(eqn)
    return [*order, *waiting.values()]


def _cotangent(eqn: Any, late: Set[Any]) -> Any | None:
    """The first operand that depends on a cotangent."""
    return next((var for var in variables(eqn.invars) if var in late), None)


def _is_product(eqn: Any) -> bool:
    return eqn.primitive.name in PRODUCTS


def _reads_memory(eqn: Any) -> bool:
    """Whether compilers write the operands to memory, and fuse nothing into the equation."""
    return eqn.primitive.name in WHOLE_OPERANDS or bool(bodies(eqn))


class _Wait(NamedTuple):
    """How values wait for a cotangent.

    Attributes:
      barrier: makes a value wait for it.
      always: whether all codes wait, and not only those whose decoding is fused into nothing.
    """

    barrier: Callable[[Any], Any]
    always: bool


NO_WAIT = _Wait(lambda value: value, False)


class Stored(NamedTuple):
    """What is kept of a variable.

    Attributes:
      waits: whether decoding waits for a cotangent.
      to_memory: in place of `decode` where the reader fuses nothing, if it is not the same.
    """

    decode: Callable[[Any], Any]
    code: Any
    waits: bool
    to_memory: Callable[[Any], Any] | None = None


class Restored:
    """The values of the forward pass's variables, each decoded or recomputed once.

    Args:
      nonzero: for each mask the variable that is zero where the mask is false.
      normalised: variables that statistics are recomputed from.
      chained: variables that are recomputed from each other and from what is decoded for them alone: read again, that is decoded
        again, for a compiler would keep it.

    Attributes:
      values: of those variables that are known by now.
      new: those of them whose values are not the ones that the forward pass computed.
    """

    def __init__(
        self,
        producer: dict[Any, Any],
        nonzero: dict[Any, Any],
        kept: dict[Any, Any],
        codes: dict[Any, Stored],
        normalised: Set[Any] = frozenset(),
        chained: Set[Any] = frozenset(),
    ):
        self._producer, self._nonzero, self.values, self._codes = producer, nonzero, kept, codes
        self._normalised, self._chained, self._kept = normalised, chained, dict(kept)
        self.new: set[Any] = set()
        self._in_memory: dict[Any, Any] = {}

    def value(self, atom: Any, wait: _Wait) -> Any:
        """The value of a variable. Codes that wait do so as `wait` says."""
        if is_literal(atom):
            return atom.val
        if atom not in self.values:
            if atom in self._codes:
                self.values[atom] = self._decoded(atom, self._codes[atom].decode, wait)
            elif atom in self._nonzero:
                # The output of a ReLU may have been decoded without signs, but not to zero. The mask of a NaN is false.
                source = self.value(self._nonzero[atom], wait)
                self.values[atom] = jnp.abs(source) > jnp.zeros((), source.dtype)
            elif atom in self._chained:
                self._follow_chain(atom, wait)
            else:
                eqn = self._producer[atom]
                is_expensive = expensive(eqn)
                inner = _Wait(wait.barrier, True) if is_expensive else wait
                operands = [self._operand(operand, inner) for operand in eqn.invars]
                if is_expensive:
                    operands = wait.barrier(operands)
                outs = bind(eqn, operands)
                self.new.update(eqn.outvars)
                for var, out in zip(eqn.outvars, outs, strict=True):
                    self.values.setdefault(var, out)
            self.new.add(atom)
        return self.values[atom]

    def is_released(self, atom: Any) -> bool:
        """Whether the variable is decoded to memory, or recomputed in a chain, for products, and should not stay there."""
        return atom in self._chained or (atom in self._codes and self._codes[atom].to_memory is not None)

    def _follow_chain(self, atom: Any, wait: _Wait) -> None:
        """Recompute `atom`, and of those that it is computed from what is not there yet."""
        there = {var: self.values[var] for var in self._chained if var in self.values}
        rest = self._chained - {atom}
        own = Restored(self._producer, self._nonzero, self._kept | there, self._codes, self._normalised, rest)
        own.value(atom, wait)
        self.values |= {var: own.values[var] for var in self._chained if var in own.values}

    def in_memory(self, atom: Any, wait: _Wait) -> Any:
        """The value of a variable for an equation whose operands must be in memory. None if it has no decoder for this: then use
        `value`."""
        if atom not in self._codes or (decode := self._codes[atom].to_memory) is None:
            return None
        if atom not in self._in_memory:
            self._in_memory[atom] = self._decoded(atom, decode, wait)
        return self._in_memory[atom]

    def _decoded(self, var: Any, decode: Callable[[Any], Any], wait: _Wait) -> Any:
        _, code, waits, _ = self._codes[var]
        decoded = decode(wait.barrier(code) if waits or wait.always else code)
        if not check.is_array(decoded) or (decoded.shape, decoded.dtype) != (var.aval.shape, var.aval.dtype):
            wanted = f"one that decodes to what it was given, {var.aval.str_short()}"
            raise check.fail(TypeError, "codec", wanted, decoded, "return that from its decode")
        return decoded

    def _operand(self, atom: Any, wait: _Wait) -> Any:
        """An operand of a recomputed equation. If the forward pass computed it, it passes an optimization barrier: without one,
        the compiler replaces the recomputation by the result of the forward pass, and keeps that.

        The cotangent does not pass this barrier: if it did, the compiler could not fuse what computes it. Only variables
        that statistics are recomputed from do wait for the cotangent: otherwise the compiler normalises all such arrays before
        the backward pass begins.
        """
        value = self.value(atom, wait)
        if not is_literal(atom) and atom not in self.new:
            passes = wait.barrier if atom in self._normalised else barrier
            value = self.values[atom] = passes(value)
            self.new.add(atom)
        return value
