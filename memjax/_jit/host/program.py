"""A step whose state is moved to the device before it is read, and to the host again.

State of arrays that are not stacked waits for its gradient, and for the state that was moved before to be on the host again.
Otherwise the compiler moves all of it at once, and the step holds as much as it would with the state on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from memjax._core.barriers import joint_barrier
from memjax._core.lists import Arrays
from memjax._core.program.dataflow import Walk, variables
from memjax._core.program.jaxpr import Program, bind, calls_in_place, read
from memjax._jit.host.state import has_derivative, is_of_turns


def with_moves(closed: Any, state: Mapping[int, int]) -> Callable[[Arrays], Arrays]:
    """A traced step as a function of its inputs.

    Args:
      closed: the step.
      state: by number of an input that lies on the host, that of the result which is its new value.
    """
    program = calls_in_place(closed, differentiable=False)
    gradients = {k: _gradient(program, program.invars[k], program.outvars[i]) for k, i in state.items()}
    return lambda values: _Evaluation(program, state, gradients, values).outputs()


class _Evaluation:
    """A step for certain values of its inputs.

    Args:
      program: it.
      state: as for `with_moves`.
      gradients: by number of an input in `state`, what it waits for, or None.
      values: of the inputs.
    """

    def __init__(self, program: Program, state: Mapping[int, int], gradients: Mapping[int, Any], values: Arrays):
        self._program, self._state, self._gradients = program, state, gradients
        self._env = program.given(values)
        self._on_host = {program.invars[k]: k for k in state}
        self._done: set[int] = set()  # equations
        self._back: dict[int, Any] = {}  # results on the host, by number
        self._last: Arrays = []  # those of the state that was moved last

    def outputs(self) -> Arrays:
        flow = self._program.flow
        together: dict[Any, list[int]] = {}
        for k, gradient in self._gradients.items():
            if gradient is not None:
                together.setdefault(gradient, []).append(k)
        after = flow.depending(self._program.invars[k] for some in together.values() for k in some)
        if not any(eqn.effects for eqn in flow.eqns):  # these stay in their order
            self._evaluate(eqn for eqn in flow.eqns if after.isdisjoint(eqn.outvars))
            for gradient in sorted(together, key=flow.place.__getitem__):
                results = [self._state[k] for k in together[gradient]]
                self._evaluate(flow.needed([self._program.outvars[i] for i in results]))
                self._last = [self._put_back(i) for i in results]
        self._evaluate(flow.eqns)
        outs = enumerate(read(self._env, self._program.outvars))
        back = {*self._state.values()}
        return [self._put_back(i) if i in back else out for i, out in outs]

    def _evaluate(self, eqns: Iterable[Any]) -> None:
        for eqn in eqns:
            if id(eqn) in self._done:
                continue
            self._done.add(id(eqn))
            for var in variables(eqn.invars):
                if var in self._on_host:
                    self._move(var)
            values = read(self._env, eqn.invars)
            self._env |= zip(eqn.outvars, bind(eqn, values, marked=True), strict=True)

    def _move(self, var: Any) -> None:
        gradient = self._gradients[self._on_host.pop(var)]
        value = self._env[var]
        if gradient in self._env:
            value = joint_barrier([value, self._env[gradient], *self._last])[0]
        self._env[var] = jax.device_put(value, jax.memory.Space.Device)

    def _put_back(self, i: int) -> Any:
        if i not in self._back:
            [value] = read(self._env, [self._program.outvars[i]])
            self._back[i] = jax.device_put(value, jax.memory.Space.Host)
        return self._back[i]


def _gradient(program: Program, var: Any, out: Any) -> Any | None:
    """What a derivative makes with which state `var` becomes `out`. None: there is none, or the state goes turn by turn."""
    if is_of_turns(program, var):
        return None
    flow, walk = program.flow, Walk([out])
    for one in walk:
        number = flow.place.get(one)
        if number is not None and has_derivative(program.eqns[number]):
            if one.aval.shape == var.aval.shape:
                return one
        elif number is not None:
            walk.add(flow.reads[number])
    return None
