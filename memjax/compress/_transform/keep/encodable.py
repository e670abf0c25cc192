"""Which values of a program may be encoded, for who decides otherwise than `choose` what to keep of it.

The analysis is that of `memjax.compressed`: see choose.py. A value that is encoded is rounded, and so is what follows from it.
What has to be exact may follow from exact values alone, and from rounded ones only what is off by about as much as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memjax._core.arrays import is_float
from memjax._core.lists import pick
from memjax._core.program.jaxpr import Program
from memjax.compress._codecs.codec import DTYPES
from memjax.compress._transform.array_codecs import array_codecs
from memjax.compress._transform.keep.costs import Candidates
from memjax.compress._transform.keep.needs import Need, needs
from memjax.compress._transform.keep.origins import Origins
from memjax.compress._transform.keep.parameters import Parameters, inputs_of
from memjax.compress._transform.keep.smooth import is_smooth, is_statistic
from memjax.compress._transform.keep.which import SMALL, Which


class Encodable:
    """What may be encoded of a program's values, and how.

    Args:
      program: the forward pass, with calls in place.
      wanted: those of its variables that the backward pass reads and that are not there anyway.
      pullback: the backward pass, a program that reads `wanted`.
      cotangents: its other inputs that depend on a cotangent.
      parameters: inputs of `program` that are parameters.
      bits: per value of the codes.

    Attributes:
      exact: those in `wanted` that have to be exact.
      statistics: those of them that are small beside what they are computed from.
    """

    def __init__(
        self,
        program: Program,
        wanted: Iterable[Any],
        pullback: Any,
        cotangents: Iterable[Any],
        parameters: set[Any],
        bits: int,
    ):
        self._codecs = array_codecs(None, bits)
        self._origins = Origins(program)
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
        self.exact: set[Any] = found.keys() - set(rounded)
        flags = inputs_of([var in parameters for var in program.invars], [var.aval for var in program.invars])
        known = set(pick(program.invars, flags.parameters))
        of_parameters = Parameters(program, self._origins, parameters, known)
        self._candidates = Candidates(self._origins, of_parameters, Which(None, SMALL), self._codecs, found, rounded)

    def codec(self, var: Any) -> Any:
        """The codec of a variable, with all optional members; None where it may not be encoded, or that saves nothing."""
        if var in self.exact or self.nbytes(var) >= self._candidates.whole_bytes(var):
            return None
        [codec] = self._codecs.each([self._candidates.role(var)])
        return codec

    def nbytes(self, var: Any) -> int:
        """Bytes of the code, or of the variable itself where it may not be encoded."""
        return self._candidates.kept_bytes(var)

    def keeps_errors_small(self, eqn: Any) -> bool:
        """Whether the equation may run on rounded values: its results are off by about as much as they are."""
        return is_smooth(eqn, self._origins.producer) and all(is_float(out.aval) for out in eqn.outvars)
