"""Marks what the turns of a compressed loop keep, so that the program around the loop leaves the stacks as they are."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from memjax._core.program.jaxpr import is_literal, producers
from memjax.compress._transform.keep.bodies import body_of

_NAME = "memjax, kept by a turn of a loop"


def kept_by_loop(kept: Any) -> Any:
    """The arrays of a pytree, marked."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, _NAME), kept)


def is_kept_by_loop(var: Any, producer: dict[Any, Any]) -> bool:
    """Whether `var` has such a mark: it is made, or stacked, of what has one."""
    while (eqn := producer.get(var)) is not None:
        if eqn.primitive.name == "name":
            if eqn.params["name"] == _NAME:
                return True
            [var] = eqn.invars  # another name for it
        elif (body := body_of(eqn)) is not None:
            var, producer = body.outvars[eqn.outvars.index(var)], producers(body)
        else:
            return False
        if is_literal(var):
            return False
    return False
