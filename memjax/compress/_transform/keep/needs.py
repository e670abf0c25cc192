"""How exactly the backward pass needs each residual, told from what its equations do with it.

    EXACT   It meets another residual inside an exponential, as queries, keys and a log-sum-exp do, or is divided by, or has its
            logarithm or root taken, or a kernel or a loop reads it of which nothing is known. Rounded independently of the
            others it could be off by any factor.
    FINE    It is multiplied with a cotangent, and so is another residual, and one product is subtracted from the other, as
            those of attention's values and its output are. Where attention is sharp little remains of either.
    COARSE  Everything else. It is multiplied with a cotangent, in a product or elementwise, or a function with a bounded
            derivative is taken of it.

An exponential of one residual alone, recomputed in a checkpoint for example, is the derivative at the decoded point: consistent,
and therefore coarse.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from memjax._core.compat import bodies, scan_counts
from memjax._core.program.dataflow import is_literal
from memjax._core.program.primitives import (
    ALIASES,
    CALLBACKS,
    CALLS_OF_ONE_BODY,
    CUSTOM_CALLS,
    DECOMPOSITIONS,
    EXPONENTIALS,
    KERNELS,
    is_attention,
)
from memjax.compress._transform.keep.smooth import is_reduction, operands_with_poles


class Need(enum.IntEnum):
    """How exactly a residual is needed."""

    COARSE = 0
    FINE = 1
    EXACT = 2


class _Value(NamedTuple):
    """What a value of the backward pass depends on.

    Attributes:
      sources: the residuals; those of a cotangent are the ones that it was multiplied with.
      pointwise: those of them on which it does not depend through sums alone.
      late: whether it depends on a cotangent.
    """

    sources: frozenset[Any] = frozenset()
    pointwise: frozenset[Any] = frozenset()
    late: bool = False

    def __or__(self, other: _Value) -> _Value:
        return _Value(self.sources | other.sources, self.pointwise | other.pointwise, self.late or other.late)


_NOTHING = _Value()
_OPAQUE = KERNELS | CALLBACKS | DECOMPOSITIONS | {"while"}


def needs(pullback: Any, residuals: Iterable[Any], cotangents: Iterable[Any]) -> dict[Any, Need]:
    """The need of each of `residuals`, which are inputs of the program `pullback`, as `cotangents` are."""
    found = dict.fromkeys(residuals, Need.COARSE)

    def mark(sources: Iterable[Any], need: Need) -> None:
        for source in sources:
            found[source] = max(found[source], need)

    env = {var: _Value(frozenset((var,)), frozenset((var,))) for var in found}
    env |= {var: _Value(late=True) for var in cotangents}
    _follow(pullback.eqns, env, mark)
    return found


def _follow(eqns: Sequence[Any], env: dict[Any, _Value], mark: Callable[[Iterable[Any], Need], None]) -> None:
    """Complete `env` by the results of equations, and mark the residuals that they need."""
    for eqn in eqns:
        inputs = [_NOTHING if is_literal(atom) else env.get(atom, _NOTHING) for atom in eqn.invars]
        env.update(zip(eqn.outvars, _outputs(eqn, inputs, mark), strict=True))


def _outputs(eqn: Any, inputs: list[_Value], mark: Callable[[Iterable[Any], Need], None]) -> list[_Value]:
    name = eqn.primitive.name
    if not any(value.sources or value.late for value in inputs):
        return [_NOTHING] * len(eqn.outvars)
    if name == "scan":
        return _of_scan(eqn, inputs, mark)
    if name == "cond":
        branches = [_of_body(body, inputs[1:], mark) for body in bodies(eqn)]
        return [_union(outs) for outs in zip(*branches, strict=True)]
    if (name in CALLS_OF_ONE_BODY or name in CUSTOM_CALLS) and len(bodies(eqn)) == 1:
        return _of_body(bodies(eqn)[0], inputs, mark)
    if name in ALIASES and len(inputs) == len(eqn.outvars):
        return inputs
    if is_attention(name):
        _mark_attention(inputs, mark)
    elif name in _OPAQUE or bodies(eqn):
        _mark_exact(inputs, mark)
    else:
        for place in operands_with_poles(eqn):
            if inputs[place].pointwise:
                mark(inputs[place].sources, Need.EXACT)
        if name in EXPONENTIALS and not inputs[0].late and len(inputs[0].sources) > 1:
            mark(inputs[0].sources, Need.EXACT)
        if name == "sub" and all(value.late for value in inputs):
            one, other = inputs[0].sources - inputs[1].sources, inputs[1].sources - inputs[0].sources
            if one and other:
                mark(one | other, Need.FINE)
    together = _union(inputs)
    if together.late or is_reduction(eqn):
        together = together._replace(pointwise=frozenset())
    return [together] * len(eqn.outvars)


def _of_body(body: Any, inputs: Sequence[_Value], mark: Callable[[Iterable[Any], Need], None]) -> list[_Value]:
    if len(body.invars) != len(inputs):
        _mark_exact(inputs, mark)
        return [_union(inputs)] * len(body.outvars)
    env = dict(zip(body.invars, inputs, strict=True))
    _follow(body.eqns, env, mark)
    return [_NOTHING if is_literal(atom) else env.get(atom, _NOTHING) for atom in body.outvars]


def _of_scan(eqn: Any, inputs: list[_Value], mark: Callable[[Iterable[Any], Need], None]) -> list[_Value]:
    """What is carried depends on what it depended on in any iteration."""
    constants, carried = scan_counts(eqn)
    [body] = bodies(eqn)
    while True:
        outs = _of_body(body, inputs, mark)
        places = range(constants, constants + carried)
        after = [inputs[place] | out for place, out in zip(places, outs[:carried], strict=True)]
        if after == inputs[constants : constants + carried]:
            return outs
        inputs = [*inputs[:constants], *after, *inputs[constants + carried :]]


def _mark_attention(inputs: list[_Value], mark: Callable[[Iterable[Any], Need], None]) -> None:
    """cuDNN's operands: query, key, value, others; last the log-sum-exp, the output and its cotangent."""
    fine = {2, len(inputs) - 2}
    for place, value in enumerate(inputs):
        if not value.late:
            mark(value.sources, Need.FINE if place in fine else Need.EXACT)


def _mark_exact(inputs: Sequence[_Value], mark: Callable[[Iterable[Any], Need], None]) -> None:
    for value in inputs:
        if not value.late:
            mark(value.sources, Need.EXACT)


def _union(values: Iterable[_Value]) -> _Value:
    together = _NOTHING
    for value in values:
        together = together | value
    return together
