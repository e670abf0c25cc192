"""Finds the standard deviations that a batch norm divides an array by. They are units of its codec's bound, and where they are
computed its ranges can be measured, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from memjax._core.program.jaxpr import Walk, is_literal
from memjax._core.program.primitives import AFFINE
from memjax.compress._transform.keep.origins import UNCHANGED, Origins

_ROOTS = ("rsqrt", "sqrt")


class Scale(NamedTuple):
    """What a batch norm divides or multiplies channels by.

    Attributes:
      variable: has one entry for each channel.
      is_deviation: whether it is the standard deviation; otherwise it is its reciprocal.
    """

    variable: Any
    is_deviation: bool


def scale_of_norm(root: Any, origins: Origins) -> Scale | None:
    """The square root, or its reciprocal, that a batch norm multiplies or divides the channels of `root` by."""
    channels = root.aval.shape[-1] if root.aval.ndim else 0
    descendants, walk = {root}, Walk([root])
    for var in walk:
        for eqn in origins.consumers.get(var, []):
            out = eqn.outvars[0] if eqn.outvars else None
            if out is None:  # a debug callback
                continue
            if out not in descendants and (step := origins.parent(out)) is not None and step[0] in descendants:
                for small in step[1]:
                    if eqn.primitive.name == "mul" and (scale := _square_root(small, channels, origins)) is not None:
                        return scale
                descendants.add(out)
                walk.add([out])
            elif eqn.primitive.name == "div" and not any(map(is_literal, eqn.invars)) and eqn.invars[0] in descendants:
                scale = _square_root(eqn.invars[1], channels, origins)
                if scale is not None:
                    return Scale(scale.variable, not scale.is_deviation)
    return None


def _square_root(var: Any, channels: int, origins: Origins) -> Scale | None:
    """The square root with an entry for each channel that `var` is computed from."""
    walk = Walk([var])
    for ancestor in walk:
        eqn = origins.producer.get(ancestor)
        if eqn is None:
            continue
        name = eqn.primitive.name
        if name in _ROOTS and ancestor.aval.size == channels:
            return Scale(ancestor, name == "sqrt")
        if name in AFFINE | UNCHANGED | {*_ROOTS, "broadcast_in_dim"}:
            walk.add(eqn.invars)
    return None
