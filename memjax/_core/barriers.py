"""Barriers for the compiler's scheduler: what passes one of them is computed together."""

from __future__ import annotations

from typing import TypeVar

import jax
from jax import lax

from memjax._core.compat import varying
from memjax._core.lists import drop, merge, pick

Tree = TypeVar("Tree")


def barrier(values: Tree) -> Tree:
    """Applies `jax.lax.optimization_barrier` without changing the mesh axes that each leaf varies over.

    One common barrier would make every leaf vary over the union of all axes. So leaves with equal axes share one
    barrier, which also waits for the leaves whose axes are a proper subset of theirs.
    """
    leaves, tree = jax.tree.flatten(values)
    kinds = [varying(jax.typeof(leaf)) for leaf in leaves]
    out = leaves
    for kind in sorted(set(kinds), key=len):
        same = [other == kind for other in kinds]
        waited = [other < kind for other in kinds]
        passed = lax.optimization_barrier([*pick(leaves, same), *pick(leaves, waited)])
        out = merge(passed[: sum(same)], drop(out, same), same)
    return jax.tree.unflatten(tree, out)


def joint_barrier(values: Tree) -> Tree:
    """`jax.lax.optimization_barrier` as it is: each leaf waits for all, and varies then over every mesh axis that one does.

    For what has to wait for something that varies over more axes, and for states of loops, whose types stay the same then.
    """
    return lax.optimization_barrier(values)
