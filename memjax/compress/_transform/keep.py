"""What to do with each value that the backward pass wants: keep it, encode it, or compute it again from others.

What `jax.vjp` saves is redundant. A batch norm saves its input twice, less its mean and times two; a ReLU a mask besides
its output, and zeros; a matrix product an input that is there anyway, cast. So large residuals are traced back, through
operations that move no value far and that are cheap to repeat, to where they come from:

    an input that is kept       computed again from it
    parameters                  computed again, if only moved or cast; kept, if computed of parameters otherwise: never encoded
    smaller integers            computed again from them, if that is cheap: they are data, as images are, which is there anyway
    constants                   computed again
    a mask x > 0                from max(x, 0) if that is encoded by a codec that keeps zeros, or else bit by bit
    floats                      residuals that come from one array are computed again from it, and that is encoded
    statistics                  kept as they are: the sums of a softmax, the deviations of a norm, one for many values
    other dtypes, small arrays  kept as they are
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from memjax._core.compat import scope
from memjax._core.jaxpr import is_literal, nbytes
from memjax._core.primitives import AFFINE, CALLS_OF_ONE_BODY, COMPARISONS, MOVES, PRODUCTS, VIEWS

SMALL = 4096
"""Arrays of fewer values are kept as they are, masks too: less than one tile of a code."""

_SAME = VIEWS | {"stop_gradient"}
# What changes no value but by rounding: of parameters, parameters again.
_MOVED = _SAME | MOVES | {"reduce_precision", "dynamic_update_slice", "sharding_constraint", "reshard"}
# Of these operands values are moved; the others say where to.
_DATA_OPERANDS = {"dynamic_slice": 1, "dynamic_update_slice": 2, "gather": 1}
# What is made of integers with these alone is computed again: bytes scaled to floats, resized, classes as unit vectors. Not
# random numbers, which take long.
_OF_INTEGERS = AFFINE | _SAME | COMPARISONS | MOVES | {"div", "square", "integer_pow", "dot_general", "reduce_sum"}
_MANY = 16  # times as many values as a statistic has
_ENCODED = (jnp.bfloat16, jnp.float16, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Which:
    """What to encode.

    Attributes:
      where: see `compressed`.
      smallest: number of values of an array below which it is left alone.
    """

    where: Any = None
    smallest: int = SMALL

    def matches(self, readers: Sequence[Any], aval: Any) -> bool:
        """`where`, for pairs of an equation and the variable that it reads, and the type of what they read."""
        if self.where is None:
            return True
        if self.where == "conv":
            return any(eqn.primitive.name == "conv_general_dilated" and eqn.invars[0] is var for eqn, var in readers)
        if callable(self.where):
            return any(self.where(scope(eqn), aval) for eqn, _ in readers)
        return any(matches(scope(eqn), self.where) for eqn, _ in readers)


@dataclasses.dataclass(frozen=True)
class Keep:
    """Variables of a jaxpr, by what is kept of them.

    Attributes:
      whole: as they are.
      encoded: through the codec.
      scales: by variable in `encoded`, the inverse standard deviations of its channels, if a batch norm reads it.
      masks: as bits.
      nonzero: masks of what is not zero in a variable in `encoded`.
      origins: by residual that is, or is computed again from, a variable in `encoded`, that variable.
      matched: whether anything, small or large, was what the user selected.
      refused: what would have been encoded if its code were not larger.
    """

    whole: list[Any]
    encoded: list[Any]
    scales: dict[Any, tuple[Any, bool]]
    masks: list[Any]
    nonzero: dict[Any, Any]
    origins: dict[Any, Any]
    matched: bool
    refused: list[Any]


def choose(
    jaxpr: Any,
    residuals: Sequence[Any],
    kept_inputs: Sequence[Any],
    which: Which,
    zeros: bool,
    code_nbytes: Callable[[Any], int] | None,
) -> Keep:
    """What to keep, so that every one of `residuals` follows from it.

    Args:
      jaxpr: of the forward pass, calls in place.
      residuals: variables of it.
      kept_inputs: inputs that live until the backward pass, whatever is done here.
      which: of the arrays to encode.
      zeros: whether decoded values are zero exactly where what was encoded is.
      code_nbytes: bytes of the code of an array of this type; None: arrays are encoded even if codes are larger.
    """
    trace = _Trace(jaxpr, kept_inputs)
    whole: dict[Any, None] = {}
    masks: dict[Any, None] = {}
    floats: dict[Any, list[Any]] = {}  # residuals by where they come from
    matched = False
    for var in dict.fromkeys(residuals):
        if is_literal(var):
            continue
        matched |= which.matches(trace.readers(trace.path(var)), var.aval)
        if var.aval.size < SMALL:
            whole[var] = None
        elif not trace.rebuilt(var, whole):
            if var.aval.dtype in _ENCODED:
                floats.setdefault(trace.path(var)[-1], []).append(var)
            elif var.aval.dtype == jnp.bool_:
                masks[var] = None
            else:
                whole[var] = None
    encoded: dict[Any, None] = {}
    refused: list[Any] = []
    scales = {}
    origins: dict[Any, Any] = {}
    for origin, members in floats.items():
        # A single residual is encoded itself, so that the bound is its own; several through where they come from.
        path = trace.path(members[0], exact=len(members) == 1)
        root = path[-1] if len(members) == 1 else origin
        everyone = [var for member in members for var in trace.path(member)]
        wanted = root.aval.size >= which.smallest and which.matches(trace.readers(everyone), root.aval)
        wanted = wanted and not is_statistic(root, trace.producer)
        if wanted and code_nbytes is not None and code_nbytes(root.aval) > nbytes(root.aval):
            wanted = False
            refused.append(root)
        if wanted:
            encoded[root] = None
            origins |= dict.fromkeys(members, root)
            if (scale := trace.inverse_deviation(root)) is not None:
                scales[root] = scale
        elif nbytes(root.aval) < sum(nbytes(var.aval) for var in members):
            whole[root] = None
        else:
            whole.update(dict.fromkeys(members))
            continue
        for member in members:
            trace.rebuild_from(member, root, whole)
    nonzero = {}
    if zeros:
        rectified = {trace.rectifies(var): var for var in encoded}
        for mask in masks:
            if (source := trace.positive(mask)) is not None and source in rectified:
                nonzero[mask] = rectified[source]
    masks = {mask: None for mask in masks if mask not in nonzero}
    return Keep(list(whole), list(encoded), scales, list(masks), nonzero, origins, matched, refused)


class _Trace:
    """Where the values of a jaxpr come from."""

    def __init__(self, jaxpr: Any, kept_inputs: Sequence[Any]):
        self.producer = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
        self.kept_inputs = {*kept_inputs, *jaxpr.constvars}
        self._parameters = self._computed_of_parameters(jaxpr)
        self._readers: dict[Any, list[Any]] = {}
        for eqn in jaxpr.eqns:
            for atom in eqn.invars:
                if not is_literal(atom):
                    self._readers.setdefault(atom, []).append(eqn)

    def readers(self, variables: Sequence[Any]) -> list[Any]:
        """Pairs of an equation and one of the variables that it reads; what nothing reads counts where it is made."""
        pairs = [(eqn, var) for var in dict.fromkeys(variables) for eqn in self._readers.get(var, [])]
        return pairs or [(self.producer[var], var) for var in variables if var in self.producer]

    def parent(self, var: Any) -> tuple[Any, list[Any]] | None:
        """The array as large that `var` is a cheap function of, and the small ones besides."""
        eqn = self.producer.get(var)
        if eqn is None or eqn.primitive.name not in AFFINE | _SAME:
            return None
        operands = [atom for atom in eqn.invars if not is_literal(atom)]
        large = [atom for atom in operands if atom.aval.size == var.aval.size]
        small = [atom for atom in operands if atom.aval.size * 16 <= var.aval.size]
        for atom in list(large):
            if self.broadcast(atom) is not None:
                large.remove(atom)
                small.append(atom)
        if len(large) != 1 or len(large) + len(small) != len(operands):
            return None
        return large[0], small

    def broadcast(self, var: Any) -> Any | None:
        """The small array that `var` repeats, or a literal."""
        eqn = self.producer.get(var)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return None
        source = eqn.invars[0]
        return source if is_literal(source) or source.aval.size * 16 <= var.aval.size else None

    def path(self, var: Any, *, exact: bool = False, to_input: bool = False) -> list[Any]:
        """From `var` back to where it comes from.

        Args:
          var: where to begin.
          exact: only through what changes no value.
          to_input: also through roundings, which cannot be undone, but repeated.
        """
        path = [var]
        while (found := self.parent(path[-1])) is not None:
            source, last = found[0], path[-1]
            if exact and self.producer[last].primitive.name not in _SAME:
                break
            widened = source.aval.dtype in _ENCODED and source.aval.dtype.itemsize <= last.aval.dtype.itemsize
            if not (widened or to_input):
                break
            path.append(source)
        return path

    def rebuilt(self, var: Any, whole: dict[Any, None]) -> bool:
        """Whether `var` follows from constants, integers, inputs that are kept and small arrays; these are added to `whole`."""
        if (narrow := self.broadcast(var)) is not None:
            if not is_literal(narrow):
                whole[narrow] = None
            return True
        if self.is_constant(var):
            return True
        if (sources := self.moved_from(var)) is not None:
            whole.update(dict.fromkeys(sources))
            return True
        integers = self.of_integers(var)
        if integers is not None and sum(nbytes(source.aval) for source in integers) < _kept_nbytes(var.aval):
            whole.update(dict.fromkeys(integers))
            return True
        path = self.path(var, to_input=True)
        for i, source in enumerate(path):
            if source in self.kept_inputs:
                whole[source] = None
                self._small_operands(path[:i], whole)
                return True
        return False

    def rebuild_from(self, var: Any, root: Any, whole: dict[Any, None]) -> None:
        """Add to `whole` what `var` follows from besides `root`."""
        path = self.path(var)
        self._small_operands(path[: path.index(root)], whole)

    def _small_operands(self, path: Sequence[Any], whole: dict[Any, None]) -> None:
        for var in path:
            found = self.parent(var)
            assert found is not None
            for small in found[1]:
                narrow = self.broadcast(small)
                if not is_literal(narrow):
                    whole[small if narrow is None else narrow] = None

    def is_constant(self, var: Any) -> bool:
        """Whether it depends on no input."""
        pending, seen = [var], set()
        while pending:
            eqn = self.producer.get(pending.pop())
            if eqn is None or eqn.effects:
                return False
            for atom in eqn.invars:
                if not is_literal(atom) and atom not in seen:
                    seen.add(atom)
                    pending.append(atom)
        return True

    def moved_from(self, var: Any) -> list[Any] | None:
        """The parameters that `var` follows from by slicing, reshaping, transposing and casting, and the small arrays that say
        which parts; None if it is computed of anything else.
        """
        pending, seen, found = [var], {var}, list[Any]()
        while pending:
            source = pending.pop()
            eqn = self.producer.get(source)
            if source in self.kept_inputs:
                found.append(source)
            elif eqn is None:
                return None
            elif eqn.primitive.name in _MOVED and not eqn.effects:
                count = _DATA_OPERANDS.get(eqn.primitive.name, len(eqn.invars))
                data, places = eqn.invars[:count], eqn.invars[count:]
                found += [atom for atom in places if not is_literal(atom) and not self.is_constant(atom)]
                new = [atom for atom in data if not is_literal(atom) and atom not in seen]
                seen.update(new)
                pending += new
            elif source in self._parameters or self._moved_in_body(eqn, eqn.outvars.index(source)):
                found.append(source)
            elif not self.is_constant(source):
                return None
        others = [source for source in found if source not in self.kept_inputs]
        return found if sum(nbytes(source.aval) for source in others) <= nbytes(var.aval) else [var]

    def _moved_in_body(self, eqn: Any, index: int) -> bool:
        """Whether a loop or a call only moves values of kept inputs to this output, as a scan over layers does to its weights."""
        operands = _moved_to_operands(eqn, index)
        return operands is not None and all(is_literal(atom) or self.moved_from(atom) is not None for atom in operands)

    def _computed_of_parameters(self, jaxpr: Any) -> set[Any]:
        """What is computed of kept floating-point inputs and constants alone, weights that are normalised for one.

        Of a function all of whose inputs are kept, nothing: which of them are parameters is not known.
        """
        if all(var in self.kept_inputs for var in jaxpr.invars):
            return set()
        is_parameter = lambda var: var in self.kept_inputs and jnp.issubdtype(var.aval.dtype, jnp.floating)
        others = {var for var in [*jaxpr.constvars, *jaxpr.invars] if not is_parameter(var)}
        made: dict[Any, None] = {}
        for eqn in jaxpr.eqns:
            operands = [atom for atom in eqn.invars if not is_literal(atom)]
            if eqn.effects or any(atom in others for atom in operands):
                others.update(eqn.outvars)
            else:
                made.update(dict.fromkeys(eqn.outvars))
        return set(made)

    def of_integers(self, var: Any) -> list[Any] | None:
        """The inputs that `var` follows from by what is cheap: integers and kept vectors, but no matrices, or all layers of a
        network would be computed again. None if there are others.
        """
        pending, seen, found = [var], {var}, list[Any]()
        while pending:
            source = pending.pop()
            eqn = self.producer.get(source)
            if eqn is None:
                is_vector = source in self.kept_inputs and source.aval.size == max(source.aval.shape, default=1)
                if not is_vector and not jnp.issubdtype(source.aval.dtype, jnp.integer):
                    return None
                found.append(source)
            elif eqn.primitive.name in _OF_INTEGERS and not eqn.effects:
                new = [atom for atom in eqn.invars if not is_literal(atom) and atom not in seen]
                seen.update(new)
                pending += new
            elif not self.is_constant(source):
                return None
        return found

    def rectifies(self, var: Any) -> Any | None:
        """The x of which `var` has the signs of max(x, 0)."""
        if (eqn := self.producer.get(var)) is None:
            return None
        name = eqn.primitive.name
        if name == "convert_element_type" and var.aval.dtype == jnp.bfloat16:  # which reaches as far as float32
            var = eqn.invars[0]
        elif name == "mul":  # the square of a ReLU saves twice the ReLU
            literals = [atom.val for atom in eqn.invars if is_literal(atom)]
            var = next(atom for atom in eqn.invars if not is_literal(atom)) if literals and literals[0] >= 1 else var
        return self._against_zero(var, "max")

    def positive(self, var: Any) -> Any | None:
        """The x of which `var` is x > 0."""
        return self._against_zero(var, "gt")

    def _against_zero(self, var: Any, primitive: str) -> Any | None:
        eqn = self.producer.get(var)
        if eqn is None or eqn.primitive.name != primitive or is_literal(eqn.invars[0]):
            return None
        zero = eqn.invars[1]
        if not is_literal(zero) and (zero := self.broadcast(zero)) is None:
            return None
        return eqn.invars[0] if is_literal(zero) and zero.val == 0 else None

    def inverse_deviation(self, root: Any) -> tuple[Any, bool] | None:
        """The reciprocal square root that a batch norm multiplies the channels of `root` by.

        A variable with one entry per channel, and whether it is the root itself instead of its reciprocal.
        """
        channels = root.aval.shape[-1] if root.aval.ndim else 0
        descendants, pending = {root}, [root]
        while pending:
            for eqn in self._readers.get(pending.pop(), []):
                out = eqn.outvars[0] if eqn.outvars else None
                if out is None:  # a debug callback
                    continue
                if out not in descendants and (found := self.parent(out)) is not None and found[0] in descendants:
                    for small in found[1]:
                        if eqn.primitive.name == "mul" and (scale := self._square_root(small, channels)) is not None:
                            return scale
                    descendants.add(out)
                    pending.append(out)
                elif eqn.primitive.name == "div" and eqn.invars[0] in descendants and not is_literal(eqn.invars[1]):
                    scale = self._square_root(eqn.invars[1], channels)
                    if scale is not None:
                        return scale[0], not scale[1]
        return None

    def _square_root(self, var: Any, channels: int) -> tuple[Any, bool] | None:
        for ancestor in self._small_ancestors(var):
            eqn = self.producer.get(ancestor)
            if eqn is not None and eqn.primitive.name in ("rsqrt", "sqrt") and ancestor.aval.size == channels:
                return ancestor, eqn.primitive.name == "sqrt"
        return None

    def _small_ancestors(self, var: Any) -> Iterator[Any]:
        pending, seen = [var], {var}
        while pending:
            yield (current := pending.pop())
            eqn = self.producer.get(current)
            if eqn is None or eqn.primitive.name not in AFFINE | _SAME | {"rsqrt", "sqrt", "broadcast_in_dim"}:
                continue
            for atom in eqn.invars:
                if not is_literal(atom) and atom not in seen:
                    seen.add(atom)
                    pending.append(atom)


def is_statistic(var: Any, producer: dict[Any, Any]) -> bool:
    """Whether `var` is computed, value by value, of sums or maxima over many values of a larger array.

    An error of the sum of a softmax, or of a norm's deviation, is one of all values that are divided by it, and what it is for
    is `_MANY` times as large: it is kept as it is.

    Args:
      var: a variable of a program.
      producer: the equation that makes each variable of that program.
    """
    pending, seen = [var], {var}
    while pending:
        current = pending.pop()
        eqn = producer.get(current)
        if eqn is None or eqn.primitive.name in PRODUCTS:
            continue
        operands = [atom for atom in eqn.invars if not is_literal(atom)]
        many = _MANY * max(current.aval.size, 1)
        if eqn.primitive.name.startswith(("reduce_", "arg")) and any(atom.aval.size >= many for atom in operands):
            return True
        if (body := _body_of(eqn)) is not None:
            inner = body.outvars[eqn.outvars.index(current)]
            if not is_literal(inner) and is_statistic(inner, {out: e for e in body.eqns for out in e.outvars}):
                return True
        elif any(out.aval.size >= many for out in eqn.outvars):  # a kernel that gives a log-sum-exp beside its result
            return True
        elif all(atom.aval.size <= current.aval.size for atom in operands):
            new = [atom for atom in operands if atom.aval.size == current.aval.size and atom not in seen]
            seen.update(new)
            pending += new
    return False


def _body_of(eqn: Any) -> Any:
    """The program inside a scan or a call, with an output for each of the equation's; None for other equations."""
    if eqn.primitive.name != "scan" and eqn.primitive.name not in CALLS_OF_ONE_BODY:
        return None
    closed = next(iter(jaxprs_in_params(eqn.params)))
    return getattr(closed, "jaxpr", closed)


