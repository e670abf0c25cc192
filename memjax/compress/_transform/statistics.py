"""Gathers `Statistics` of the encoded arrays in one backward pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memjax._core.arrays import is_float
from memjax._core.compat import varying
from memjax._core.program.dataflow import is_literal, variables
from memjax._core.program.jaxpr import Program
from memjax._core.program.primitives import PRODUCTS, REPLICATIONS, VIEWS
from memjax.compress._training.layers import LADDER, Statistics

_EXAMPLES = 256
"""Samples are taken from about so many examples, at most twice as many: from many examples rather than many from each, because
late in training a few examples have most of the loss. One small kernel adds up the usual number of samples."""


class Collector:
    """Gathers `Statistics` of one backward pass.

    Each array contributes numbers, and vectors with an entry per example. They are combined all at once, at the end: each kernel
    on a GPU would do next to nothing, so few kernels are wanted.

    Args:
      like: statistics of the wanted types.
      samples: see `Layers`.
      cotangents_and_codes: arrays of the backward pass. A zero that formally depends on all of them is added to all statistics,
        so that each counts once per example of a `vmap` and once per device, as derivatives do.

    Raises:
      ValueError: an array is sharded over explicit axes of a mesh.
    """

    def __init__(self, like: Statistics, samples: int | None, cotangents_and_codes: Any):
        for x in jax.tree.leaves(cotangents_and_codes):
            if axes := [axis for axis in jax.typeof(x).sharding.spec if axis is not None]:
                raise ValueError(
                    f"codec must not be Layers for arrays on explicit axes of a mesh, got {jax.typeof(x).str_short()} on "
                    f"{axes}: its statistics are those of a device; call it within jax.shard_map over these axes, or take "
                    "another codec, such as bits=8"
                )
        firsts = [jnp.ravel(x)[0] == jnp.zeros((), x.dtype) for x in jax.tree.leaves(cotangents_and_codes) if x.size]
        self._zero = sum(jnp.where(first, jnp.float32(0), jnp.float32(0)) for first in firsts)
        self._like, self._samples = like, samples
        self._layers, self._width = like.power.shape
        self._codes: dict[int, tuple[Any, Any, float]] = {}
        self._decoded: dict[int, _Sums] = {}
        self._cotangents: dict[tuple[int, int], tuple[_Sums, float]] = {}

    def code(self, layer: int, code: Any, shape: Sequence[int]) -> None:
        """Take the need and the overflow of the code of an array of this shape."""
        self._codes[layer] = code.needed_bits_per_value, code.overflowed, float(shape[0] if shape else 1)

    def decoded(self, layer: int, x: Any) -> None:
        """Take the decoded values of an array, unless `cotangent` has taken them."""
        if layer not in self._decoded:
            [self._decoded[layer]] = _sums_by_example([x], self._samples)

    def cotangent(self, reader: Reader, ct: Any, x: Any) -> None:
        """Take the cotangent of one more reader of an array, and the values that it reads."""
        layer = reader.layer
        if layer in self._decoded:
            [sums] = _sums_by_example([ct], self._samples)
        else:
            sums, self._decoded[layer] = _sums_by_example([ct, x], self._samples)
        earlier_readers = sum(other == layer for other, _ in self._cotangents)
        self._cotangents[layer, earlier_readers] = sums, reader.share / sums.share

    def statistics(self) -> Statistics:
        """The statistics, added up over those devices of a `shard_map` that share the bounds."""

        def added_up(x, like):
            x = x + self._zero
            axes = tuple(varying(jax.typeof(x)) - varying(jax.typeof(like)))
            return lax.psum(x, axes) if axes else x

        return jax.tree.map(added_up, self._statistics(), self._like)

    def _statistics(self) -> Statistics:
        layers, table = range(self._layers), (self._layers, self._width)
        bits, overflows, examples = (
            jnp.stack([jnp.asarray(self._codes[i][field] if i in self._codes else 0, jnp.float32) for i in layers])
            for field in range(3)
        )
        used = jnp.asarray([float(i in self._codes) for i in layers], jnp.float32)
        # A code of exactly a rung's size fits.
        rung = jnp.sum(bits[:, None] > jnp.asarray(LADDER) * (1 + 1e-6), 1)
        decoded = [self._decoded.get(i, _NONE) for i in layers]
        cotangents = [self._cotangents.get((i, j), (_NONE, 0.0)) for i in layers for j in range(self._width)]
        factors = jnp.asarray([factor for _, factor in cotangents], jnp.float32)
        return Statistics(
            uses=used,
            examples=examples,
            nonzero=_totals([sums.nonzero for sums in decoded], mean=True),
            magnitude=_totals([sums.magnitude for sums in decoded], mean=True),
            bits=bits,
            overflows=overflows,
            needed=jax.nn.one_hot(rung, len(LADDER) + 1, dtype=jnp.float32) * used[:, None],
            cotangent=_totals([sums.magnitude for sums, _ in cotangents], mean=True).reshape(table),
            power=(_totals([sums.power for sums, _ in cotangents], mean=False) * factors).reshape(table),
        )


def _totals(vectors: Sequence[Any], *, mean: bool) -> Any:
    """The sum, or the mean, of each vector; 0 for an empty one."""
    longest = max(map(len, vectors), default=0)
    rows = [jnp.pad(vector, (0, longest - len(vector))) for vector in vectors]
    lengths = [max(len(vector), 1) if mean else 1 for vector in vectors]
    return jnp.sum(jnp.stack(rows), 1) / jnp.asarray(lengths, jnp.float32)


class _Sums(NamedTuple):
    """Statistics of samples of an array; vectors with an entry per example.

    Attributes:
      nonzero: share of the samples that is not zero.
      share: number of samples over the number of all values.
    """

    nonzero: Any
    magnitude: Any
    power: Any
    share: float


_EMPTY = np.zeros(0, np.float32)
_NONE = _Sums(_EMPTY, _EMPTY, _EMPTY, 1.0)


def _sums_by_example(arrays: Sequence[Any], samples: int | None) -> list[_Sums]:
    """The statistics of each array. Samples become rows of one matrix, so that one kernel adds them up."""
    parts = [_sampled(x, samples) for x in arrays]
    rows = [part.astype(jnp.float32) for part, _ in parts]
    groups = [[row] for row in rows]
    if samples is not None:
        widest = max(row.shape[1] for row in rows)
        groups = [[jnp.pad(row, ((0, 0), (0, widest - row.shape[1]))) for row in rows]]
    totals: list[Any] = []
    for group in groups:
        x = jnp.concatenate(group)
        ends = np.cumsum([len(row) for row in group])[:-1]
        terms = (x != 0).astype(jnp.float32), jnp.abs(x), jnp.square(x)
        totals += zip(*(jnp.split(jnp.sum(term, 1), ends) for term in terms), strict=True)
    return [
        _Sums(nonzero / max(part.shape[1], 1), magnitude / max(part.shape[1], 1), power, share)
        for (part, share), (nonzero, magnitude, power) in zip(parts, totals, strict=True)
    ]


def _sampled(x: Any, samples: int | None) -> tuple[Any, float]:
    """About so many of the values, (examples, values), and which share of all values they are."""
    channels = x.shape[-1] if x.ndim else 1
    x = x.reshape(x.shape[0] if x.ndim > 1 else 1, -1)
    if samples is None:
        return x, 1.0
    every = max(1, x.shape[0] // _EXAMPLES)
    stride = max(1, x.size // (every * samples))
    while stride > 1 and math.gcd(stride, channels) > 1:  # or the same channels would be taken everywhere
        stride += 1
    part = x[::every, ::stride]
    return part, part.size / max(x.size, 1)


# Finds the equations of a pullback that multiply an encoded array with a cotangent into a gradient.

# After these primitives a gradient is still that gradient; collectives add it up over devices.
_SAME = VIEWS | REPLICATIONS | {"rev", "add_any", "psum", "psum_invariant"}


@dataclasses.dataclass(frozen=True)
class Reader:
    """An equation of a pullback that multiplies an encoded array with a cotangent into the gradient of an input.

    Attributes:
      layer: index of the array.
      cotangent: the operand that is a cotangent, L.
      share: the share of the sum of all L^2 that changes one entry of the gradient: one channel of all, and the positions at
        which a convolution's window does not meet its padding.
      weight: index of the pullback's output that is the gradient.
    """

    layer: int
    cotangent: Any
    share: float
    weight: int


def readers(pullback: Program, origins: dict[Any, int]) -> dict[int, Reader]:
    """The readers among the equations of a pullback, by the `id` of the equation. `origins` has the index of the encoded array
    that a residual comes from.
    """
    late, origins = pullback.flow.depending(pullback.invars), dict(origins)
    consumer = pullback.flow.consumers
    outputs = {var: i for i, var in reversed(list(enumerate(pullback.outvars))) if not is_literal(var)}
    readers: dict[int, Reader] = {}
    for eqn in pullback.eqns:
        operands = variables(eqn.invars)
        cts = [var for var in operands if var in late]
        stored = [origins[var] for var in operands if var in origins]
        if cts:
            if eqn.primitive.name in PRODUCTS and stored:
                weight = _output(eqn.outvars[0], consumer, outputs)
                if weight is not None:
                    readers[id(eqn)] = Reader(stored[0], cts[0], _share(eqn, cts[0]), weight)
        elif stored and eqn.primitive.name in _SAME:
            origins[eqn.outvars[0]] = stored[0]
    return readers


def only_in_gradients(pullback: Program, origins: dict[Any, Any]) -> set[Any]:
    """The encoded arrays that a pullback reads in convolutions and matrix products with cotangents alone, whose results are added
    to outputs. Outputs are linear in them. `origins` has the encoded array that a residual comes from.
    """
    late, stored, read_otherwise = pullback.flow.depending(pullback.invars), dict(origins), set()
    consumer = pullback.flow.consumers

    def ends_in_outputs(var):
        return all(
            eqn.primitive.name in _SAME and all(map(ends_in_outputs, eqn.outvars)) for eqn in consumer.get(var, [])
        )

    for eqn in pullback.eqns:
        operands, name = variables(eqn.invars), eqn.primitive.name
        arrays = [stored[var] for var in operands if var in stored]
        is_late = not late.isdisjoint(operands)
        if is_late and name in PRODUCTS and ends_in_outputs(eqn.outvars[0]):
            continue
        if not is_late and name in _SAME and len(arrays) == len(operands) == 1 and is_float(eqn.outvars[0].aval):
            stored[eqn.outvars[0]] = arrays[0]
        else:
            read_otherwise.update(arrays)
    read_otherwise.update(stored[var] for var in variables(pullback.outvars) if var in stored)
    return set(origins.values()) - read_otherwise


def _share(eqn: Any, ct: Any) -> float:
    """See `Reader.share`."""
    side, shape = int(eqn.invars[0] is not ct), ct.aval.shape
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive.name == "conv_general_dilated":
        # The transposed convolution: channels stand where a convolution has examples, or a kernel its outputs.
        return _reach(eqn) / shape[numbers[side][0]]
    contracting, batch = numbers
    return 1 / math.prod(size for axis, size in enumerate(shape) if axis not in (*contracting[side], *batch[side]))


def _reach(eqn: Any) -> float:
    """The share of all pairs of an output and a tap of the convolution's kernel that meets a value and not padding."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    shapes = zip((eqn.invars[0], eqn.invars[1], eqn.outvars[0]), numbers, strict=True)
    sizes = [[atom.aval.shape[axis] for axis in spec[2:]] for atom, spec in shapes]
    windows = zip(
        params["window_strides"], params["lhs_dilation"], params["rhs_dilation"], params["padding"], strict=True
    )
    share = 1.0
    for values, taps, outputs, (stride, spread, dilation, (low, _)) in zip(*sizes, windows, strict=True):
        at = np.arange(outputs)[:, None] * stride + np.arange(taps) * dilation - low
        share *= np.mean((at >= 0) & (at <= (values - 1) * spread) & (at % spread == 0))
    return float(share)


def _output(var: Any, consumer: dict[Any, list[Any]], outputs: dict[Any, int]) -> int | None:
    """The index of the output that is `var`, or a sum with it."""
    while var not in outputs:
        following = [eqn for eqn in consumer.get(var, []) if eqn.primitive.name in _SAME]
        if not following:
            return None
        var = following[0].outvars[0]
    return outputs[var]
