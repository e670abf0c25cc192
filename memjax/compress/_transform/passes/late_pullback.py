"""Runs a pullback so that each residual is decoded when an equation first needs it together with a cotangent.

Decoding waits behind a barrier on that cotangent, so that the compiler cannot begin earlier. Decoding that is to be fused into an
elementwise equation does not wait; that for a product, which reads its operands from memory, always does.

A residual is decoded once. In a gated feed-forward layer a compiler then makes the gated product and the gradients of gate and up
in one pass, beside the cotangent that it reads: four wide arrays at once. With the gated product made before, in a pass of its
own, there are three; but to decode gate and up twice took 2.8% of the step of Llama layers on an H100, for 6% to 9% of the
memory. Fewer bits save more for that time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax

from memjax._core.compat import bodies
from memjax._core.program.jaxpr import Program, bind, is_literal, producers, read, variables
from memjax._core.program.primitives import WHOLE_OPERANDS
from memjax.compress._transform.passes.restored import NO_WAIT, Restored, Wait


def run_late(
    program: Program,
    env: dict[Any, Any],
    cotangents: set[Any],
    residuals: dict[Any, Any],
    restored: Restored,
    see: Callable[[Any, dict[Any, Any]], None] = lambda eqn, env: None,
) -> list[Any]:
    """The outputs of a pullback.

    Args:
      program: the pullback.
      env: the values of its constants and cotangents, by variable.
      cotangents: its inputs that are cotangents.
      residuals: for each input that is a residual, the variable of the forward pass.
      restored: the values of these variables.
      see: called with each equation that runs and the values known then, which include those of its operands.
    """
    producer = producers(program)
    late = set(cotangents)

    def get(atom, wait):
        if is_literal(atom):
            return atom.val
        if atom not in env:
            if atom in residuals:
                env[atom] = restored.value(residuals[atom], wait)
            else:
                run(producer[atom], wait)
        return env[atom]

    def run(eqn, wait):
        in_memory = {}
        for atom in variables(eqn.invars):
            source = residuals.get(atom) if _reads_memory(eqn) else None
            if source is not None and (value := restored.in_memory(source, wait)) is not None:
                in_memory[atom] = value
            else:
                get(atom, wait)
        if eqn.primitive is lax.optimization_barrier_p and late.isdisjoint(variables(eqn.invars)):
            # This barrier is there so that something is computed again. A value that is new is already: let it be fused.
            for atom, out in zip(eqn.invars, eqn.outvars, strict=True):
                is_new = not is_literal(atom) and atom in residuals and restored.is_new(residuals[atom])
                env[out] = get(atom, wait) if is_new else lax.optimization_barrier(get(atom, wait))
            return
        see(eqn, env)
        operands = read(env | in_memory if in_memory else env, eqn.invars)
        env.update(zip(eqn.outvars, bind(eqn, operands), strict=True))

    for eqn in program.eqns:
        cotangent = next((var for var in variables(eqn.invars) if var in late), None)
        if cotangent is None:
            continue

        def barrier(code, cotangent=cotangent):
            # The cotangent goes on from the barrier too: a barrier with an unused output loses the input.
            code, env[cotangent] = lax.optimization_barrier((code, env[cotangent]))
            return code

        late.update(eqn.outvars)
        run(eqn, Wait(barrier, _reads_memory(eqn)))
    return [get(atom, NO_WAIT) for atom in program.outvars]


def _reads_memory(eqn: Any) -> bool:
    """Whether compilers write the operands to memory, and fuse nothing into the equation."""
    return eqn.primitive.name in WHOLE_OPERANDS or bool(bodies(eqn))
