"""The rule for functions with derivative rules of their own, which must not mix positions either."""

from __future__ import annotations

from typing import Any

from memjax._core.arrays import is_float
from memjax._core.backward.passes import vjp
from memjax._core.lists import pick
from memjax._core.positions.bodies import call
from memjax._core.positions.walk import UNKNOWN, Mixed, Positions, Shared, State, Walk, shared
from memjax._core.program.jaxpr import axis_sizes, bind, trace
from memjax._core.program.scopes import place_of


def custom_call(walk: Walk, eqn: Any, states: list[State]) -> list[State]:
    outs = call(walk, eqn, states)
    if walk.is_backward:
        return outs
    try:
        _check_backward(walk, eqn, states, outs)
    except Mixed as mixed:
        if UNKNOWN not in mixed.what:  # kernels, and loops that add up the gradients of parameters
            raise Mixed(f"the derivative rule, where {mixed.what}", mixed.where or place_of(eqn)) from None
    return outs


def _check_backward(walk: Walk, eqn: Any, states: list[State], outs: list[State]) -> None:
    """Raises Mixed if the cotangent of a position depends on other positions, or that of a shared value is no sum over them."""
    types, out_types = ([atom.aval for atom in atoms] for atoms in (eqn.invars, eqn.outvars))
    wrt, floats = list(map(is_float, types)), list(map(is_float, out_types))
    inputs = pick(states, wrt)
    if not any(isinstance(state, Positions) for state in inputs):
        return

    def pull(values: list[Any], cotangents: list[Any]) -> Any:
        return vjp(lambda inputs: pick(bind(eqn, inputs), floats), values, wrt)[1](cotangents)[0]

    cotangents = [aval.to_ct_aval().update(weak_type=False) for aval in pick(out_types, floats)]
    program = trace(pull, [types, cotangents], axis_sizes(eqn)).jaxpr
    walk.seen.backward.append(program)
    pairs = zip(pick(outs, floats), cotangents, strict=True)
    given = [state if isinstance(state, Positions) else shared(aval.shape) for state, aval in pairs]
    for wanted, found in zip(inputs, walk.backward().program(program, [*states, *given]), strict=True):
        if (
            isinstance(wanted, Positions)
            and found != wanted
            and not (isinstance(found, Shared) and not found.uneven[wanted.dim])
        ):
            raise Mixed("the cotangent of a position depends on other positions")
        if not isinstance(wanted, Positions) and isinstance(found, Positions):
            raise Mixed("the cotangent of a shared value has positions")
