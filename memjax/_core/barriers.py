"""Barriers for the compiler's scheduler: what passes one of them is computed together."""

from __future__ import annotations

import jax
from jax import lax

from memjax._core.compat import varying
from memjax._core.lists import Arrays, drop, merge, pick


def barrier(leaves: Arrays) -> Arrays:
    """`jax.lax.optimization_barrier`, which would make all leaves vary over every mesh axis that one of them varies over.

    Those that vary over fewer are waited for, and pass a barrier of their own.
    """
    kinds = [varying(jax.typeof(leaf)) for leaf in leaves]
    out = list(leaves)
    for kind in sorted(set(kinds), key=len):
        same = [other == kind for other in kinds]
        waited = [other < kind for other in kinds]
        passed = lax.optimization_barrier([*pick(leaves, same), *pick(leaves, waited)])
        out = merge(passed[: sum(same)], drop(out, same), same)
    return out
