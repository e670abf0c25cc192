"""What a value is computed from: the array that it is a cheap function of, a norm's deviations, a ReLU, integers, parameters.

What `jax.vjp` saves is often a scaled, shifted, reshaped or cast copy of something else that it saves, too. The way back
goes through equations with one large operand; their small operands, a batch norm's mean for one, are kept beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from memjax._core.compat import bodies, scan_counts
from memjax._core.program.dataflow import Dataflow, Walk, is_literal, variables
from memjax._core.program.jaxpr import Program, nbytes
from memjax._core.program.primitives import AFFINE, CALLS_OF_ONE_BODY, COMPARISONS, MOVES, PRODUCTS, VIEWS
from memjax.compress._codecs.codec import DTYPES

UNCHANGED = VIEWS | {"stop_gradient"}
"""Primitives whose output is their operand, except for its shape and a rounding."""
MANY = 16
"""A small operand, or a statistic, has at most a 16th of the values of the array that it is combined with."""


class Origins:
    """Where the values of a program come from. `constants` are those that depend on no input."""

    def __init__(self, program: Program):
        self.producer, self.consumers = program.flow.makers, program.flow.consumers
        self.constants = program.flow.following((), _has_no_effects)

    def parent(self, var: Any, passed: Set[str] = AFFINE | UNCHANGED) -> tuple[Any, list[Any]] | None:
        """The array as large as `var` that it is a cheap function of, by one of `passed`, and the function's small operands."""
        eqn = self.producer.get(var)
        if eqn is None or eqn.primitive.name not in passed:
            return None
        operands = variables(eqn.invars)
        small = [atom for atom in operands if _is_small(atom, var) or self.repeated(atom) is not None]
        large = [atom for atom in operands if atom.aval.size == var.aval.size and atom not in small]
        if len(large) != 1 or len(large) + len(small) != len(operands):
            return None
        return large[0], small

    def repeated(self, var: Any) -> Any | None:
        """The small array, or the literal, that `var` repeats; None if it repeats nothing."""
        eqn = self.producer.get(var)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return None
        source = eqn.invars[0]
        return source if is_literal(source) or _is_small(source, var) else None

    def path(self, var: Any, *, exact: bool = False, to_input: bool = False) -> list[Any]:
        """From `var` back to where it comes from.

        Args:
          exact: pass only equations that change no value.
          to_input: also pass roundings, which cannot be undone, but can be repeated from an input.
        """
        path = [var]
        while (step := self.parent(path[-1])) is not None:
            source, last = step[0], path[-1]
            if exact and self.producer[last].primitive.name not in UNCHANGED:
                break
            is_narrower = source.aval.dtype in DTYPES and source.aval.dtype.itemsize <= last.aval.dtype.itemsize
            if not (is_narrower or to_input):
                break
            path.append(source)
        return path

    def small_operands(self, path: Sequence[Any]) -> list[Any]:
        """The small operands that are needed to compute the first variable of a path from the last."""
        steps = [self.parent(var) for var in path[:-1]]
        repeated = [(small, self.repeated(small)) for step in steps if step is not None for small in step[1]]
        return variables(small if source is None else source for small, source in repeated)

    def uses(self, vars: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Pairs of an equation and the one of `vars` that it reads. If none reads them, the equations that make them."""
        pairs = [(eqn, var) for var in dict.fromkeys(vars) for eqn in self.consumers.get(var, [])]
        return pairs or [(self.producer[var], var) for var in vars if var in self.producer]


def _has_no_effects(eqn: Any) -> bool:
    return not eqn.effects


def _is_small(operand: Any, var: Any) -> bool:
    return operand.aval.size * MANY <= var.aval.size


def back_from(
    wanted: Iterable[Any], producer: dict[Any, Any], passes: Callable[[Any, Any], bool]
) -> Iterator[tuple[Any, Any]]:
    """`wanted` and what they are computed from, each variable with the equation that makes it; with None where the way back ends,
    at an input, or where `passes(var, eqn)` is false.
    """
    walk = Walk(wanted)
    for var in walk:
        eqn = producer.get(var)
        if eqn is not None and passes(var, eqn):
            walk.add(eqn.invars)
            yield var, eqn
        else:
            yield var, None


def body_of(eqn: Any) -> Any:
    """The program inside a scan or a call, with an output for each of the equation's; None for other equations."""
    return bodies(eqn)[0] if eqn.primitive.name == "scan" or eqn.primitive.name in CALLS_OF_ONE_BODY else None


# Finds the standard deviations that a batch norm divides an array by. They are units of its codec's bound, and where
# they are computed its ranges can be measured, too.

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
    passed = AFFINE | UNCHANGED | {*_ROOTS, "broadcast_in_dim"}
    for ancestor, eqn in back_from([var], origins.producer, lambda _, eqn: eqn.primitive.name in passed):
        if eqn is not None and eqn.primitive.name in _ROOTS and ancestor.aval.size == channels:
            return Scale(ancestor, eqn.primitive.name == "sqrt")
    return None


# Finds the masks of ReLUs that follow from their outputs: from codes that keep zeros, or as products read them.


def masks_of_nonzero(masks: Iterable[Any], encoded: Iterable[Any], origins: Origins) -> dict[Any, Any]:
    """For each mask x > 0 the variable of `encoded` that is zero exactly where the mask is false, if there is one."""
    found = {rectified_by(var, origins): var for var in encoded}
    sources = {mask: _against_zero(mask, "gt", origins) for mask in masks}
    return {mask: found[x] for mask, x in sources.items() if x is not None and x in found}


def outputs_in_memory(masks: Iterable[Any], origins: Origins) -> dict[Any, Any]:
    """For each mask x > 0 max(x, 0), if a product reads that: then it is in memory anyway."""
    found = {}
    for mask in masks:
        if (x := _against_zero(mask, "gt", origins)) is None:
            continue
        for eqn in origins.consumers.get(x, []):
            [out] = eqn.outvars if len(eqn.outvars) == 1 else [None]
            if out is None or _against_zero(out, "max", origins) is not x:
                continue
            if any(reader.primitive.name in PRODUCTS for reader in origins.consumers.get(out, [])):
                found[mask] = out
    return found


def rectified_by(var: Any, origins: Origins) -> Any | None:
    """The x for which `var` has the signs of max(x, 0)."""
    if (eqn := origins.producer.get(var)) is None:
        return None
    name = eqn.primitive.name
    if name == "convert_element_type" and (eqn.invars[0].aval.dtype, var.aval.dtype) == (jnp.float32, jnp.bfloat16):
        var = eqn.invars[0]  # of the same range
    elif name == "mul":  # the square of a ReLU saves twice the ReLU
        literals = [atom.val for atom in eqn.invars if is_literal(atom)]
        var = variables(eqn.invars)[0] if literals and literals[0] >= 1 else var
    return _against_zero(var, "max", origins)


def _against_zero(var: Any, primitive: str, origins: Origins) -> Any | None:
    """The x for which `var` is `primitive` of x and 0."""
    eqn = origins.producer.get(var)
    if eqn is None or eqn.primitive.name != primitive or is_literal(eqn.invars[0]):
        return None
    zero = eqn.invars[1]
    if not is_literal(zero) and (zero := origins.repeated(zero)) is None:
        return None
    return eqn.invars[0] if is_literal(zero) and zero.val == 0 else None


# Finds values that follow from smaller integer arrays by cheap operations, as floats do from images of bytes.

# They scale bytes to floats, resize images, and turn classes into unit vectors. Random numbers take too long.
_CHEAP = AFFINE | UNCHANGED | COMPARISONS | MOVES | {"div", "square", "integer_pow", "dot_general", "reduce_sum"}


def integer_sources(var: Any, origins: Origins, kept_inputs: set[Any]) -> list[Any] | None:
    """The integers and kept vectors that `var` follows from cheaply, if they take less memory than it does.

    None if it needs other inputs, matrices among them: otherwise all layers of a network would be recomputed.
    """
    walk, sources = Walk([var]), list[Any]()
    for source in walk:
        eqn = origins.producer.get(source)
        if eqn is None:
            is_vector = source in kept_inputs and source.aval.size == max(source.aval.shape, default=1)
            if not is_vector and not jnp.issubdtype(source.aval.dtype, jnp.integer):
                return None
            sources.append(source)
        elif eqn.primitive.name in _CHEAP and not eqn.effects:
            walk.add(eqn.invars)
        elif source not in origins.constants:
            return None
    # Without a codec masks are packed.
    kept = var.aval.size // 8 if var.aval.dtype == jnp.bool_ else nbytes(var.aval)
    return sources if sum(nbytes(source.aval) for source in sources) < kept else None


# Finds values that follow from parameters alone. They stay exact: recomputed by moving and casting parameters, or kept.

# These change no value except by rounding: applied to parameters they give parameters.
_MOVED = UNCHANGED | MOVES | {"reduce_precision", "dynamic_update_slice", "sharding_constraint", "reshard"}
# How many operands have the values that are moved; the others say where to.
_DATA_OPERANDS = {"dynamic_slice": 1, "dynamic_update_slice": 2, "gather": 1}


class Inputs(NamedTuple):
    """What is known of each input of a program.

    Attributes:
      lasting: whether it lives until the backward pass anyway.
      parameters: whether it is a parameter.
    """

    lasting: Sequence[bool]
    parameters: Sequence[bool]


def inputs_of(lasting: Sequence[bool], types: Sequence[Any]) -> Inputs:
    """The inputs of a function. What lasts is parameters where it is floating point, and not all lasts: then it is not known."""
    known = not all(lasting)
    is_float = lambda aval: bool(jnp.issubdtype(aval.dtype, jnp.floating))
    return Inputs(lasting, [known and lasts and is_float(aval) for lasts, aval in zip(lasting, types, strict=True)])


class Parameters:
    """Which values of a program follow from `parameters`, which are among its `kept_inputs`, as constants are.

    `computed` are those that are computed from parameters and constants alone, such as normalised weights.
    """

    def __init__(self, program: Program, origins: Origins, kept_inputs: set[Any], parameters: set[Any]):
        self._origins, self._kept_inputs, self._parameters = origins, kept_inputs, parameters
        self.computed = program.flow.following(parameters, _has_no_effects) - parameters - origins.constants

    def sources(self, var: Any) -> list[Any] | None:
        """What `var` follows from by slicing, reshaping, transposing and casting: parameters, values computed from parameters
        alone, and the small arrays that say which parts. None if it depends on anything else.
        """
        walk, sources = Walk([var]), list[Any]()
        for source in walk:
            eqn = self._origins.producer.get(source)
            if source in self._kept_inputs:
                sources.append(source)
            elif eqn is None:
                return None
            elif _is_moved(eqn):
                data, places = _data_and_places(eqn)
                sources += [atom for atom in variables(places) if atom not in self._origins.constants]
                walk.add(data)
            elif source in self.computed or self._is_moved_in_body(eqn, eqn.outvars.index(source)):
                sources.append(source)
            elif source not in self._origins.constants:
                return None
        computed = sum(nbytes(source.aval) for source in sources if source not in self._kept_inputs)
        return sources if computed <= nbytes(var.aval) else [var]

    def is_parameter(self, var: Any) -> bool:
        """Whether `var` is a parameter, or computed from parameters and constants alone."""
        return var in self._parameters or var in self.computed

    def _is_moved_in_body(self, eqn: Any, index: int) -> bool:
        """Whether a loop or a call only moves values of kept inputs to this output, as a scan over layers does to its weights."""
        operands = _moved_to_output(eqn, index)
        return operands is not None and all(is_literal(atom) or self.sources(atom) is not None for atom in operands)


def _is_moved(eqn: Any) -> bool:
    return eqn.primitive.name in _MOVED and not eqn.effects


def _data_and_places(eqn: Any) -> tuple[list[Any], list[Any]]:
    """The operands whose values an equation moves, and those that say where to."""
    count = _DATA_OPERANDS.get(eqn.primitive.name, len(eqn.invars))
    return eqn.invars[:count], eqn.invars[count:]


def _moved_to_output(eqn: Any, index: int) -> list[Any] | None:
    """The operands whose values a loop's or call's body only moves to its output `index`; None if it does anything else."""
    body, changing = body_of(eqn), set[Any]()
    if body is None:
        return None
    if eqn.primitive.name == "scan":
        constants, carried = scan_counts(eqn)
        if index < carried:
            return None
        changing = set(body.invars[constants : constants + carried])
    producer, operand = Dataflow(body.eqns).makers, dict(zip(body.invars, eqn.invars, strict=True))
    walk, operands = Walk([body.outvars[index]]), list[Any]()
    for source in walk:
        if source in changing:
            return None
        if source in operand:
            operands.append(operand[source])
        elif source in producer:  # else it is a constant
            inner = producer[source]
            deeper = _data_and_places(inner)[0] if _is_moved(inner) else None
            if deeper is None and (deeper := _moved_to_output(inner, inner.outvars.index(source))) is None:
                return None
            walk.add(deeper)
    return operands or None


# Marks what an iteration keeps, so that the program around the loop leaves the stacks as they are.
_NAME = "memjax, kept by an iteration of a loop"


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
            var, producer = body.outvars[eqn.outvars.index(var)], Dataflow(body.eqns).makers
        else:
            return False
        if is_literal(var):
            return False
    return False
