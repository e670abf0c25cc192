"""Gradients that a program computes itself, told by the marks that JAX leaves in name stacks.

A training step, or `jax.value_and_grad` of a loss, computes gradients; so does a loss with a gradient penalty, or with forces.
They differ in where the gradients go, so each output says what it has of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from memjax._core.compat import bodies, is_backward, name_stack, primitive_name, scan_counts
from memjax._core.program.dataflow import is_literal
from memjax._core.program.primitives import AFFINE, ALIASES, VIEWS

_DIRECT = AFFINE | ALIASES | VIEWS | {"div", "select_n"}


class Origin(NamedTuple):
    """What a value is made from.

    Attributes:
      of_gradients: whether a backward pass within the program has a part in it.
      inputs: numbers of the program's inputs that it is a sum of, or a multiple, as far as no backward pass is between.
    """

    of_gradients: bool = False
    inputs: frozenset[int] = frozenset()


def origins(jaxpr: Any) -> list[Origin]:
    """Those of each output."""
    return _outputs(jaxpr, [Origin(False, frozenset([i])) for i in range(len(jaxpr.invars))], "")


def _outputs(jaxpr: Any, inputs: Sequence[Origin], stack: str) -> list[Origin]:
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda atom: Origin() if is_literal(atom) else known.get(atom, Origin())
    for eqn in jaxpr.eqns:
        known |= zip(eqn.outvars, _of(eqn, [read(atom) for atom in eqn.invars], stack), strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _of(eqn: Any, inputs: list[Origin], outer: str) -> list[Origin]:
    stack, inside, name = f"{outer}/{name_stack(eqn)}", bodies(eqn), primitive_name(eqn)
    if is_backward(stack):
        return [Origin(True)] * len(eqn.outvars)
    if name == "scan":
        consts, carried = scan_counts(eqn)
        turn = lambda carry: _outputs(inside[0], [*inputs[:consts], *carry, *inputs[consts + carried :]], stack)
        return _settled(turn, inputs[consts : consts + carried])
    if name == "while":
        tested, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        body, fixed = eqn.params["body_jaxpr"].jaxpr, inputs[tested : tested + consts]
        return _settled(lambda carry: _outputs(body, [*fixed, *carry], stack), inputs[tested + consts :])
    if name == "cond":
        branches = (_outputs(branch, inputs[1:], stack) for branch in inside)
        return [_joined(found) for found in zip(*branches, strict=True)]
    if len(inside) == 1 and len(inside[0].invars) == len(inputs) and len(inside[0].outvars) == len(eqn.outvars):
        return _outputs(inside[0], inputs, stack)
    joined = _joined(inputs)
    return [joined if name in _DIRECT else Origin(joined.of_gradients)] * len(eqn.outvars)


def _settled(turn: Callable[[list[Origin]], list[Origin]], carry: list[Origin]) -> list[Origin]:
    """The outputs of a loop: each turn adds to what the carried values are made from, until none does."""
    while True:
        outs = turn(carry)
        joined = [_joined(both) for both in zip(carry, outs[: len(carry)], strict=True)]
        if joined == carry:
            return [*carry, *outs[len(carry) :]]
        carry = joined


def _joined(found: Sequence[Origin]) -> Origin:
    return Origin(any(one.of_gradients for one in found), frozenset().union(*(one.inputs for one in found)))
