"""Programs of tiles that give sums over positions in float32, as products make them, for these are added up over tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from memjax._core.jaxpr import Program, is_literal, producers
from memjax._core.positions.walk import shape_of

_LINEAR = {"transpose", "reshape", "squeeze", "copy", "neg", "add_any"}


def with_wide_sums(program: Program, positions: Collection[int]) -> Program:
    """The program with those of its outputs at `positions` that are products, in float32 if they have fewer bits.

    What would be rounded for each tile is then rounded once, at the end, and the compiler adds the product where it makes it.
    """
    makers = producers(program)
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
            eqns.append(eqn.replace(outvars=[out], params=params))
            return out
        if name == "transpose" and (product := _exchanged(makers.get(eqn.invars[0]), eqn)) is not None:
            eqns.append(product.replace(outvars=[out]))
            return out
        if name not in _LINEAR:
            return None
        operands = [wide(atom) for atom in eqn.invars]
        if any(operand is None for operand in operands):
            return None
        eqns.append(eqn.replace(invars=operands, outvars=[out]))
        return out

    for i in positions:
        atom = outs[i]
        if (
            jnp.issubdtype(atom.aval.dtype, jnp.floating)
            and atom.aval.dtype.itemsize < 4
            and (new := wide(atom)) is not None
        ):
            outs[i] = new
    return dataclasses.replace(program, eqns=eqns, outvars=outs)


def _exchanged(product: Any, transpose: Any) -> Any | None:
    """A product whose operands change places, so that its result is transposed, in float32; None if that is not what is done.

    XLA:CPU cannot transpose a product of 16-bit floats in float32.
    """
    if product is None or product.primitive.name != "dot_general" or product.params.get("out_sharding") is not None:
        return None
    (left, right), batch = product.params["dimension_numbers"]
    first, rank = len(shape_of(product.invars[0])) - len(left), len(shape_of(product.outvars[0]))
    precision = product.params["precision"]
    if (
        any(batch)
        or isinstance(precision, tuple)
        or transpose.params["permutation"] != (*range(first, rank), *range(first))
    ):
        return None
    changes = {"dimension_numbers": ((right, left), batch), "preferred_element_type": jnp.dtype("float32")}
    return product.replace(invars=list(product.invars)[::-1], params=product.params | changes)
