"""The program inside a loop or a call."""

from __future__ import annotations

from typing import Any

from jax.extend.core import jaxprs_in_params

from memjax._core.program.primitives import CALLS_OF_ONE_BODY


def body_of(eqn: Any) -> Any:
    """The program inside a scan or a call, with an output for each of the equation's; None for other equations."""
    if eqn.primitive.name != "scan" and eqn.primitive.name not in CALLS_OF_ONE_BODY:
        return None
    closed = next(iter(jaxprs_in_params(eqn.params)))
    return getattr(closed, "jaxpr", closed)
