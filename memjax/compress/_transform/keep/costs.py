"""Which values may be encoded, and what each costs: bytes to keep it, its own or those of its code, or to recompute it.

The user chooses some by `where` and `smallest` of `memjax.compressed`; the rest is told from the programs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import jax.numpy as jnp

from memjax._core.compat import scope
from memjax._core.patterns import matches
from memjax._core.program.dataflow import is_literal, variables
from memjax._core.program.jaxpr import Program, nbytes
from memjax._core.program.primitives import EXPONENTIALS, VIEWS, expensive, flops_of_product
from memjax.compress._codecs.codec import DTYPES
from memjax.compress._transform.array_codecs import ArrayCodecs, Role
from memjax.compress._transform.keep.needs import Need, is_smooth, is_statistic
from memjax.compress._transform.keep.origins import (
    Inputs,
    Origins,
    Parameters,
    back_from,
    rectified_by,
    scale_of_norm,
)

SMALL = 4096
"""Arrays of fewer values are kept as they are, masks too: less than one tile of a code."""


@dataclasses.dataclass(frozen=True)
class Which:
    """What to encode.

    Attributes:
      where: see `compressed`.
      smallest: number of values of an array below which it is left alone.
      outer: the scope of the loop around the program, "" if there is none.
      needed: whether a `where` that matches nothing is a mistake: not in the parts of a module.
    """

    where: Any = None
    smallest: int = SMALL
    outer: str = ""
    needed: bool = True

    def within(self, scope: str) -> Which:
        """The same for the body of a loop in this scope."""
        return dataclasses.replace(self, outer=_joined(self.outer, scope))

    def scope(self, eqn: Any) -> str:
        """The scope of an equation, that of the loop around it included."""
        return _joined(self.outer, scope(eqn))

    def matches(self, uses: Sequence[tuple[Any, Any]], aval: Any) -> bool:
        """Whether `where` selects an array of type `aval`, given pairs of an equation and the variable that it reads."""
        if self.where is None:
            return True
        if self.where == "conv":
            return any(eqn.primitive.name == "conv_general_dilated" and eqn.invars[0] is var for eqn, var in uses)
        if callable(self.where):
            return any(self.where(self.scope(eqn), aval) for eqn, _ in uses)
        return any(matches(self.scope(eqn), self.where) for eqn, _ in uses)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is known of a program that is differentiated through codecs, beside the program.

    Attributes:
      names: of its inputs.
      axes: sizes of the named axes that its collectives run over.
      in_loop: whether it is the body of a loop: what it keeps is then marked as decided, for the program around.
    """

    inputs: Inputs
    codecs: ArrayCodecs
    which: Which
    names: Sequence[str]
    axes: dict[str, int]
    in_loop: bool = False


def _joined(outer: str, inner: str) -> str:
    return "/".join(filter(None, (outer, inner)))


_IMAGE = 4  # channels: of an image, at most


