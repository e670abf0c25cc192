"""Training steps are refused: a plan is for what is differentiated, and a step has been.

A loss that computes gradients on its way (a gradient penalty, forces) is none: it is differentiated once more. They differ in
where the gradients go, which is told by the marks that JAX leaves in name stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from memjax._core import check
from memjax._core.compat import bodies, is_backward, name_stack, primitive_name, scan_counts
from memjax._core.program.dataflow import is_literal
from memjax._core.program.primitives import AFFINE, ALIASES, VIEWS
from memjax._plan.flat import Traced

_DIRECT = AFFINE | ALIASES | VIEWS | {"div", "select_n"}
_MANY = 2  # arrays that are the gradients of a whole argument: a force is one


def step_message(f: Callable[..., Any], program: Traced, wrt: Sequence[bool], *, is_guess: bool = False) -> str:
    """What to say where `f` computes the gradients itself that it would be differentiated for; "" where it does not.

    Args:
      f: the function.
      program: it, traced.
      wrt: which of the program's constants and inputs are differentiated.
      is_guess: others may be differentiated.
    """
    jaxpr = program.closed.jaxpr
    types, wrt = [var.aval.str_short() for var in jaxpr.invars], wrt[len(program.closed.consts) :]
    wanted = [kind for kind, flag in zip(types, wrt, strict=True) if flag]
    theirs, inputs = set(types if is_guess else wanted), set(jaxpr.invars)
    made: list[str] = []  # by gradients, of the type of what is differentiated
    is_loss = updates = False
    for one, atom, loss in zip(_origins(jaxpr), jaxpr.outvars, program.has_cotangent, strict=True):
        if not is_literal(atom) and atom in inputs:
            continue
        is_loss |= loss and not one.of_gradients and sum(program.has_cotangent) == 1
        if one.of_gradients and (kind := atom.aval.str_short()) in theirs:
            made.append(kind)
            updates |= any(types[i] == kind for i in one.inputs)
    gradients = len(wanted) >= _MANY and all(wanted.count(kind) <= made.count(kind) for kind in wanted)
    if not (updates or gradients or (is_loss and made)):
        return ""
    return str(
        check.fail(
            ValueError,
            "f",
            "a loss, which is differentiated from outside",
            f,
            "it computes gradients itself, as a training step does, and a plan would change nothing of these. Pass the loss, and "
            "have the step differentiate what memjax.planned(loss, ...) returns",
        )
    )


class _Origin(NamedTuple):
    """What a value is made from.

    Attributes:
      of_gradients: whether a backward pass within the program has a part in it.
      inputs: numbers of the program's inputs that it is a sum of, or a multiple, as far as no backward pass is between.
    """

    of_gradients: bool = False
    inputs: frozenset[int] = frozenset()


def _origins(jaxpr: Any) -> list[_Origin]:
    """Those of each output."""
    return _outputs(jaxpr, [_Origin(False, frozenset([i])) for i in range(len(jaxpr.invars))], "")


def _outputs(jaxpr: Any, inputs: Sequence[_Origin], stack: str) -> list[_Origin]:
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda atom: _Origin() if is_literal(atom) else known.get(atom, _Origin())
    for eqn in jaxpr.eqns:
        known |= zip(eqn.outvars, _of(eqn, [read(atom) for atom in eqn.invars], stack), strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _of(eqn: Any, inputs: list[_Origin], outer: str) -> list[_Origin]:
    stack, inside, name = f"{outer}/{name_stack(eqn)}", bodies(eqn), primitive_name(eqn)
    if is_backward(stack):
        return [_Origin(True)] * len(eqn.outvars)
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
    return [joined if name in _DIRECT else _Origin(joined.of_gradients)] * len(eqn.outvars)


def _settled(turn: Callable[[list[_Origin]], list[_Origin]], carry: list[_Origin]) -> list[_Origin]:
    """The outputs of a loop: each turn adds to what the carried values are made from, until none does."""
    while True:
        outs = turn(carry)
        joined = [_joined(both) for both in zip(carry, outs[: len(carry)], strict=True)]
        if joined == carry:
            return [*carry, *outs[len(carry) :]]
        carry = joined


def _joined(found: Sequence[_Origin]) -> _Origin:
    return _Origin(any(one.of_gradients for one in found), frozenset().union(*(one.inputs for one in found)))
