"""A bound and a capacity of its own for each array that a function encodes, and what its backward pass finds out.

What the controller needs is known in the middle of a backward pass: cotangents, and what codes turned out to need. It
leaves as the "gradient" of the bounds, as the scales of 8-bit floats do in Flax. Gradients are added up, over uses, steps of
a scan, examples of a `vmap` and devices; so every statistic is one that makes sense as a sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from memjax._core import check as _check
from memjax._core.clear_errors import call_errors
from memjax._core.compat import is_tracer
from memjax.compress._codecs.codec import Codec, tree_nbytes
from memjax.compress._error_bounded.error_bounded import ErrorBounded

LADDER = tuple(0.5 * 1.125**i for i in range(36))
"""Capacities in bits per value. Above its top, 31 bits, only what cannot overflow."""


_MADE_BY = "make it with memjax.compress.layers from the function that is trained"


class Statistics(NamedTuple):
    """Sums over the uses of n encoded arrays, each read by at most m gradients of weights; float32.

    Attributes:
      uses: how often each was used.
      examples: sizes of leading axes.
      nonzero: shares of values that are not zero.
      magnitude: means of |x|, x being the decoded values.
      bits: bits per value that the codes needed.
      overflows: how many codes overflowed.
      needed: how many codes needed each rung of `LADDER`, the last entry counting those beyond.
      cotangent: means of |L|, L being the cotangent that the array is multiplied with to give a gradient.
      power: sums of those L^2 that change one entry of the gradient, means over its entries.
    """

    uses: Float[Array, " n"]
    examples: Float[Array, " n"]
    nonzero: Float[Array, " n"]
    magnitude: Float[Array, " n"]
    bits: Float[Array, " n"]
    overflows: Float[Array, " n"]
    needed: Float[Array, "n rungs"]
    cotangent: Float[Array, "n m"]
    power: Float[Array, "n m"]

    @staticmethod
    def zeros(layers: int, readers: int) -> Statistics:
        axes = {"needed": (len(LADDER) + 1,), "cotangent": (readers,), "power": (readers,)}
        shapes = [(layers, *axes.get(field, ())) for field in Statistics._fields]
        return Statistics(*[jnp.zeros(shape, jnp.float32) for shape in shapes])  # each of its own: they are donated

    @property
    def rung(self) -> Array:
        """By layer, the highest rung that a code needed, int32; -1 without a use."""
        return jnp.max(jnp.where(self.needed > 0, jnp.arange(len(LADDER) + 1), -1), 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Layers:
    """A codec for `compressed`: `ErrorBounded` with settings of its own for each array, as `layers` finds them.

    The arrays that one call encodes take them in the order of the forward pass; calls that share the codec share its settings.
    To be part of what is trained: its gradient has the statistics in their place, and the rest zero. `adaptive` sets
    the bounds from them, `transactional` the capacities.

    Attributes:
      bound: of each array, float32; one that is not positive stores it as it is.
      statistics: zeros, in whose place the gradient has what was found.
      bits_per_value: capacity of each; None cannot overflow.
      names: of each.
      weights: names of the inputs whose gradients each is multiplied into.
      shapes: of each, with its dtype.
      samples: from how many values of an array, and of a cotangent, statistics are taken, about; None: all.
    """

    bound: Float[Array, " n"]
    statistics: Statistics
    _: dataclasses.KW_ONLY
    bits_per_value: tuple[float | None, ...] = dataclasses.field(metadata={"static": True})
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    weights: tuple[tuple[str, ...], ...] = dataclasses.field(metadata={"static": True})
    shapes: tuple[tuple[tuple[int, ...], np.dtype], ...] = dataclasses.field(metadata={"static": True})
    samples: int | None = dataclasses.field(default=2**16, metadata={"static": True})

    def __post_init__(self) -> None:
        for name in ("names", "bits_per_value", "weights", "shapes"):
            given = getattr(self, name)
            if not isinstance(given, tuple) or len(given) != len(self.names):
                raise _check.fail(TypeError, name, "a tuple with an entry for each array", given, _MADE_BY)
        for bits in self.bits_per_value:
            check_bits(bits)
        check_samples(self.samples)

    def __repr__(self) -> str:
        """A line for each array: its name, shape, bound and capacity."""
        known = _check.is_array(self.bound) and not is_tracer(self.bound) and self.bound.shape == (len(self.names),)
        bounds = [f"{bound:.3g}" for bound in np.asarray(self.bound).tolist()] if known else ["?"] * len(self.names)
        bits = ["raw" if b is None else f"{b:.3g} bits" for b in self.bits_per_value]
        rows = zip(self.names, self.shapes, bounds, bits, strict=True)
        lines = [
            f"  {name or '(unnamed)'}: {dtype}{list(shape)}, bound {b}, {c}" for name, (shape, dtype), b, c in rows
        ]
        return "\n".join([f"Layers({len(self.names)} arrays, samples={self.samples})", *lines])

    def layer(self, i: int) -> ErrorBounded:
        """The codec of the i-th array."""
        return ErrorBounded(self.bound[i], bits_per_value=self.bits_per_value[i])

    def check(self, found: int) -> None:
        """Raises ValueError if a call encodes another number of arrays, TypeError if there are not as many bounds."""
        if found != len(self.names):
            wanted = f"one with settings for the {found} arrays that are encoded"
            raise ValueError(
                f"codec must be {wanted}, got settings for {len(self.names)}, {list(self.names)}: {_MADE_BY}"
            )
        if not _check.is_array(self.bound) or (self.bound.shape, self.bound.dtype) != ((found,), jnp.float32):
            raise _check.fail(TypeError, "bound", f"a float32 array of {found} bounds", self.bound, _MADE_BY)
        shapes = [getattr(a, "shape", None) for a in jax.tree.leaves(self.statistics)]
        if not isinstance(self.statistics, Statistics) or any(not shape or shape[0] != found for shape in shapes):
            raise _check.fail(TypeError, "statistics", f"Statistics of {found} arrays", self.statistics, _MADE_BY)

    @property
    def keeps_zeros(self) -> bool:
        return True

    def nbytes(self) -> int:
        """Bytes of all codes."""
        avals = [jax.ShapeDtypeStruct(*shape) for shape in self.shapes]
        return sum(self.layer_nbytes(i, aval) for i, aval in enumerate(avals))

    def layer_nbytes(self, i: int, aval: Any) -> int:
        return tree_nbytes(jax.eval_shape(ErrorBounded(1.0, bits_per_value=self.bits_per_value[i]).encode, aval))


@jax.tree_util.register_static
class Recorder:
    """Stands for the codec while `layers` traces: notes what is encoded."""

    keeps_zeros = True

    def __init__(self) -> None:
        self.found: list[tuple[str, tuple[str, ...], Any]] = []

    def layer(self, i: int) -> ErrorBounded:
        return ErrorBounded(1.0)

    def check(self, found: int) -> None:
        pass

    def record(self, names: list[str], weights: list[tuple[str, ...]], avals: list[Any]) -> None:
        self.found += zip(names, weights, avals, strict=True)


AnyCodec = Codec | Layers | Recorder


def layers(
    f: Callable[..., Any],
    *args: Any,
    bound: float = 2**-7,
    bits_per_value: float | None = None,
    samples: int | None = 2**16,
    argnums: int | tuple[int, ...] = 0,
) -> Layers:
    """The codec with settings for each array that the gradient of `f(codec, *args)` encodes; nothing is computed.

    Args:
      f: a scalar function, or a pair of a scalar and something else, that calls what is `compressed` with the codec that it
        gets. For one, `lambda codec, params, x: loss(memjax.compressed(model, codec, where="conv")(params, x))`.
      *args: arrays or `jax.ShapeDtypeStruct`s.
      bound: of all to begin with.
      bits_per_value: capacity of all to begin with; None: that which cannot overflow.
      samples: statistics are taken from about so many values of each array. Late in training few values have most of the
        power of a large array's cotangents: what so many say of it is right on average, over many steps. None: all are read,
        once more in every step, and statistics are exact.
      argnums: of `args`, those that training differentiates for.

    Raises:
      ValueError: nothing is encoded, or `bound` or `samples` is not positive.
    """
    _check.function("f", f)
    _check.number("bound", bound, positive=True)
    check_bits(bits_per_value)
    check_samples(samples)
    recorder = Recorder()
    positions = argnums if isinstance(argnums, Sequence) and not isinstance(argnums, str) else (argnums,)
    numbers = tuple(
        _check.integer("argnums", position, what="the position of an argument, or several") for position in positions
    )
    if not numbers or not all(0 <= number < len(args) for number in numbers):
        raise _check.fail(ValueError, "argnums", f"positions among the {len(args)} arguments of f", argnums)
    _check.function("f", f, "f(codec, *args) takes the codec and what follows", arguments=1 + len(args))
    with call_errors("f", f, {"the codec": "one", "the arguments": args}):
        has_aux = isinstance(jax.eval_shape(lambda *args: f(Recorder(), *args), *args), tuple)
        gradient = jax.grad(lambda *args: f(recorder, *args), numbers, has_aux=has_aux, allow_int=True)
        jax.eval_shape(gradient, *args)
    if not recorder.found:
        raise ValueError("f must call something compressed with the codec that it gets; nothing of it is encoded.")
    names, weights, avals = zip(*recorder.found, strict=True)
    count = len(names)
    return Layers(
        jnp.full(count, bound, jnp.float32),
        Statistics.zeros(count, max(1, *map(len, weights))),
        bits_per_value=(bits_per_value,) * count,
        names=names,
        weights=weights,
        shapes=tuple((tuple(aval.shape), np.dtype(aval.dtype)) for aval in avals),
        samples=samples,
    )


def check_bits(bits_per_value: Any) -> None:
    """That it is a capacity, or None for one that cannot overflow."""
    if bits_per_value is not None:
        _check.number("bits_per_value", bits_per_value, positive=True)


def check_samples(samples: Any) -> None:
    if samples is not None:
        _check.integer("samples", samples, least=1, what="None or an integer")


def split_layers(tree: Any) -> tuple[list[Layers], Callable[[list[Any]], Any]]:
    """The `Layers` in a tree, and the function that gives the tree with others in their place."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, Layers))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Layers)]

    def rebuild(new):
        replaced = list(leaves)
        for i, one in zip(places, new, strict=True):
            replaced[i] = one
        return jax.tree.unflatten(structure, replaced)

    return [leaves[i] for i in places], rebuild