class Candidates:
    """Which values of a program may be encoded, and what they cost.

    Attributes:
      origins: where the values come from.
      refused: variables that are not encoded because their codes would be larger.
      images: variables that are not encoded because they are images that a convolution reads.
    """

    def __init__(
        self,
        origins: Origins,
        parameters: Parameters,
        which: Which,
        codecs: ArrayCodecs,
        needed: dict[Any, Need],
        rounded: Iterable[Any],
    ):
        self.origins, self._parameters, self._which, self._codecs = origins, parameters, which, codecs
        self._largest = max((var.aval.size for var in rounded), default=1)
        self._uses: dict[Any, list[Any]] = {}  # by variable, the residuals that are computed from it, and itself
        for var in rounded:
            for source in origins.path(var):
                self._uses.setdefault(source, []).append(var)
        self._fine = _computed_cheaply([var for var in rounded if needed[var] == Need.FINE], origins)
        ends = [origins.path(var, exact=True)[-1] for var in rounded]
        makers = [origins.producer[var] for var in ends if var in origins.producer]
        operands = (atom for eqn in makers if not expensive(eqn) for atom in variables(eqn.invars))
        self._sources = _computed_cheaply(operands, origins)
        self.refused: dict[Any, None] = {}
        self.images: dict[Any, None] = {}
        self.is_encoded, self.role = functools.cache(self._is_encoded), functools.cache(self._role)

    def whole_bytes(self, var: Any) -> int:
        """Bytes of the array itself; booleans are packed."""
        return max(-(-var.aval.size // 8) if var.aval.dtype == jnp.bool_ else nbytes(var.aval), 1)

    def kept_bytes(self, var: Any) -> int:
        """Bytes of its code, or of itself where it is not encoded."""
        if not self.is_encoded(var):
            return self.whole_bytes(var)
        return self._codecs.nbytes(var.aval, self.role(var)) or nbytes(var.aval) // 2

    def _is_encoded(self, var: Any) -> bool:
        """Whether the array is encoded if it is kept."""
        if var.aval.dtype not in DTYPES or var.aval.size < self._which.smallest:
            return False
        if var in self._parameters.computed or is_statistic(var, self.origins.producer):
            return False
        paths = [self.origins.path(var), *(self.origins.path(member) for member in self._uses.get(var, []))]
        if not self._which.matches(self.origins.uses([var for path in paths for var in path]), var.aval):
            return False
        if self._codecs.keeps_images and self._is_image(var):
            self.images[var] = None
            return False
        if self._codecs.nbytes(var.aval, self.role(var)) > nbytes(var.aval):
            self.refused[var] = None
            return False
        return True

    def _is_image(self, var: Any) -> bool:
        """Whether a convolution reads `var`, which is an input of up to four channels, or one cast.

        To encode them takes ten times as long for each byte as elsewhere, and saves little: the maps of features are larger.
        """
        if not self._feeds_convolution(var) or var.aval.shape[-1] > _IMAGE:
            return False
        return self.origins.path(var, to_input=True)[-1] not in self.origins.producer

    def _feeds_convolution(self, var: Any) -> bool:
        readers = [eqn for source in self.origins.path(var) for eqn in self.origins.consumers.get(source, [])]
        return any(eqn.primitive.name == "conv_general_dilated" for eqn in readers)

    def _role(self, var: Any) -> Role:
        """What the choice of a codec depends on."""
        origins = self.origins
        return Role(
            aval=var.aval,
            is_fine=var in self._fine,
            is_wide=_is_exponential(var, origins),
            by_channel=self._feeds_convolution(var) or scale_of_norm(var, origins) is not None,
            share=min(var.aval.size / self._largest, 1.0),
            is_source=var in self._sources,
            is_rectified=rectified_by(var, origins) is not None,
        )


def _computed_cheaply(wanted: Iterable[Any], origins: Origins) -> set[Any]:
    """`wanted`, and what they are computed from without products, kernels and loops."""
    return {var for var, _ in back_from(wanted, origins.producer, lambda _, eqn: not expensive(eqn))}


def _is_exponential(var: Any, origins: Origins) -> bool:
    """Whether `var` is an exponential, or one over a statistic: a softmax."""
    while (eqn := origins.producer.get(var)) is not None:
        if eqn.primitive.name in EXPONENTIALS:
            return True
        if eqn.primitive.name not in {"div", "mul"} | VIEWS or is_literal(eqn.invars[0]):
            return False
        var = eqn.invars[0]
    return False


# What it costs to recompute a value, in bytes: those that the time is worth.

RecomputeCost = Callable[[Any], int | None]

# At these bits per value a product is repeated if it saves as many bytes for its FLOPs as products write on average.
_BITS = 6
_MOST = 1.2  # times as many FLOPs for a byte, at most
_PASSES = 8  # a pass over memory costs an eighth of what is read
_FUSED = 512  # an elementwise operation costs next to nothing: it is fused into what reads its result


def flops_per_byte(program: Program, bits: float) -> float:
    """The FLOPs that are worth spending for a byte less, if codes have so many bits per value.

    With six bits those that the program's products take for each byte that they write. With eight fewer, by their square, and
    with less than six a few more: then the rest of the memory is as small, and what is kept exactly weighs more.
    """
    products = [eqn for eqn in program.eqns if flops_of_product(eqn)]
    written = sum(nbytes(eqn.outvars[0].aval) for eqn in products)
    return min((_BITS / bits) ** 2, _MOST) * sum(map(flops_of_product, products)) / max(written, 1)


def recompute_exactly(price: float) -> RecomputeCost:
    """What recomputing an equation costs, its operands being exact."""

    def cost(eqn: Any) -> int | None:
        if eqn.primitive.name == "dot_general":
            return int(flops_of_product(eqn) / price) if price else None
        return None if expensive(eqn) else _of_pass(eqn)

    return cost


def recompute_rounded(
    program: Program, origins: Origins, available: set[Any], price: float, chained: Set[Any] = frozenset()
) -> RecomputeCost:
    """What recomputing an equation costs, operands that do not follow from `available` being decoded. None where it would
    multiply their errors; and for a ReLU of several arrays, unless it makes one of `chained`.
    """
    rectified = {source for var in chained for source in origins.path(var, exact=True)}
    exactly, exact = recompute_exactly(price), program.flow.following(available, lambda eqn: not expensive(eqn))

    def cost(eqn: Any) -> int | None:
        is_exact = exact.issuperset(variables(eqn.invars))
        may_be = is_exact or not rectified.isdisjoint(eqn.outvars) or is_smooth(eqn, origins)
        return exactly(eqn) if may_be else None

    return cost


def recompute_linear(origins: Origins) -> RecomputeCost:
    """What recomputing an equation costs that scales, shifts or moves one large operand; None for any other."""
    return lambda eqn: None if origins.parent(eqn.outvars[0]) is None else _of_pass(eqn)


def _of_pass(eqn: Any) -> int:
    out = sum(nbytes(var.aval) for var in eqn.outvars)
    read = sum(nbytes(var.aval) for var in variables(eqn.invars))
    return 1 + (read // _PASSES if read > 4 * out else out // _FUSED)
