"""What a plan may keep in few bits: which values of a program, with which codec, and at what price.

Booleans may be kept as bits, which is exact, and with "compress" floats in codes. A code stands in the model of memory and time
for an array of bytes; encoding and decoding are elementwise operations there, for compilers fuse decoding into what reads the
array.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from memjax._core.arrays import is_float
from memjax._core.backward.derivatives import without_derivative
from memjax._core.barriers import barrier
from memjax._core.compat import scan_counts
from memjax._core.lists import pick
from memjax._core.program.dataflow import is_literal, variables
from memjax._core.program.jaxpr import Program
from memjax._plan.derivative import LoopPair, Passes
from memjax.compress._codecs.codec import DTYPES, Mask
from memjax.compress._transform.array_codecs import array_codecs
from memjax.compress._transform.keep.costs import SMALL, Candidates, Which
from memjax.compress._transform.keep.needs import Need, is_smooth, is_statistic, needs
from memjax.compress._transform.keep.origins import Origins, Parameters, inputs_of

BITS = 8  # of a float that a plan with "compress" keeps in a code, as `compressed` does by default
_BIT = 1  # of a boolean; XLA keeps a byte

_FIRST_ORDER = (
    'memjax.planned with allow=(..., "compress") supports first derivatives in reverse mode only: what it keeps is rounded. '
    'Differentiate twice without "compress".'
)


class Code(NamedTuple):
    """The code of a variable.

    Attributes:
      of: that variable.
      codec: encodes and decodes it.
      nbytes: of the code.
      bits: of each value.
      variable: stands for the code in the two equations.
      encode, decode: equations from the variable to `variable` and back, for models of time and memory only.
    """

    of: Any
    codec: Any
    nbytes: int
    bits: int
    variable: Any
    encode: Any
    decode: Any

    @property
    def rounds(self) -> bool:
        """Whether what it decodes to is rounded."""
        return rounds(self.bits)


def rounds(bits: int | None) -> bool:
    """Whether a value that is kept in so many bits is rounded; None: it is kept as it is."""
    return bits is not None and bits != _BIT


class Codes:
    """The codes of a program's variables: what may be encoded, and how.

    An encoded float is rounded, and so is everything that is recomputed from it. So variables in `exact` must be recomputed from
    exact values only, and an equation may run on rounded values only if `keeps_errors_small`.

    Args:
      program: the forward pass, with calls inlined.
      wanted: variables of `program` that the backward pass reads, and does not have without a plan.
      pullback: the backward pass, a program that reads `wanted`.
      cotangents: the other inputs of `pullback` that depend on a cotangent.
      parameters: inputs of `program` that are parameters.
      compress: whether floats may be in codes; else booleans alone.

    Attributes:
      exact: the variables in `wanted` that have to be exact.
      statistics: the float variables in `exact` that are small, or reductions of much larger arrays.
    """

    def __init__(
        self,
        program: Program,
        wanted: Iterable[Any],
        pullback: Program,
        cotangents: Iterable[Any],
        parameters: set[Any],
        *,
        compress: bool,
    ):
        self._mine = {*program.invars, *program.flow.place}
        self._codes: dict[Any, Code] = {}
        self.codec, self.nbytes = functools.cache(self._codec), functools.cache(self._nbytes)
        self.exact, self.statistics = set[Any](), set[Any]()
        self._candidates: Candidates | None = None
        if compress:
            self._add_floats(program, wanted, pullback, cotangents, parameters)

    def _add_floats(
        self,
        program: Program,
        wanted: Iterable[Any],
        pullback: Program,
        cotangents: Iterable[Any],
        parameters: set[Any],
    ) -> None:
        self._codecs, self._origins = array_codecs(None), Origins(program)
        found = needs(pullback, wanted, cotangents)
        least = Need.FINE if self._codecs.keeps_fine else Need.EXACT
        self.statistics = {
            var
            for var in found
            if is_float(var.aval) and (var.aval.size < SMALL or is_statistic(var, self._origins.producer))
        }
        rounded = [
            var
            for var, need in found.items()
            if need < least and var.aval.dtype in DTYPES and var not in self.statistics
        ]
        self.exact = found.keys() - set(rounded)
        flags = inputs_of([var in parameters for var in program.invars], [var.aval for var in program.invars])
        known = set(pick(program.invars, flags.parameters))
        of_parameters = Parameters(program, self._origins, parameters, known)
        self._candidates = Candidates(self._origins, of_parameters, Which(), self._codecs, found, rounded)

    def _codec(self, var: Any) -> Any:
        """The codec of a variable, with all optional members; None where it may not be encoded, or that saves nothing."""
        if is_mask(var):
            return Mask() if var in self._mine else None
        if self._candidates is None or var not in self._mine or not hasattr(var.aval, "dtype") or var in self.exact:
            return None
        if self._candidates.kept_bytes(var) >= self._candidates.whole_bytes(var):
            return None
        [codec] = self._codecs.each([self._candidates.role(var)])
        return codec

    def _nbytes(self, var: Any) -> int | None:
        """Bytes of the code of a variable; None where it is not to be encoded."""
        if self.codec(var) is None:
            return None
        if self._candidates is None or is_mask(var):
            return Mask().nbytes(var.aval)
        return self._candidates.kept_bytes(var)

    def bits(self, var: Any) -> int | None:
        """Bits of each value in the code of a variable; None where it is not to be encoded."""
        return None if self.codec(var) is None else _BIT if is_mask(var) else BITS

    def keeps_errors_small(self, eqn: Any) -> bool:
        """Whether the equation may run on rounded values: its results are off by about as much as they are."""
        if self._candidates is None:  # none are rounded
            return True
        return is_smooth(eqn, self._origins) and all(is_float(out.aval) for out in eqn.outvars)

    def need(self, var: Any) -> tuple[bool, int | None]:
        """Whether a variable has to be exact, and bytes of its code, if it may be encoded: the same for alike variables."""
        return var in self.exact, self.nbytes(var)

    def of(self, var: Any) -> Code:
        """The code of a variable that may be encoded."""
        if var not in self._codes:
            nbytes, bits = self.nbytes(var), self.bits(var)
            assert nbytes is not None
            assert bits is not None
            self._codes[var] = _code(var, self.codec(var), nbytes, bits)
        return self._codes[var]


def is_mask(var: Any) -> bool:
    """Whether a variable has booleans that are worth keeping as bits."""
    return getattr(var.aval, "dtype", None) == jnp.bool_ and var.aval.size >= SMALL


def _code(var: Any, codec: Any, nbytes: int, bits: int) -> Code:
    traced = jax.make_jaxpr(lambda x: _decode.bind(_encode.bind(x, nbytes=nbytes), aval=var.aval))(
        jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
    )
    encode, decode = traced.jaxpr.eqns
    return Code(
        var, codec, nbytes, bits, encode.outvars[0], encode.replace(invars=[var]), decode.replace(outvars=[var])
    )


_encode, _decode = core.Primitive("memjax_encode"), core.Primitive("memjax_decode")
_encode.def_abstract_eval(lambda x, *, nbytes: jax.core.ShapedArray((nbytes,), jnp.uint8))
_decode.def_abstract_eval(lambda code, *, aval: jax.core.ShapedArray(aval.shape, aval.dtype))


def codes_in(codes: Codes | None, coded: Iterable[Any]) -> list[Code]:
    """The codes of variables; none where nothing may be kept in codes."""
    return [] if codes is None else [codes.of(var) for var in coded]


def codes_of(derivative: Passes, free: set[Any], *, compress: bool) -> Codes:
    """The codes of a derivative's forward pass, `free` being there anyway; of booleans, and to `compress` of floats."""
    backward = derivative.backward
    return Codes(
        derivative.forward,
        [var for var in _read(backward) if var in derivative.forward.flow.place and var not in free],
        backward,
        backward.invars,
        _parameters(derivative),
        compress=compress,
    )