def _moved_to_operands(eqn: Any, index: int) -> list[Any] | None:
    """The operands whose values a loop's or call's body only moves to its output `index`; None if it does anything else."""
    body, changing = _body_of(eqn), set[Any]()
    if body is None:
        return None
    if eqn.primitive.name == "scan":
        # Told by shapes, for JAX 0.12 names these numbers otherwise: what is scanned over, or stacked, has an axis more outside.
        same = lambda outer, inner: sum(a.aval.ndim == b.aval.ndim for a, b in zip(outer, inner, strict=True))
        carried = same(eqn.outvars, body.outvars)
        constants = same(eqn.invars, body.invars) - carried
        if index < carried:
            return None
        changing = set(body.invars[constants : constants + carried])
    producer = {out: inner for inner in body.eqns for out in inner.outvars}
    operand = dict(zip(body.invars, eqn.invars, strict=True))
    pending, found = [body.outvars[index]], list[Any]()
    while pending:
        source = pending.pop()
        if is_literal(source) or source in body.constvars:
            continue
        if source in operand:
            if source in changing:
                return None
            found.append(operand[source])
            continue
        inner = producer[source]
        if inner.primitive.name in _MOVED and not inner.effects:
            pending += inner.invars[: _DATA_OPERANDS.get(inner.primitive.name, len(inner.invars))]
        else:
            deeper = _moved_to_operands(inner, inner.outvars.index(source))
            if deeper is None:
                return None
            pending += deeper
    return found or None


def _kept_nbytes(aval: Any) -> int:
    """Without a codec: masks are packed."""
    return aval.size // 8 if aval.dtype == jnp.bool_ else nbytes(aval)


def matches(path: str, pattern: str) -> bool:
    """Whether `pattern` matches consecutive names in `path`, "a/b/c", those of a module or of modules that contain it."""
    parts = path.split("/")
    runs = ("/".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
    return any(fnmatch.fnmatchcase(run, pattern) for run in runs)
