"""A step written so that updates can be found in it: other equations with the same results.

- A checkpoint round a whole loss is opened: the derivative of its loop over layers is inside of it. What it computes again counts
  as a forward pass, whose loop a plan can run again by layers. Computed all at once, it would be kept as a whole anyway.
- A condition on updates, such as those of `optax.MultiSteps` and `optax.apply_if_finite`, is a selection: elementwise, and cheap.
- What one equation moves between the memories of host and device is moved array by array.
- A sum over a whole stack of gradients is the sum of those of turns. The first can be made in the loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax import lax

from memjax._core.compat import bodies, derivatives, eval_jaxpr, is_backward, name_stack, parameters, primitive_name
from memjax._core.lists import Arrays
from memjax._core.positions.walk import shape_of
from memjax._core.program.dataflow import is_literal, made_by, renamed, variables
from memjax._core.program.jaxpr import Program, as_closed, bind, calls_in_place, inside, trace
from memjax._core.program.primitives import CHECKPOINTS, REDUCTIONS, TRANSFERS, expensive
from memjax._jit.updates.loops import backward_loops, gradients_of

Function = Callable[..., Arrays]
_AGAIN = "rematted_computation"  # in the name stack of what a checkpoint computes again


def ready(program: Program) -> Program:
    """The program, straight lines of equations, written so that updates can be found in it."""
    program = with_others(with_others(program, _without_checkpoint), _array_by_array)
    program = dataclasses.replace(program, eqns=_with_forward_marks(program.eqns))
    loops = backward_loops(program)
    if not loops:
        return program
    after = program.flow.depending(out for loop in loops for out in gradients_of(loop))
    program = with_others(program, lambda eqn: None if after.isdisjoint(variables(eqn.invars)) else selection(eqn))
    after = program.flow.depending(out for loop in loops for out in gradients_of(loop))
    lengths = {loop.params["length"] for loop in loops}
    return with_others(program, lambda eqn: None if after.isdisjoint(eqn.outvars) else _by_turns(eqn, lengths))


def with_others(program: Program, other: Callable[[Any], Function | None]) -> Program:
    """The program in which functions of the same operands stand for equations: `other` gives them, or None."""
    eqns: list[Any] = []
    names: dict[Any, Any] = {}
    constvars, consts = [*program.constvars], [*program.consts]
    for eqn in program.eqns:
        f = other(eqn)
        reads = renamed(eqn.invars, names)
        if f is None:
            eqns.append(eqn.replace(invars=reads))
            continue
        closed = trace(functools.partial(_marked, eqn, f), [atom.aval for atom in eqn.invars], {})
        inner = calls_in_place(closed, differentiable=False)
        own = dict(zip(inner.invars, reads, strict=True))
        made = made_by(inner.eqns)
        for out, atom in zip(eqn.outvars, inner.outvars, strict=True):
            if not is_literal(atom) and atom in made and atom not in own:
                own[atom] = out
            else:  # an operand, a number, or the same as another
                names[out] = atom if is_literal(atom) else own[atom]
        eqns += [one.replace(invars=renamed(one.invars, own), outvars=renamed(one.outvars, own)) for one in inner.eqns]
        constvars += inner.constvars
        consts += inner.consts
    return Program(constvars, consts, program.invars, renamed(program.outvars, names), eqns)


def _marked(eqn: Any, f: Function, *values: Any) -> Arrays:
    with inside(eqn, marked=True):
        return f(*values)


def _without_checkpoint(eqn: Any) -> Function | None:
    if primitive_name(eqn) not in CHECKPOINTS or not is_backward(name_stack(eqn)):
        return None
    body = as_closed(parameters(eqn)["jaxpr"])
    names = set(map(primitive_name, body.jaxpr.eqns))
    if "scan" not in names or not names.isdisjoint(CHECKPOINTS):
        return None
    return lambda *values: eval_jaxpr(body.jaxpr, body.consts, values)


def _array_by_array(eqn: Any) -> Function | None:
    if eqn.primitive.name not in TRANSFERS or len(eqn.invars) == 1:
        return None
    params = [{name: each[i : i + 1] for name, each in eqn.params.items()} for i in range(len(eqn.invars))]
    return lambda *values: [eqn.primitive.bind(x, **own)[0] for x, own in zip(values, params, strict=True)]


def _with_forward_marks(eqns: Sequence[Any]) -> list[Any]:
    """The equations, of which those that an open checkpoint computes again are marked as the forward pass is."""
    forward = next((eqn for eqn in eqns if derivatives(name_stack(eqn))[:1] == ["jvp"]), None)
    if forward is None:
        return [*eqns]
    stack = forward.source_info.name_stack
    again = lambda eqn: _AGAIN in name_stack(eqn) and is_backward(name_stack(eqn))
    marked = lambda eqn: eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))
    return [marked(eqn) if again(eqn) else eqn for eqn in eqns]


def selection(eqn: Any) -> Function | None:
    """A condition as a selection of results, where that is cheap; None for all else."""
    inner = (one for body in bodies(eqn) for one in body.eqns)
    if eqn.primitive.name != "cond" or eqn.effects or any(map(expensive, inner)):
        return None

    def run(which: Any, *values: Any) -> Arrays:
        results = [eval_jaxpr(branch.jaxpr, branch.consts, values) for branch in parameters(eqn)["branches"]]
        return [lax.select_n(which, *cases) for cases in zip(*results, strict=True)]

    return run


def _by_turns(eqn: Any, lengths: Collection[int]) -> Function | None:
    axes = tuple(eqn.params.get("axes", ()))
    if eqn.primitive.name not in REDUCTIONS or 0 not in axes or len(axes) == 1:
        return None
    if shape_of(eqn.invars[0])[0] not in lengths:
        return None
    over = lambda some, values: bind(eqn.replace(params=eqn.params | {"axes": some}), values, marked=True)
    return lambda *values: over((0,), over(tuple(axis for axis in axes if axis), values))
