"""Programs of tiles that give sums over positions in float32, as products make them, for these are added up over tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from memjax._core.lists import Arrays
from memjax._core.program.dataflow import is_literal
from memjax._core.program.jaxpr import Program, calls_in_place, evaluate_in, read, trace, without_dead_equations

_LINEAR = {"transpose", "reshape", "squeeze", "copy", "neg", "rev", "add_any"}


def with_wide_sums(program: Program, positions: Collection[int], platform: str) -> Program:
    """The program with those of its outputs at `positions` that are products, in float32 if they have fewer bits.

    What would be rounded for each tile is then rounded once, at the end, and the compiler adds the product where it makes it.
    XLA:CPU cannot make some products of 16-bit floats in float32, and widens operands anyway: there they are widened before.
    """
    makers = program.flow.makers
    eqns = list(program.eqns)
    outs = list(program.outvars)
    known: dict[Any, Any] = {}

    def wide(atom: Any) -> Any | None:
        """The same value in float32; None if it is not had by making it anew."""
        if atom.aval.dtype == jnp.float32:
            return atom
        if is_literal(atom) or atom not in makers:
            return None
        if atom not in known:
            known[atom] = remade(makers[atom])
        return known[atom]

    def remade(eqn: Any) -> Any | None:
        out = core.Var(eqn.outvars[0].aval.update(dtype=jnp.dtype("float32")))
        name = eqn.primitive.name
        if name == "convert_element_type":
            return wide(eqn.invars[0])
        if name == "dot_general":
            params = eqn.params | {"preferred_element_type": jnp.dtype("float32")}
            operands = [widened(atom) for atom in eqn.invars] if platform == "cpu" else eqn.invars
            eqns.append(eqn.replace(invars=operands, outvars=[out], params=params))
            return out
        if name not in _LINEAR:
            return None
        operands = [wide(atom) for atom in eqn.invars]
        if all(operand is None for operand in operands):
            return None
        operands = [
            widened(atom) if operand is None else operand for atom, operand in zip(eqn.invars, operands, strict=True)
        ]
        eqns.append(eqn.replace(invars=operands, outvars=[out]))
        return out

    def widened(atom: Any) -> Any:
        [convert] = jax.make_jaxpr(lambda value: value.astype(jnp.float32))(atom.aval).eqns
        eqns.append(convert.replace(invars=[atom]))
        return convert.outvars[0]

    for i in positions:
        atom = outs[i]
        if (
            jnp.issubdtype(atom.aval.dtype, jnp.floating)
            and atom.aval.dtype.itemsize < 4
            and (new := wide(atom)) is not None
        ):
            outs[i] = new
    return without_dead_equations(dataclasses.replace(program, eqns=eqns, outvars=outs))


def in_wide_sums(f: Callable[[Arrays], Arrays], arrays: Arrays, positions: Collection[int], platform: str) -> Arrays:
    """The results of `f` for arrays, those at `positions` that are products in float32: see `with_wide_sums`."""
    if not positions:
        return f(arrays)
    closed = trace(lambda *arrays: f(list(arrays)), [*map(jax.typeof, arrays)], {})
    program = with_wide_sums(calls_in_place(closed, differentiable=True), positions, platform)
    env = program.given(arrays)
    evaluate_in(program.eqns, env)
    return read(env, program.outvars)
