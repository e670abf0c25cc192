"""Logits: what a log-softmax over a product with the vocabulary's matrix makes, and what a loss without them keeps.

Not any large result between small ones, as plans look for: `linear_cross_entropy` takes the place of a log-softmax alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from memjax._core.compat import primitive_name
from memjax._core.program.primitives import ELEMENTWISE, SOURCES
from memjax._explain.kept import Group, Kept, Pass
from memjax._explain.parts import Remedy
from memjax._linear_cross_entropy import linear_cross_entropy
from memjax._program import gradient, traced
from memjax._residuals import Equation, Value

_DEPTH = 4
_HOW = "memjax.linear_cross_entropy(hidden, head, labels) in place of the logits and their loss"


@dataclass(frozen=True)
class Logits:
    """A log-softmax of a product.

    Attributes:
      shape: of the logits.
      copies: the logits, and what follows from them element by element.
      saves: bytes that `linear_cross_entropy` does not keep.
    """

    shape: tuple[int, ...]
    copies: frozenset[Value]
    saves: int

    def holds(self, array: Kept) -> bool:
        """Whether the array is one of the copies of the logits."""
        return array.value in self.copies


def logits_in(arrays: Sequence[Kept]) -> list[Logits]:
    """The logits in the forward passes that make these arrays, if `linear_cross_entropy` would keep fewer bytes."""
    found = []
    for forward in {id(array.forward): array.forward for array in arrays}.values():
        for equation in forward.program:
            if primitive_name(equation.eqn) != "log":
                continue
            total = _maker(forward, equation.inputs[0], "reduce_sum")
            exponential = None if total is None else _maker(forward, total.inputs[0], "exp")
            product = None if exponential is None else _product(forward, exponential)
            instead = None if product is None else _instead(forward, product)
            if product is None or instead is None:
                continue
            copies = _copies(forward, product)
            kept = sum(value.nbytes for value in copies.intersection(forward.kept))
            if kept > instead:
                shape = tuple(product.eqn.outvars[0].aval.shape)
                found.append(Logits(shape, copies, forward.iterations * (kept - instead)))
    return found


def _copies(forward: Pass, product: Equation) -> frozenset[Value]:
    """What the product makes, and what follows from it element by element."""
    found = {value for value in product.outputs if isinstance(value, Value)}
    elements = product.eqn.outvars[0].aval.size
    for equation in forward.program:
        follows = primitive_name(equation.eqn) in ELEMENTWISE and any(read in found for read in equation.inputs)
        if follows and equation.eqn.outvars[0].aval.size == elements:
            found.update(value for value in equation.outputs if isinstance(value, Value))
    return frozenset(found)


def fused_loss(group: Group, logits: Sequence[Logits]) -> list[Remedy]:
    """The remedy for a row of logits."""
    for one in logits:
        if one.holds(group.arrays[0]):
            return [Remedy("fused loss", one.saves, 0.0, 0.0, True, _HOW)]
    return []


def _instead(forward: Pass, product: Equation) -> int | None:
    """Bytes that the loss keeps beyond what is kept beside the logits."""
    x, w = (atom.aval for atom in product.eqn.invars)
    (contracted, _), _ = product.eqn.params["dimension_numbers"]
    if tuple(contracted) != (x.ndim - 1,) or w.ndim != 2:
        return None
    vocabulary = product.eqn.outvars[0].aval.shape[-1]
    tokens, features = x.size // x.shape[-1], x.shape[-1]
    types = [jax.ShapeDtypeStruct((tokens, features), x.dtype), jax.ShapeDtypeStruct((vocabulary, features), w.dtype)]
    labels = jnp.zeros(tokens, jnp.int32)
    found = gradient(traced("explain", lambda x, w: linear_cross_entropy(x, w, labels), tuple(types), {}))
    if isinstance(found, str):
        return None
    hidden = product.inputs[0]
    readers = forward.kept.get(hidden, []) if isinstance(hidden, Value) else []
    alone = readers and all(primitive_name(reader[-1]) == "dot_general" for reader in readers)
    return found.residuals.device.nbytes - (hidden.nbytes if alone else 0)


def _maker(forward: Pass, value: Any, name: str) -> Equation | None:
    """The equation of that name behind elementwise operations; `keepdims` is a broadcast."""
    for _ in range(_DEPTH):
        equation = forward.makers.get(value) if isinstance(value, Value) else None
        if equation is None or primitive_name(equation.eqn) == name:
            return equation
        if primitive_name(equation.eqn) not in ELEMENTWISE | SOURCES:
            return None
        value = equation.inputs[0]
    return None


def _product(forward: Pass, equation: Equation) -> Equation | None:
    """The product behind elementwise operations."""
    shape = equation.eqn.outvars[0].aval.shape
    pending, seen = list(equation.inputs), set()
    while pending:
        value = pending.pop()
        before = forward.makers.get(value) if isinstance(value, Value) else None
        if before is None or value in seen or value.aval.shape != shape:
            continue
        seen.add(value)
        if primitive_name(before.eqn) == "dot_general":
            return before
        if primitive_name(before.eqn) in ELEMENTWISE:
            pending += before.inputs
    return None
