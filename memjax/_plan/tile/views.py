"""Slices and reshapes of logits, taken of what the logits are made from: positions then need not be told apart by tiles.

Losses of language models drop the last logits, or make one dimension of examples and positions. A row of a product depends
on a row of its operand alone, so the same can be done before it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.extend import core

from memjax._core.compat import primitive_name
from memjax._core.positions.walk import shape_of
from memjax._core.program.dataflow import is_literal, renamed
from memjax._core.program.jaxpr import Program, without_dead_equations
from memjax._core.program.primitives import ELEMENTWISE, flops_of_product


def with_early_views(program: Program) -> Program:
    """The program with slices and reshapes of rows of products before these, where nothing is computed twice by that."""
    lifting = _Lifting(program)
    lifted = without_dead_equations(lifting.program())
    if lifting.count and _flops(lifted) <= _flops(program):
        return lifted
    return program


def _flops(program: Program) -> float:
    return sum(map(flops_of_product, program.eqns))


class _Lifting:
    """The program made anew, with other equations in place of views.

    Attributes:
      count: how many products have been made anew.
    """

    def __init__(self, program: Program):
        self._program = program
        self._makers = program.flow.makers
        self._eqns: list[Any] = []
        self._made: dict[Any, Any] = {}
        self._names: dict[Any, Any] = {}
        self._leads: dict[Any, bool] = {}
        self.count = 0

    def program(self) -> Program:
        for eqn in self._program.eqns:
            if primitive_name(eqn) in ("slice", "reshape") and self._leads_to_product(eqn, eqn.invars[0]):
                self._names[eqn.outvars[0]] = self._viewed(eqn, eqn.invars[0])
            else:
                self._eqns.append(eqn.replace(invars=renamed(eqn.invars, self._names)))
        outs = renamed(self._program.outvars, self._names)
        return dataclasses.replace(self._program, eqns=self._eqns, outvars=outs)

    def _leads_to_product(self, view: Any, atom: Any) -> bool:
        """Whether a view of rows can be had from a product by taking the view of its operand."""
        if is_literal(atom):
            return False
        key = (id(view), atom)  # each once: where values are read twice there are exponentially many ways
        if key not in self._leads:
            self._leads[key] = self._finds_product(view, atom)
        return self._leads[key]

    def _finds_product(self, view: Any, atom: Any) -> bool:
        eqn = self._makers.get(atom)
        if eqn is None or len(eqn.outvars) > 1:
            return False
        if eqn.primitive.name == "dot_general":
            return _rows_of(view, eqn) is not None
        if primitive_name(eqn) not in ELEMENTWISE:
            return False
        whole = [other for other in eqn.invars if shape_of(other) == shape_of(atom)]
        others = [other for other in eqn.invars if shape_of(other) != shape_of(atom)]
        return (
            bool(whole)
            and all(self._leads_to_product(view, other) for other in whole)
            and all(_is_even(view, other) for other in others)
        )

    def _viewed(self, view: Any, atom: Any) -> Any:
        """The variable that is the view of another one."""
        key = (atom, str(view.params))
        if key not in self._made:
            self._made[key] = self._make(view, self._makers[atom])
        return self._made[key]

    def _make(self, view: Any, eqn: Any) -> Any:
        out = core.Var(eqn.outvars[0].aval.update(shape=shape_of(view.outvars[0])))
        if eqn.primitive.name == "dot_general":
            found = _rows_of(view, eqn)
            assert found is not None
            params, dimension_numbers = found
            x, operand = renamed(eqn.invars, self._names)
            rows = core.Var(x.aval.update(shape=_shape_after(view, params)))
            self._eqns.append(view.replace(invars=[x], outvars=[rows], params=params))
            changed = eqn.params | {"dimension_numbers": dimension_numbers}
            self._eqns.append(eqn.replace(invars=[rows, operand], outvars=[out], params=changed))
            self.count += 1
            return out
        operands = []
        for atom in eqn.invars:
            if not is_literal(atom) and shape_of(atom) == shape_of(eqn.outvars[0]):
                operands.append(self._viewed(view, atom))
            elif is_literal(atom) or not shape_of(atom) or primitive_name(view) == "slice":
                operands += renamed([atom], self._names)
            else:  # the same for all rows
                source = self._names.get(atom, atom)
                rank, own = len(shape_of(out)), _own_dims(view)
                shape = (1,) * (rank - own) + shape_of(atom)[len(shape_of(atom)) - own :]
                flat = core.Var(source.aval.update(shape=shape))
                self._eqns.append(
                    view.replace(invars=[source], outvars=[flat], params=view.params | {"new_sizes": shape})
                )
                operands.append(flat)
        self._eqns.append(eqn.replace(invars=operands, outvars=[out]))
        return out


def _shape_after(view: Any, params: Any) -> tuple[int, ...]:
    if primitive_name(view) == "reshape":
        return tuple(params["new_sizes"])
    return tuple(stop - start for start, stop in zip(params["start_indices"], params["limit_indices"], strict=True))


def _own_dims(view: Any) -> int:
    """How many of the last dimensions a view leaves as they are."""
    old, new = shape_of(view.invars[0]), shape_of(view.outvars[0])
    count = 0
    while count < min(len(old), len(new)) and old[-1 - count] == new[-1 - count]:
        count += 1
    return count


def _rows_of(view: Any, product: Any) -> tuple[Any, Any] | None:
    """Parameters of the view of the first operand, and of the product, that give the view of the result; or None."""
    (contracted, batch), (x, w) = product.params["dimension_numbers"], product.invars
    rows = len(shape_of(x)) - 1
    columns = len(shape_of(w)) - 1
    if any(batch) or tuple(contracted[0]) != (rows,) or is_literal(x) or product.params.get("out_sharding") is not None:
        return None
    old, new = shape_of(view.invars[0]), shape_of(view.outvars[0])
    if len(new) <= columns or old[rows:] != new[len(new) - columns :]:
        return None
    if primitive_name(view) == "slice":
        if view.params["strides"] is not None and any(stride != 1 for stride in view.params["strides"]):
            return None
        params = view.params | {
            "start_indices": (*view.params["start_indices"][:rows], 0),
            "limit_indices": (*view.params["limit_indices"][:rows], shape_of(x)[-1]),
            "strides": None,
        }
        return params, product.params["dimension_numbers"]
    leading = new[: len(new) - columns]
    if view.params["dimensions"] is not None or math.prod(leading) != math.prod(old[:rows]):
        return None
    if view.params.get("sharding") is not None:
        return None
    params = view.params | {"new_sizes": (*leading, shape_of(x)[-1])}
    return params, (((len(leading),), contracted[1]), batch)


def _is_even(view: Any, atom: Any) -> bool:
    """Whether an operand of an elementwise operation is the same for all rows."""
    shape = shape_of(atom)
    if not shape or is_literal(atom):
        return True
    own = _own_dims(view)
    return all(size == 1 for size in shape[: len(shape) - own])
