"""`Layers`: a codec with a bound and a capacity for each array that a function encodes, and statistics of each array.

The controller needs cotangents and the sizes of codes, which are known in the middle of a backward pass. Their statistics leave
it as the "gradient" of the codec, as the scales of 8-bit floats do in Flax. JAX adds gradients up, over uses, steps of a
scan, examples of a `vmap` and devices; so every statistic is one that makes sense as a sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from memjax._core import check
from memjax._core.clear_errors import call_errors
from memjax._core.compat import is_tracer
from memjax._core.lists import drop, merge, pick
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
      magnitude: means of |x|, where x are the decoded values.
      bits: bits per value that the codes needed.
      overflows: how many codes overflowed.
      needed: how many codes needed each rung of `LADDER`; the last entry counts those that needed more.
      cotangent: means of |L|, where L is the cotangent that the array is multiplied with to give a gradient.
      power: for an entry of the gradient, the sum of the L^2 that change it; the mean over all entries.
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
        layers, readers = check.integer("layers", layers, least=0), check.integer("readers", readers, least=0)
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
    """A codec for `compressed`: `ErrorBounded` with a bound and a capacity for each array. `layers` makes it.

    The arrays that one call encodes take their settings in the order of the forward pass; calls that share the codec share
    its settings. Differentiate with respect to it, as to the parameters: its gradient has the statistics in their place, and
    is zero otherwise. `adaptive` sets the bounds from them, `transactional` the capacities.

    Attributes:
      bound: each array's bound, float32; an array whose bound is not positive is stored as it is.
      statistics: zeros; the gradient has the statistics of a backward pass here.
      bits_per_value: each array's capacity; None cannot overflow.
      names: each array's name, that of a weight whose gradient it is multiplied into.
      weights: names of all inputs whose gradients each array is multiplied into.
      shapes: each array's shape and dtype.
      samples: about how many values of an array, and of a cotangent, statistics are taken from; None: all.
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
                raise check.fail(TypeError, name, "a tuple with an entry for each array", given, _MADE_BY)
        for bits in self.bits_per_value:
            ErrorBounded(1.0, bits_per_value=bits)  # which checks them
        if self.samples is not None:
            check.integer("samples", self.samples, least=1, what="None or an integer")

    def __repr__(self) -> str:
        """A line for each array: its name, shape, bound and capacity."""
        known = check.is_array(self.bound) and not is_tracer(self.bound) and self.bound.shape == (len(self.names),)
        bounds = [f"{bound:.3g}" for bound in np.asarray(self.bound).tolist()] if known else ["?"] * len(self.names)
        bits = ["raw" if b is None else f"{b:.3g} bits" for b in self.bits_per_value]
        rows = zip(self.names, self.shapes, bounds, bits, strict=True)
        lines = [
            f"  {name or '(unnamed)'}: {dtype}{list(shape)}, bound {b}, {c}" for name, (shape, dtype), b, c in rows
        ]
        return "\n".join([f"Layers({len(self.names)} arrays, samples={self.samples})", *lines])

    def layer(self, i: int) -> ErrorBounded:
        """The codec of the i-th array."""
        i, count = check.integer("i", i), len(self.names)
        if not -count <= i < count:
            raise check.fail(ValueError, "i", f"the number of one of {count} arrays", i)
        return ErrorBounded(self.bound[i], bits_per_value=self.bits_per_value[i])

    def check_count(self, arrays: int) -> None:
        """Raises ValueError if a call encodes another number of arrays, TypeError if there are not as many bounds."""
        if arrays != len(self.names):
            raise ValueError(
                f"codec must be one with settings for the {arrays} arrays that are encoded, got settings for"
                f" {len(self.names)}, {list(self.names)}: {_MADE_BY}"
            )
        if not check.is_array(self.bound) or (self.bound.shape, self.bound.dtype) != ((arrays,), jnp.float32):
            raise check.fail(TypeError, "bound", f"a float32 array of {arrays} bounds", self.bound, _MADE_BY)
        shapes = [getattr(a, "shape", None) for a in jax.tree.leaves(self.statistics)]
        if not isinstance(self.statistics, Statistics) or any(not shape or shape[0] != arrays for shape in shapes):
            raise check.fail(TypeError, "statistics", f"Statistics of {arrays} arrays", self.statistics, _MADE_BY)

    def nbytes(self) -> int:
        """Bytes of all codes."""
        pairs = zip(self.bits_per_value, self.shapes, strict=True)
        return sum(ErrorBounded(1.0, bits_per_value=b).nbytes(jax.ShapeDtypeStruct(*shape)) for b, shape in pairs)


