"""What wrappers of optax's gradient transformations share."""

from collections.abc import Callable
from typing import Any

import optax

from memjax._core import check


def check_transformation(name: str, tx: Any) -> None:
    if not isinstance(tx, optax.GradientTransformation):
        fix = (
            "call its gradient_transformation()" if hasattr(tx, "gradient_transformation") else "pass optax.adamw(1e-4)"
        )
        raise check.fail(TypeError, name, "a gradient transformation", tx, fix)


def like(
    tx: optax.GradientTransformation, init: Callable[..., Any], update: Callable[..., Any]
) -> optax.GradientTransformation:
    """A transformation of `tx`'s kind, with extra arguments or without."""
    if isinstance(tx, optax.GradientTransformationExtraArgs):
        return optax.GradientTransformationExtraArgs(init, update)
    return optax.GradientTransformation(init, lambda updates, state, params=None: update(updates, state, params))
