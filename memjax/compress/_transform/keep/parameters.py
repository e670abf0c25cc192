"""Finds values that follow from parameters alone. They stay exact: recomputed by moving and casting parameters, or kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from memjax._core.compat import scan_counts
from memjax._core.program.dataflow import Walk, is_literal, variables
from memjax._core.program.jaxpr import Program, nbytes, producers
from memjax._core.program.primitives import MOVES
from memjax.compress._transform.keep.origins import UNCHANGED, Origins, body_of

# These change no value except by rounding: applied to parameters they give parameters.
_MOVED = UNCHANGED | MOVES | {"reduce_precision", "dynamic_update_slice", "sharding_constraint", "reshard"}
# How many operands have the values that are moved; the others say where to.
_DATA_OPERANDS = {"dynamic_slice": 1, "dynamic_update_slice": 2, "gather": 1}


class Inputs(NamedTuple):
    """What is known of each input of a program.

    Attributes:
      lasting: whether it lives until the backward pass anyway.
      parameters: whether it is a parameter.
    """

    lasting: Sequence[bool]
    parameters: Sequence[bool]


def inputs_of(lasting: Sequence[bool], types: Sequence[Any]) -> Inputs:
    """The inputs of a function. What lasts is parameters where it is floating point, and not all lasts: then it is not known."""
    known = not all(lasting)
    is_float = lambda aval: bool(jnp.issubdtype(aval.dtype, jnp.floating))
    return Inputs(lasting, [known and lasts and is_float(aval) for lasts, aval in zip(lasting, types, strict=True)])


class Parameters:
    """Which values of a program follow from parameters.

    Args:
      program: the forward pass, with calls in place.
      origins: where its values come from.
      kept_inputs: constants, and inputs that live until the backward pass anyway.
      parameters: those of them that are parameters.
    """

    def __init__(self, program: Program, origins: Origins, kept_inputs: set[Any], parameters: set[Any]):
        self._origins, self._kept_inputs, self._parameters = origins, kept_inputs, parameters
        self._computed = _computed_of_parameters(program, parameters) - origins.constants

    def sources(self, var: Any) -> list[Any] | None:
        """What `var` follows from by slicing, reshaping, transposing and casting: parameters, values computed from parameters
        alone, and the small arrays that say which parts. None if it depends on anything else.
        """
        walk, sources = Walk([var]), list[Any]()
        for source in walk:
            eqn = self._origins.producer.get(source)
            if source in self._kept_inputs:
                sources.append(source)
            elif eqn is None:
                return None
            elif _is_moved(eqn):
                data, places = _data_and_places(eqn)
                sources += [atom for atom in variables(places) if atom not in self._origins.constants]
                walk.add(data)
            elif source in self._computed or self._is_moved_in_body(eqn, eqn.outvars.index(source)):
                sources.append(source)
            elif source not in self._origins.constants:
                return None
        computed = sum(nbytes(source.aval) for source in sources if source not in self._kept_inputs)
        return sources if computed <= nbytes(var.aval) else [var]

    def is_computed(self, var: Any) -> bool:
        """Whether `var` is computed from parameters and constants alone."""
        return var in self._computed

    def is_parameter(self, var: Any) -> bool:
        """Whether `var` is a parameter, or computed from parameters and constants alone."""
        return var in self._parameters or var in self._computed

    def _is_moved_in_body(self, eqn: Any, index: int) -> bool:
        """Whether a loop or a call only moves values of kept inputs to this output, as a scan over layers does to its weights."""
        operands = _moved_to_output(eqn, index)
        return operands is not None and all(is_literal(atom) or self.sources(atom) is not None for atom in operands)


def _is_moved(eqn: Any) -> bool:
    return eqn.primitive.name in _MOVED and not eqn.effects


def _data_and_places(eqn: Any) -> tuple[list[Any], list[Any]]:
    """The operands whose values an equation moves, and those that say where to."""
    count = _DATA_OPERANDS.get(eqn.primitive.name, len(eqn.invars))
    return eqn.invars[:count], eqn.invars[count:]


def _computed_of_parameters(program: Program, parameters: set[Any]) -> set[Any]:
    """Values computed from parameters and constants alone, such as normalised weights."""
    if not parameters:
        return set()
    others = {*program.constvars, *program.invars} - parameters
    computed: set[Any] = set()
    for eqn in program.eqns:
        depends = eqn.effects or not others.isdisjoint(variables(eqn.invars))
        (others if depends else computed).update(eqn.outvars)
    return computed


def _moved_to_output(eqn: Any, index: int) -> list[Any] | None:
    """The operands whose values a loop's or call's body only moves to its output `index`; None if it does anything else."""
    body, changing = body_of(eqn), set[Any]()
    if body is None:
        return None
    if eqn.primitive.name == "scan":
        constants, carried = scan_counts(eqn)
        if index < carried:
            return None
        changing = set(body.invars[constants : constants + carried])
    producer, operand = producers(body), dict(zip(body.invars, eqn.invars, strict=True))
    walk, operands = Walk([body.outvars[index]]), list[Any]()
    for source in walk:
        if source in changing:
            return None
        if source in operand:
            operands.append(operand[source])
        elif source in producer:  # else it is a constant
            inner = producer[source]
            deeper = _data_and_places(inner)[0] if _is_moved(inner) else None
            if deeper is None and (deeper := _moved_to_output(inner, inner.outvars.index(source))) is None:
                return None
            walk.add(deeper)
    return operands or None
