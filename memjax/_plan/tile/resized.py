"""A program traced for all positions, run for some of them.

The walk says which dimension of each value holds positions. Sizes in the parameters of equations (of a broadcast, a reshape,
a slice) are changed along this dimension. A value that is equal for every position may have been broadcast along it. Where
such a value meets positions, it is cut to their number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from memjax._core.compat import primitive_name, scan_counts
from memjax._core.lists import Arrays
from memjax._core.positions.dimensions import into_of_scatter, scatter_places
from memjax._core.positions.rules import apply_rule
from memjax._core.positions.walk import Mixed, Positions, Rule, Shared, State, Summed, Walk, shape_of, shared
from memjax._core.positions.without_positions import ZEROS_STAY
from memjax._core.program.dataflow import is_literal
from memjax._core.program.jaxpr import Program, bind, inside
from memjax._core.program.primitives import ELEMENTWISE, SCATTERS
from memjax._core.tiles import with_size
from memjax._core.wide_sums import with_wide_sums
from memjax._plan.tile.one_hot import column_of, scattered

_TOGETHER = ELEMENTWISE | {"concatenate", "dynamic_update_slice", "sort"}
_SCATTERS = SCATTERS | {"scatter-mul", "scatter-min", "scatter-max"}


class Resized:
    """A program as a function of any number of positions.

    Args:
      program: straight lines of equations, traced for `length` positions.
      states: of its inputs.
      out_states: of its outputs; sums of fewer bits are given in float32.
      length: the number of positions.
      platform: that it is compiled for, as JAX calls devices.
      rule: gives the states of an equation's outputs.
      marked: what runs keeps the marks of derivatives that equations have.

    Attributes:
      length: as given.
      calls: functions of the operands and the number of positions that run in place of equations, by the first variable that
        these make.

    Raises Mixed where positions are mixed, or the outputs have other states.
    """

    def __init__(
        self,
        program: Program,
        states: Sequence[State],
        out_states: Sequence[State],
        length: int,
        platform: str,
        rule: Rule = apply_rule,
        *,
        marked: bool = False,
    ):
        sums = [i for i, state in enumerate(out_states) if isinstance(state, Summed)]
        program = with_wide_sums(program, sums, platform)
        self._program, self.length, self._marked = program, length, marked
        self._states = Walk(length, True, rule).states(program, states)
        self._makers = program.flow.makers
        self.calls: dict[Any, Callable[[Arrays, int], Arrays]] = {}
        self._out_dims: list[int | None] = []  # of results that are the same for every position
        for atom, wanted in zip(program.outvars, out_states, strict=True):
            self._out_dims.append(self._dim_to_narrow(atom, wanted))

    def _dim_to_narrow(self, atom: Any, wanted: State) -> int | None:
        state = shared(()) if is_literal(atom) else self._states[atom]
        if state == wanted or (isinstance(wanted, Shared) and isinstance(state, Shared)):
            return None
        if (
            isinstance(wanted, Positions)
            and isinstance(state, Shared)
            and state.uneven
            and not state.uneven[wanted.dim]
        ):
            return wanted.dim
        if isinstance(wanted, Summed) and self.is_zero(atom):
            return None
        raise Mixed(f"{atom.aval.str_short()} has its positions elsewhere")

    def is_zero(self, atom: Any) -> bool:
        """Whether it is a gradient of zeros, which tiles may add as often as they like."""
        while not is_literal(atom):
            eqn = self._makers.get(atom)
            if eqn is None or eqn.primitive.name not in ZEROS_STAY:
                return False
            (atom,) = eqn.invars
        return not np.any(atom.val)

    def scope(self, eqn: Any) -> contextlib.AbstractContextManager[Any]:
        """What is traced there counts as made where the equation was."""
        return inside(eqn, marked=self._marked)

    def bind(self, eqn: Any, values: Sequence[Any]) -> Arrays:
        return bind(eqn, values, marked=self._marked)

    def __call__(self, inputs: Arrays, size: int = 0) -> Arrays:
        """The outputs, for `size` positions, which the inputs tell if some of them have positions."""
        program = self._program
        run = _Evaluation(self, dict(zip(program.constvars, program.consts, strict=True)), size)
        for var, value in zip(program.invars, inputs, strict=True):
            run.env[var] = value
            if isinstance(state := self._states[var], Positions):
                run.size = value.shape[state.dim] * self.length // shape_of(var)[state.dim]
        for eqn in program.eqns:
            run.add(eqn)
        return [
            run.value(atom) if dim is None else run.narrowed(atom, dim)
            for atom, dim in zip(program.outvars, self._out_dims, strict=True)
        ]


class _Evaluation:
    """One run, for `size` positions. Values of `env` that are the same for every position have their whole size."""

    def __init__(self, of: Resized, env: dict[Any, Any], size: int):
        self.env, self.size = env, size
        self._of = of
        self._narrow: dict[tuple[Any, int], Any] = {}

    def state(self, atom: Any) -> State | None:
        return None if is_literal(atom) else self._of._states[atom]

    def add(self, eqn: Any) -> None:
        """Evaluate an equation, unless its results are the same for every position: these are made when they are needed."""
        states = [self.state(atom) for atom in eqn.invars]
        made = [self.state(out) for out in eqn.outvars]
        if all(state is None or isinstance(state, Shared) for state in (*states, *made)):
            return
        has_positions = any(isinstance(state, Positions) for state in states)
        dims = _dims_to_narrow(eqn, states) if has_positions else [None] * len(states)
        values = [
            self.value(atom) if dim is None else self.narrowed(atom, dim)
            for atom, dim in zip(eqn.invars, dims, strict=True)
        ]
        if eqn.outvars and (call := self._of.calls.get(eqn.outvars[0])) is not None:
            with self._of.scope(eqn):
                self.env |= zip(eqn.outvars, call(values, self.size), strict=True)
            return
        if has_positions:
            eqn = self._with_sizes(eqn, states)
        if has_positions and (column := column_of(eqn)) is not None and self._of.is_zero(eqn.invars[0]):
            self.env[eqn.outvars[0]] = self._scattered(eqn, column, *values[1:])
            return
        self.env |= zip(eqn.outvars, self._of.bind(eqn, values), strict=True)

    def _scattered(self, eqn: Any, column: int, labels: Any, values: Any) -> Any:
        state, shape = self.state(eqn.outvars[0]), shape_of(eqn.outvars[0])
        assert isinstance(state, Positions)
        with self._of.scope(eqn):
            return scattered(column, with_size(shape, state.dim, self._new_size(shape[state.dim])), labels, values)

    def value(self, atom: Any) -> Any:
        """A value, with all its elements if it is the same for every position."""
        if is_literal(atom):
            return atom.val
        if atom not in self.env:
            eqn = self._of._makers[atom]
            self.env |= zip(eqn.outvars, self._of.bind(eqn, [self.value(read) for read in eqn.invars]), strict=True)
        return self.env[atom]

    def narrowed(self, var: Any, dim: int) -> Any:
        """A value that is the same for every position, with fewer elements along a dimension."""
        if (var, dim) not in self._narrow:
            self._narrow[var, dim] = self._make_narrow(var, dim)
        return self._narrow[var, dim]

    def _make_narrow(self, var: Any, dim: int) -> Any:
        size = self._new_size(shape_of(var)[dim])
        eqn = self._of._makers.get(var)
        if eqn is not None and eqn.primitive.name == "broadcast_in_dim":
            into = eqn.params["broadcast_dimensions"]
            (atom,) = eqn.invars
            is_wide = dim in into and shape_of(atom)[into.index(dim)] > 1
            value = self.narrowed(atom, into.index(dim)) if is_wide else self.value(atom)
            shape = with_size(eqn.params["shape"], dim, size)
            return self._of.bind(eqn.replace(params=eqn.params | {"shape": shape}), [value])[0]
        if eqn is not None and primitive_name(eqn) in ELEMENTWISE and len(eqn.outvars) == 1:
            wide = lambda atom: len(shape_of(atom)) > dim and shape_of(atom)[dim] > 1 and not is_literal(atom)
            return self._of.bind(eqn, [self.narrowed(a, dim) if wide(a) else self.value(a) for a in eqn.invars])[0]
        return lax.slice_in_dim(self.value(var), 0, size, axis=dim)

    def _new_size(self, size: int) -> int:
        return size // self._of.length * self.size

    def _with_sizes(self, eqn: Any, states: Sequence[State | None]) -> Any:
        """The equation with the sizes that it names changed."""
        name, params = primitive_name(eqn), eqn.params
        if name == "scan":  # over the positions: others have none in their parameters
            rows = states[sum(scan_counts(eqn)) :]
            is_over = bool(rows) and rows[0] == Positions(0, 1)
            return eqn.replace(params=params | {"length": self._new_size(params["length"])}) if is_over else eqn
        out = self.state(eqn.outvars[0])
        if not isinstance(out, Positions):
            return eqn
        resized = lambda shape, dim: with_size(shape, dim, self._new_size(shape[dim]))
        if name == "broadcast_in_dim":
            changes = {"shape": resized(params["shape"], out.dim)}
        elif name == "reshape":
            changes = {"new_sizes": resized(params["new_sizes"], out.dim)}
        elif name == "slice":
            changes = {"limit_indices": resized(params["limit_indices"], out.dim)}
        elif name == "dynamic_slice":
            changes = {"slice_sizes": resized(params["slice_sizes"], out.dim)}
        elif name == "gather" and isinstance(operand := states[0], Positions):
            dropped = params["dimension_numbers"].operand_batching_dims
            sizes = params["slice_sizes"]
            changes = {} if operand.dim in dropped else {"slice_sizes": resized(sizes, operand.dim)}
        else:
            changes = {}
        return eqn.replace(params=params | changes) if changes else eqn


def _dims_to_narrow(eqn: Any, states: Sequence[State | None]) -> list[int | None]:
    """For each operand that is the same for every position the dimension that meets positions, if it has one."""
    name = primitive_name(eqn)
    dims: list[int | None] = [None] * len(states)
    index, state = next((i, state) for i, state in enumerate(states) if isinstance(state, Positions))
    if name in _TOGETHER:
        dims = [state.dim] * len(states)
    elif name == "dot_general":
        contracted, batch = eqn.params["dimension_numbers"]
        for kind in (contracted, batch):
            if state.dim in kind[index]:
                dims[1 - index] = kind[1 - index][list(kind[index]).index(state.dim)]
    elif name == "gather":
        numbers = eqn.params["dimension_numbers"]
        pairs = list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
        for pair in pairs:
            if pair[index] == state.dim:
                dims = list(pair)
    elif name in _SCATTERS:
        for triple in scatter_places(eqn):
            if triple[index] == state.dim:
                dims = list(triple)
        if index == 1 and dims == [None] * len(
            states
        ):  # a sum by index of updates that are the same for every position
            dims[2] = into_of_scatter(eqn)[state.dim]
    return [dim if _has_many(atom, s, dim) else None for atom, s, dim in zip(eqn.invars, states, dims, strict=True)]


def _has_many(atom: Any, state: State | None, dim: int | None) -> bool:
    """Whether a shared operand has a dimension that is to become smaller."""
    shape = shape_of(atom)
    return (
        dim is not None and isinstance(state, Shared) and not is_literal(atom) and len(shape) > dim and shape[dim] > 1
    )
