"""Finds the state of a step that can lie in the memory of the host: donated arguments of which it makes new values, and that no
derivative reads. They are needed once a step, for the update, and may be moved for that.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping
from typing import Any

from memjax._core.arrays import is_on_host
from memjax._core.compat import bodies, derivatives, name_stack
from memjax._core.program.dataflow import is_literal, variables
from memjax._core.program.jaxpr import Program, calls_in_place, nbytes
from memjax._core.program.primitives import expensive
from memjax._jit.account import type_of
from memjax._jit.updates.loops import backward_loops
from memjax._jit.updates.ready import selection, with_others
from memjax.compress._state.kernel_call import UPDATE

_LITTLE = 1000  # times less than all of it: a transfer that gains nothing


def state_of(closed: Any, donated: Collection[int]) -> dict[int, int]:
    """The state of a traced step: by number of an argument, that of the result that is its new value.

    First comes what has a slice for each turn of a loop of a backward pass, where it may be moved slice by slice, then what is
    largest.

    Args:
      closed: the step.
      donated: numbers of its arguments that are donated.
    """
    program = with_others(calls_in_place(closed, differentiable=False), selection)
    is_state = lambda aval: aval.ndim > 0 and not is_on_host(aval)  # there the step has put it by itself
    inputs = {k: program.invars[k] for k in sorted(donated) if is_state(program.invars[k].aval)}
    origins, read = _origins(program, inputs)
    free = {*range(len(program.outvars))}
    found: dict[int, int] = {}
    for k, var in inputs.items():
        alike = [i for i in free if origins.get(program.outvars[i], 0) >> k & 1 and _are_alike(program.outvars[i], var)]
        if alike and not read >> k & 1:
            # New weights depend on the state, too: on more of what is donated, and are made later.
            order = lambda i: (origins[program.outvars[i]].bit_count(), program.flow.place.get(program.outvars[i], -1))
            found[k] = min(alike, key=order)
            free.remove(found[k])
    size = {k: nbytes(inputs[k].aval) for k in found}
    of_turns = lambda k: is_of_turns(program, inputs[k])
    worth_it = [k for k in found if size[k] * _LITTLE >= sum(size.values())]
    return {k: found[k] for k in sorted(worth_it, key=lambda k: (not of_turns(k), -size[k]))}


def is_of_turns(program: Program, var: Any) -> bool:
    """Whether an array may have a slice for each turn of a loop of a backward pass."""
    return any(var.aval.shape[:1] == (loop.params["length"],) for loop in backward_loops(program))


def _are_alike(out: Any, var: Any) -> bool:
    return not is_literal(out) and type_of(out.aval) == type_of(var.aval)


def _origins(program: Program, inputs: Mapping[int, Any]) -> tuple[dict[Any, int], int]:
    """From which inputs a variable follows without a derivative, and which of them more than an update reads: a bit for each.

    More than an update are derivatives, and operations that do more than touch memory. What these read of a result counts not:
    the next derivative in a step may read weights that are updated.
    """
    origins, before, read = {var: 1 << k for k, var in inputs.items()}, {var: 1 << k for k, var in inputs.items()}, 0
    results = {*variables(program.outvars)}
    for eqn, reads in zip(program.eqns, program.flow.reads, strict=True):
        inside = functools.reduce(operator.or_, (before.get(var, 0) for var in reads), 0)
        if has_derivative(eqn) or (expensive(eqn) and eqn.primitive is not UPDATE):
            read |= inside
            continue
        every = functools.reduce(operator.or_, (origins.get(var, 0) for var in reads), 0)
        for out in eqn.outvars:
            origins[out], before[out] = every, 0 if out in results else inside
    return origins, read


def has_derivative(eqn: Any) -> bool:
    """Whether it is part of a derivative, or holds one."""
    return bool(derivatives(name_stack(eqn))) or any(has_derivative(one) for body in bodies(eqn) for one in body.eqns)
