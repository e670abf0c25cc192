"""Finds values that follow from smaller integer arrays by cheap operations, as floats do from images of bytes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from memjax._core.program.jaxpr import Walk, nbytes
from memjax._core.program.primitives import AFFINE, COMPARISONS, MOVES
from memjax.compress._transform.keep.origins import UNCHANGED, Origins

# They scale bytes to floats, resize images, and turn classes into unit vectors. Random numbers take too long.
_CHEAP = AFFINE | UNCHANGED | COMPARISONS | MOVES | {"div", "square", "integer_pow", "dot_general", "reduce_sum"}


def integer_sources(var: Any, origins: Origins, kept_inputs: set[Any]) -> list[Any] | None:
    """The integers and kept vectors that `var` follows from cheaply, if they take less memory than it does.

    None if it needs other inputs, matrices among them: otherwise all layers of a network would be computed again.
    """
    walk, sources = Walk([var]), list[Any]()
    for source in walk:
        eqn = origins.producer.get(source)
        if eqn is None:
            is_vector = source in kept_inputs and source.aval.size == max(source.aval.shape, default=1)
            if not is_vector and not jnp.issubdtype(source.aval.dtype, jnp.integer):
                return None
            sources.append(source)
        elif eqn.primitive.name in _CHEAP and not eqn.effects:
            walk.add(eqn.invars)
        elif source not in origins.constants:
            return None
    # Without a codec masks are packed.
    kept = var.aval.size // 8 if var.aval.dtype == jnp.bool_ else nbytes(var.aval)
    return sources if sum(nbytes(source.aval) for source in sources) < kept else None
