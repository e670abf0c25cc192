"""How exactly the backward pass needs each residual, inferred from what its equations do with it.

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
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from memjax._core.compat import bodies, scan_counts
from memjax._core.program.dataflow import Dataflow, Walk, is_literal, variables
from memjax._core.program.primitives import (
    AFFINE,
    ALIASES,
    CALLBACKS,
    CALLS_OF_ONE_BODY,
    COMPARISONS,
    CUSTOM_CALLS,
    DECOMPOSITIONS,
    EXPONENTIALS,
    KERNELS,
    POLES,
    PRODUCTS,
    REDUCTIONS,
    SMOOTH,
    VIEWS,
    expensive,
    is_attention,
)
from memjax.compress._transform.keep.origins import MANY, Origins, body_of


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
_Mark = Callable[[Iterable[Any], Need], None]
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


def _follow(eqns: Sequence[Any], env: dict[Any, _Value], mark: _Mark) -> None:
    """Complete `env` by the results of equations, and mark the residuals that they need."""
    for eqn in eqns:
        inputs = [_NOTHING if is_literal(atom) else env.get(atom, _NOTHING) for atom in eqn.invars]
        env.update(zip(eqn.outvars, _outputs(eqn, inputs, mark), strict=True))


def _outputs(eqn: Any, inputs: list[_Value], mark: _Mark) -> list[_Value]:
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
    if is_attention(name):  # cuDNN's: query, key, value, others; last the log-sum-exp, the output and its cotangent
        _mark_early(inputs, mark, fine=(2, len(inputs) - 2))
    elif name in _OPAQUE or bodies(eqn):
        _mark_early(inputs, mark)
    else:
        for place in _operands_with_poles(eqn):
            if inputs[place].pointwise:
                mark(inputs[place].sources, Need.EXACT)
        if name in EXPONENTIALS and not inputs[0].late and len(inputs[0].sources) > 1:
            mark(inputs[0].sources, Need.EXACT)
        if name == "sub" and all(value.late for value in inputs):
            one, other = inputs[0].sources - inputs[1].sources, inputs[1].sources - inputs[0].sources
            if one and other:
                mark(one | other, Need.FINE)
    together = _union(inputs)
    if together.late or (name in REDUCTIONS and eqn.invars[0].aval.size >= MANY * eqn.outvars[0].aval.size):
        together = together._replace(pointwise=frozenset())
    return [together] * len(eqn.outvars)


def _of_body(body: Any, inputs: Sequence[_Value], mark: _Mark) -> list[_Value]:
    if len(body.invars) != len(inputs):
        _mark_early(inputs, mark)
        return [_union(inputs)] * len(body.outvars)
    env = dict(zip(body.invars, inputs, strict=True))
    _follow(body.eqns, env, mark)
    return [_NOTHING if is_literal(atom) else env.get(atom, _NOTHING) for atom in body.outvars]


def _of_scan(eqn: Any, inputs: list[_Value], mark: _Mark) -> list[_Value]:
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


def _mark_early(inputs: Sequence[_Value], mark: _Mark, fine: Sequence[int] = ()) -> None:
    """What does not depend on a cotangent has to be exact, or in the places `fine` fine."""
    for place, value in enumerate(inputs):
        if not value.late:
            mark(value.sources, Need.FINE if place in fine else Need.EXACT)


def _union(values: Iterable[_Value]) -> _Value:
    return functools.reduce(operator.or_, values, _NOTHING)


# Which operations may be applied to rounded values: their result is then off by about as much as their operands are.

_RECTIFIERS = frozenset(("max", "min"))
_OF_ONE_ARRAY = AFFINE | VIEWS | _RECTIFIERS


def is_smooth(eqn: Any, origins: Origins) -> bool:
    """Whether the equation does not amplify rounding errors: its result is off by about as much as its operands are."""
    name = eqn.primitive.name
    if eqn.effects:
        return False
    if name == "integer_pow":
        return 1 <= eqn.params["y"] <= 3
    if name == "div":
        divisor = eqn.invars[1]
        return is_literal(divisor) or divisor.aval.size * MANY <= eqn.outvars[0].aval.size
    if name == "exp":  # the derivative of the normal distribution's integral has one
        return _is_at_most_zero(eqn.invars[0], origins.producer)
    if is_rectifier(eqn):
        return _is_of_one_array(eqn.outvars[0], origins)
    return name in SMOOTH or name == "dot_general"


def is_rectifier(eqn: Any) -> bool:
    """Whether it is a ReLU or the like, or any other maximum or minimum of two values."""
    return eqn.primitive.name in _RECTIFIERS


def _is_of_one_array(var: Any, origins: Origins) -> bool:
    """Whether `var` is a norm, a ReLU or the like of one array, so that its value follows from that one alone.

    The ReLU of a sum of blocks would follow from all earlier ones, which would be recomputed at the same time.
    """
    while (eqn := origins.producer.get(var)) is not None and eqn.primitive.name in _OF_ONE_ARRAY:
        if (step := origins.parent(var, _OF_ONE_ARRAY)) is None:
            return False
        var = step[0]
    return True


def _operands_with_poles(eqn: Any) -> list[int]:
    """The operands near some value of which (zero, mostly) the result, or its derivative, has no bound."""
    name = eqn.primitive.name
    if name == "div":
        return [1]
    if name == "integer_pow":
        return [0] if eqn.params["y"] < 0 else []
    return list(range(len(eqn.invars))) if name in POLES else []


def _is_at_most_zero(atom: Any, producer: dict[Any, Any]) -> bool:
    """Whether `atom` is minus a square or minus an absolute value, or a positive multiple of that."""
    negative = False
    while not is_literal(atom) and (eqn := producer.get(atom)) is not None:
        name, first = eqn.primitive.name, eqn.invars[0]
        factor = next((other.val for other in eqn.invars if is_literal(other)), None)
        is_square = name == "mul" and len(eqn.invars) == 2 and first is eqn.invars[1]
        is_square |= name == "integer_pow" and eqn.params["y"] == 2
        if is_square or name in ("abs", "square"):
            return negative
        if name == "neg":
            negative = not negative
        elif name == "mul" and factor is not None:
            negative ^= bool(factor < 0)
            first = next(other for other in eqn.invars if not is_literal(other))
        elif name not in VIEWS:
            return False
        atom = first
    return False


# Statistics: sums of a softmax, deviations of a norm, one for many values.
#
# They are kept as they are, but for those of norms over features, such as layer norm, where the norm's input is there
# in the backward pass: these are recomputed from it. A statistic that is kept leaves the kernel that computes it
# and normalises, and a compiler then makes two or three kernels of it, each of which reads the array.

# What may be done to statistics, but not to single values, whose errors it might multiply.
_OF_STATISTICS = COMPARISONS | {"sqrt", "rsqrt", "integer_pow", "div"}


def is_statistic(var: Any, producer: dict[Any, Any]) -> bool:
    """Whether `var` is a statistic: a reduction of an array at least `MANY` times as large.

    Operations that keep its size may follow. Examples are a softmax's denominator and a norm's variance. An error in
    one statistic affects all the values normalized with it, at least `MANY` of them.
    """
    walk = Walk([var])
    for current in walk:
        eqn = producer.get(current)
        if eqn is None or eqn.primitive.name in PRODUCTS:
            continue
        operands = variables(eqn.invars)
        many = MANY * max(current.aval.size, 1)
        if eqn.primitive.name.startswith(("reduce_", "arg")) and any(atom.aval.size >= many for atom in operands):
            return True
        if (body := body_of(eqn)) is not None:
            inner = body.outvars[eqn.outvars.index(current)]
            if not is_literal(inner) and is_statistic(inner, Dataflow(body.eqns).makers):
                return True
        elif any(out.aval.size >= many for out in eqn.outvars):  # a kernel that gives a log-sum-exp beside its result
            return True
        elif all(atom.aval.size <= current.aval.size for atom in operands):
            walk.add(atom for atom in operands if atom.aval.size == current.aval.size)
    return False


def follows_from_rows(var: Any, given: set[Any], origins: Origins) -> bool:
    """Whether a statistic is one of a norm's rows: computed from variables in `given` by sums over the last axes,
    roots and operations that multiply no error.

    A sum of squares of rounded values is off by the square of their relative error, or by less where errors are independent:
    so a root of it may be taken.
    """
    producer, walk, sums = origins.producer, Walk([var]), 0
    for current in walk:
        eqn = producer.get(current)
        if current in given:
            continue
        if eqn is None or expensive(eqn):
            return False
        if eqn.primitive.name == "reduce_sum":
            axes, ndim = eqn.params["axes"], eqn.invars[0].aval.ndim
            if sorted(axes) != list(range(ndim - len(axes), ndim)):
                return False
            sums += 1
        elif not (
            is_smooth(eqn, origins) or (eqn.primitive.name in _OF_STATISTICS and is_statistic(current, producer))
        ):
            return False
        walk.add(eqn.invars)
    return sums > 0
