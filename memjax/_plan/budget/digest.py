"""What tells programs apart.

A plan names equations, so programs are equal if their equations are: shapes, dtypes and parameters. Where arrays lie, and what a
mesh is called, changes no equation under automatic axes, and is left out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
import re
import weakref
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core

from memjax._core.compat import parameters
from memjax._core.program.dataflow import is_literal
from memjax._core.program.jaxpr import does_nothing
from memjax._plan.derivative import Passes

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_PLACES = (jax.sharding.Sharding, jax.sharding.Mesh, jax.sharding.AbstractMesh)


# Of passes as they were: what a search asks for each of many budgets.
_found: weakref.WeakKeyDictionary[Passes, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def digest(derivative: Passes) -> str:
    """Equal for equal programs, however their variables are called and wherever their arrays lie."""
    now = derivative.forward, derivative.backward, derivative.wrt, derivative.outs, derivative.of_blocks
    *before, name = _found.get(derivative, (None,))
    # Passes are changed by getting other programs.
    if len(before) != len(now) or not all(map(operator.is_, before, now)):
        name = _digest(derivative)
        _found[derivative] = *now, name
    return name


def _digest(derivative: Passes) -> str:
    names: dict[Any, str] = {}
    parts: list[str] = [str(derivative.wrt), str(derivative.outs), *(["blocks"] if derivative.of_blocks else [])]
    # Not the equations of these passes: what finds the indices of a pool may be a kernel on GPUs.
    parts += ["in plans"] if derivative.in_plans("cpu") is not derivative else []
    for program in (derivative.forward, derivative.backward):
        parts += _equations(program.eqns, names)
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]


def digest_of(program: Any, *more: Any) -> str:
    """Likewise for a jaxpr, and `more` that it is used with."""
    return hashlib.sha256(" ".join((*_parameter(program), *map(str, more))).encode()).hexdigest()[:32]


def _equations(eqns: Any, names: dict[Any, str]) -> Iterator[str]:
    for eqn in eqns:
        if does_nothing(eqn):
            [atom], [out] = eqn.invars, eqn.outvars
            names[out] = _name(atom, names)
            continue
        yield eqn.primitive.name
        for name, value in sorted(parameters(eqn).items()):
            yield f"{name}="
            yield from _parameter(value)
        yield from _atoms((*eqn.invars, *eqn.outvars), names)


def _atoms(atoms: Any, names: dict[Any, str]) -> Iterator[str]:
    for atom in atoms:
        name = _name(atom, names)
        aval = atom.aval
        yield f"{name}:{aval.dtype}{list(aval.shape)}" if hasattr(aval, "dtype") else f"{name}:{aval.str_short()}"


def _name(atom: Any, names: dict[Any, str]) -> str:
    return f"literal {atom.val}" if is_literal(atom) else names.setdefault(atom, str(len(names)))


def _parameter(value: Any) -> Iterator[str]:
    if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
        jaxpr, names = getattr(value, "jaxpr", value), dict[Any, str]()
        yield from _atoms((*jaxpr.constvars, *jaxpr.invars), names)
        yield from _equations(jaxpr.eqns, names)
        yield from _atoms(jaxpr.outvars, names)
    elif type(value) in (tuple, list):
        for one in value:
            yield from _parameter(one)
    elif isinstance(value, set | frozenset):
        # Texts of sets are in the order of hashes, which is another in each process.
        yield from sorted(" ".join(_parameter(one)) for one in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield f"{field.name}="
            yield from _parameter(getattr(value, field.name))
    elif not (value is None or isinstance(value, _PLACES)):
        yield _ADDRESS.sub("", str(value))
