"""Finds the masks of ReLUs that follow from their outputs: from codes that keep zeros, or as products read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from memjax._core.program.jaxpr import is_literal, variables
from memjax._core.program.primitives import PRODUCTS
from memjax.compress._transform.keep.origins import Origins


def masks_of_nonzero(masks: Iterable[Any], encoded: Iterable[Any], origins: Origins) -> dict[Any, Any]:
    """For each mask x > 0 the variable of `encoded` that is zero exactly where the mask is false, if there is one."""
    found = {rectified_by(var, origins): var for var in encoded}
    sources = {mask: _against_zero(mask, "gt", origins) for mask in masks}
    return {mask: found[x] for mask, x in sources.items() if x is not None and x in found}


def outputs_in_memory(masks: Iterable[Any], origins: Origins) -> dict[Any, Any]:
    """For each mask x > 0 max(x, 0), if a product reads that: then it is in memory anyway."""
    found = {}
    for mask in masks:
        if (x := _against_zero(mask, "gt", origins)) is None:
            continue
        for eqn in origins.consumers.get(x, []):
            [out] = eqn.outvars if len(eqn.outvars) == 1 else [None]
            if out is None or _against_zero(out, "max", origins) is not x:
                continue
            if any(reader.primitive.name in PRODUCTS for reader in origins.consumers.get(out, [])):
                found[mask] = out
    return found


def rectified_by(var: Any, origins: Origins) -> Any | None:
    """The x for which `var` has the signs of max(x, 0)."""
    if (eqn := origins.producer.get(var)) is None:
        return None
    name = eqn.primitive.name
    if name == "convert_element_type" and (eqn.invars[0].aval.dtype, var.aval.dtype) == (jnp.float32, jnp.bfloat16):
        var = eqn.invars[0]  # of the same range
    elif name == "mul":  # the square of a ReLU saves twice the ReLU
        literals = [atom.val for atom in eqn.invars if is_literal(atom)]
        var = variables(eqn.invars)[0] if literals and literals[0] >= 1 else var
    return _against_zero(var, "max", origins)


def _against_zero(var: Any, primitive: str, origins: Origins) -> Any | None:
    """The x for which `var` is `primitive` of x and 0."""
    eqn = origins.producer.get(var)
    if eqn is None or eqn.primitive.name != primitive or is_literal(eqn.invars[0]):
        return None
    zero = eqn.invars[1]
    if not is_literal(zero) and (zero := origins.repeated(zero)) is None:
        return None
    return eqn.invars[0] if is_literal(zero) and zero.val == 0 else None
