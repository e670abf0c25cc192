"""What is said of microbatches that a step does not have."""

from __future__ import annotations

from memjax._core.compat import primitive_name
from memjax._core.positions.walk import Mixed


def no_microbatches(mixed: Mixed) -> str:
    """Why there are none, where, and what to change, in a sentence."""
    if mixed.eqn is None:
        return f"microbatches: {mixed}"
    name, where = primitive_name(mixed.eqn), mixed.where or "a place that is not known"
    if "not known" in mixed.what or "is not run" in mixed.what:
        return f"microbatches: `{name}` at {where} is not known to keep examples apart: write it by operations of jax.numpy"
    fix = "compute it for each example alone"
    if "batchnorm" in where.lower().replace("_", ""):
        fix = "a norm over groups or features keeps examples apart"
    return f"microbatches: the batch is mixed by `{name}` at {where}: {fix}"