def codes_of_loop(derivative: Passes, pair: LoopPair, free: set[Any], *, compress: bool) -> Codes:
    """The same of the body of a loop, `free` being there anyway in each turn."""
    program = derivative.forward
    made = {*pair.program.flow.place, *pair.program.invars}
    known = {*program.flow.place, *program.invars, *program.constvars}
    operands = [atom for i, atom in enumerate(pair.backward.invars) if i not in pair.again]
    consts, carried = scan_counts(pair.backward)
    cotangents = [
        var
        for i, (atom, var) in enumerate(zip(operands, pair.pull.invars, strict=True))
        if consts <= i < consts + carried or (not is_literal(atom) and atom not in known)
    ]
    flow, mine = program.flow, _parameters(derivative)
    alone = lambda start: flow.following({*start, *program.constvars}, lambda eqn: not eqn.effects)
    of_parameters = alone(mine) - alone(())
    consts, carried = scan_counts(pair.forward)
    parameters = {
        var
        for i, (atom, var) in enumerate(zip(pair.forward.invars, pair.program.invars, strict=True))
        if not consts <= i < consts + carried and not is_literal(atom) and atom in of_parameters
    }
    return Codes(
        pair.program,
        [var for var in _read(pair.pull) if var in made and var not in free],
        pair.pull,
        cotangents,
        parameters,
        compress=compress,
    )


def _read(program: Program) -> dict[Any, None]:
    return program.flow.read | dict.fromkeys(variables(program.outvars))


def _parameters(derivative: Passes) -> set[Any]:
    """The inputs that are differentiated: where others are not, those are activations, or data."""
    inputs = derivative.forward.invars
    return {var for var, wrt in zip(inputs, derivative.wrt, strict=True) if wrt}


def encoded(value: Any, code: Code) -> tuple[Any, Any]:
    """(the value, its code): what reads the value waits for the code, or the compiler may make all codes at the end."""
    exact = value if not code.rounds else without_derivative(value, _FIRST_ORDER)
    return barrier((value, code.codec.encode(exact)))
