"""Concatenations of a forward pass, made where they are read, and of their parts.

In a network with dense connectivity each layer reads all features so far, and a concatenation adds its own to them. As it is
written each concatenation is made of the one before. So wherever the program is cut, all features so far cross, in another
array each time. A concatenation that is made of the parts, where it is first read, crosses no cut before that. Its parts do,
and of these each is kept once, whatever number of concatenations it is in.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from memjax._core.program.dataflow import is_literal
from memjax._core.program.jaxpr import Program


def late_concatenations(program: Program) -> Program:
    """The program in which each concatenation runs just before it is first read, and reads the parts of the one it adds to.

    This takes no more memory: the parts have as many bytes as the whole. If something later reads the smaller concatenation,
    that one is alive anyway and stays a part.
    """
    if not any(map(_concatenates, program.eqns)):
        return program
    eqns = _of_parts(program)
    place: list[int] = [*range(len(eqns))]
    flow = dataclasses.replace(program, eqns=eqns).flow
    for i in range(len(eqns) - 1, -1, -1):
        if _concatenates(eqns[i]):
            place[i] = min((place[one] for one in flow.readers.get(eqns[i].outvars[0], [])), default=i)
    # Of several with the same place the reader was the last one, and is again.
    order = sorted(enumerate(place), key=operator.itemgetter(1, 0))
    return dataclasses.replace(program, eqns=[eqns[i] for i, _ in order])


def _concatenates(eqn: Any) -> bool:
    return eqn.primitive.name == "concatenate"


def _of_parts(program: Program) -> list[Any]:
    """The equations, with the parts of concatenations in place of those that are not read later than they are added to."""
    flow, eqns = program.flow, list[Any]()
    for i, eqn in enumerate(program.eqns):
        if _concatenates(eqn):
            atoms: list[Any] = []
            for atom in eqn.invars:
                if is_literal(atom) or atom not in flow.place:
                    atoms.append(atom)
                    continue
                smaller = eqns[flow.place[atom]]
                is_smaller = _concatenates(smaller) and smaller.params == eqn.params
                ends = is_smaller and all(one <= i or _concatenates(program.eqns[one]) for one in flow.readers[atom])
                atoms += smaller.invars if ends else [atom]
            eqn = eqn.replace(invars=atoms)
        eqns.append(eqn)
    return eqns