Weighed = tuple[tuple[str, ...], Any]
"""What `layers` finds out about an encoded array: the names of the inputs whose gradients it is multiplied into, and its type."""


@jax.tree_util.register_static
class Recorder:
    """Stands for the codec while `layers` traces, and records which arrays are encoded."""

    def __init__(self) -> None:
        self.arrays: list[Weighed] = []


def layers(
    f: Callable[..., Any],
    *args: Any,
    bound: float = 2**-7,
    bits_per_value: float | None = None,
    samples: int | None = 2**16,
    argnums: int | tuple[int, ...] = 0,
) -> Layers:
    """The codec with settings for each array that the gradient of `f(codec, *args)` encodes. It traces; it computes nothing.

    Args:
      f: a function that gives a scalar, or a pair of a scalar and something else, and calls something `compressed` with the
        codec that it gets: `lambda codec, params, x: loss(memjax.compressed(model, codec, where="conv")(params, x))`.
      *args: arrays or `jax.ShapeDtypeStruct`s.
      bound: every array's bound to begin with.
      bits_per_value: every array's capacity to begin with; None cannot overflow.
      samples: about how many values of each array statistics are taken from. Late in training few values have most of the
        power of a large array's cotangents: then samples are right on average, over many steps. None reads all values once
        more in every step, and statistics are exact.
      argnums: positions in `args` of what training differentiates with respect to.

    Raises:
      ValueError: nothing is encoded, or `bound` or `samples` is not positive.
    """
    check.function("f", f)
    check.number("bound", bound, positive=True)
    recorder = Recorder()
    numbers = tuple(check.argnums(argnums, len(args)))
    if not numbers:
        raise check.fail(ValueError, "argnums", f"positions among {len(args)} arguments", argnums)
    check.function("f", f, "f(codec, *args) takes the codec and what follows", arguments=1 + len(args))
    call = lambda *args: f(recorder, *args)
    with call_errors("f", f, {"the codec": "one", "the arguments": args}):
        has_aux = isinstance(jax.eval_shape(call, *args), tuple)  # without a gradient, nothing is recorded
        jax.eval_shape(jax.grad(call, numbers, has_aux=has_aux, allow_int=True), *args)
    if not recorder.arrays:
        raise ValueError("f must call something compressed with the codec that it gets; nothing of it is encoded.")
    weights, avals = zip(*recorder.arrays, strict=True)
    count = len(weights)
    return Layers(
        jnp.full(count, bound, jnp.float32),
        Statistics.zeros(count, max(1, *map(len, weights))),
        bits_per_value=(bits_per_value,) * count,
        names=tuple(of_array[0] if of_array else f"array {i}" for i, of_array in enumerate(weights)),
        weights=weights,
        shapes=tuple((tuple(aval.shape), np.dtype(aval.dtype)) for aval in avals),
        samples=samples,
    )


def split_layers(tree: Any) -> tuple[list[Layers], Callable[[list[Any]], Any]]:
    """The `Layers` in a tree, and the function that gives the tree with others in their place."""
    is_layers = lambda node: isinstance(node, Layers)
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_layers)
    mask = [is_layers(leaf) for leaf in leaves]
    rebuild = lambda new: jax.tree.unflatten(structure, merge(new, drop(leaves, mask), mask))
    return pick(leaves, mask), rebuild
