"""What a backward pass finds out about each encoded array: see `Statistics`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memjax._jaxpr import is_literal
from memjax.compress._layers import LADDER, Statistics
from memjax.remat._step import is_float

_PRODUCTS = ("conv_general_dilated", "dot_general")
_SAME = {"convert_element_type", "reshape", "squeeze", "expand_dims", "transpose", "copy", "rev", "add_any"}
_SAME |= {"psum", "psum_invariant", "pvary", "pcast"}  # which add a gradient up over devices
_EXAMPLES = 256
"""Samples are taken from about so many, at most twice as many: rather from many than many of each, for late in training a
few examples have most of the loss. The usual number of samples is few enough to be added up in one small kernel."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """An equation of a pullback that multiplies an encoded array with a cotangent into the gradient of an input.

    Attributes:
      layer: which array.
      cotangent: the equation's operand.
      share: of the sum of L^2 that changes one entry of the gradient: one of the channels, and of the positions those where a
        convolution's window does not reach into its padding.
      weight: index of the pullback's output.
    """

    layer: int
    cotangent: Any
    share: float
    weight: int


def readers(jaxpr: Any, cotangents: set[Any], origins: dict[Any, int]) -> dict[int, Reader]:
    """By `id` of an equation of the pullback `jaxpr`.

    Args:
      jaxpr: the pullback's, calls in place.
      cotangents: its inputs that are cotangents.
      origins: by input that comes from an encoded array, which.
    """
    late, origins = set(cotangents), dict(origins)
    consumers = _consumers(jaxpr)
    outputs = {var: i for i, var in reversed(list(enumerate(jaxpr.outvars))) if not is_literal(var)}
    found = {}
    for eqn in jaxpr.eqns:
        operands = [atom for atom in eqn.invars if not is_literal(atom)]
        cts = [atom for atom in operands if atom in late]
        stored = [origins[atom] for atom in operands if atom in origins]
        if cts:
            late.update(eqn.outvars)
            if eqn.primitive.name in _PRODUCTS and stored:
                weight = _output(eqn.outvars[0], consumers, outputs)
                if weight is not None:
                    found[id(eqn)] = Reader(stored[0], cts[0], _share(eqn, cts[0]), weight)
        elif stored and eqn.primitive.name in _SAME:
            origins[eqn.outvars[0]] = stored[0]
    return found


def only_in_gradients(jaxpr: Any, cotangents: set[Any], origins: dict[Any, Any]) -> set[Any]:
    """Those of the encoded arrays that the pullback multiplies with cotangents into its outputs, by convolutions and matrix
    products, and does nothing else with. Outputs are linear in them.

    Args:
      jaxpr, cotangents: see `readers`.
      origins: by input that comes from an encoded array, that array.
    """
    late, stored, others = set(cotangents), dict(origins), set()
    consumers = _consumers(jaxpr)

    def ends_in_outputs(var):
        return all(
            eqn.primitive.name in _SAME and all(map(ends_in_outputs, eqn.outvars)) for eqn in consumers.get(var, [])
        )

    for eqn in jaxpr.eqns:
        operands = [atom for atom in eqn.invars if not is_literal(atom)]
        own = [stored[atom] for atom in operands if atom in stored]
        name, out = eqn.primitive.name, eqn.outvars[0]
        is_late = any(atom in late for atom in operands)
        if is_late:
            late.update(eqn.outvars)
        if is_late and name in _PRODUCTS and ends_in_outputs(out):
            continue
        if not is_late and name in _SAME and len(own) == len(operands) == 1 and is_float(out.aval):
            stored[out] = own[0]
        else:
            others.update(own)
    others.update(stored[atom] for atom in jaxpr.outvars if not is_literal(atom) and atom in stored)
    return set(origins.values()) - others


def _consumers(jaxpr: Any) -> dict[Any, list[Any]]:
    """The equations that read each variable."""
    consumers: dict[Any, list[Any]] = {}
    for eqn in jaxpr.eqns:
        for atom in eqn.invars:
            if not is_literal(atom):
                consumers.setdefault(atom, []).append(eqn)
    return consumers


def _share(eqn: Any, ct: Any) -> float:
    side, shape = int(eqn.invars[0] is not ct), ct.aval.shape
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive.name == "conv_general_dilated":
        # The transposed convolution: channels stand where a convolution has examples, or a kernel its outputs.
        return _reach(eqn) / shape[numbers[side][0]]
    contracting, batch = numbers
    return 1 / math.prod(size for axis, size in enumerate(shape) if axis not in (*contracting[side], *batch[side]))


def _reach(eqn: Any) -> float:
    """Of all pairs of an output and a tap of the convolution's kernel, the share that meets a value and not padding."""
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


def _output(var: Any, consumers: dict[Any, list[Any]], outputs: dict[Any, int]) -> int | None:
    """The output that is `var`, or a sum with it."""
    while var not in outputs:
        following = [eqn for eqn in consumers.get(var, []) if eqn.primitive.name in _SAME]
        if not following:
            return None
        var = following[0].outvars[0]
    return outputs[var]


class Collector:
    """Gathers `Statistics` of one backward pass.

    What is known of an array are numbers and vectors by example; they are put together at the end, all at once: on a GPU the
    number of kernels counts, each of which does next to nothing.

    Args:
      like: the statistics to be found, in type.
      samples: see `Layers`.
      seen: cotangents and codes. All statistics depend on all of them, though only in form: each counts once per example of a
        `vmap` and per device then, as derivatives do.
    """

    def __init__(self, like: Statistics, samples: int | None, seen: Any):
        firsts = [jnp.ravel(x)[0] == jnp.zeros((), x.dtype) for x in jax.tree.leaves(seen) if x.size]
        self._nothing = sum(jnp.where(first, jnp.float32(0), jnp.float32(0)) for first in firsts)
        self._like, self._samples = like, samples
        self._layers, self._width = like.power.shape
        self._codes: dict[int, tuple[Any, Any, float]] = {}
        self._decoded: dict[int, tuple[Any, Any]] = {}
        self._cotangents: dict[tuple[int, int], tuple[Any, Any, float]] = {}

    def code(self, layer: int, code: Any, shape: Sequence[int]) -> None:
        """What the code of an array of this shape says of itself."""
        self._codes[layer] = code.needed_bits_per_value, code.overflowed, float(shape[0] if shape else 1)

    def decoded(self, layer: int, x: Any) -> None:
        """What is read of an array, if nothing has been said of that by `cotangent`."""
        if layer not in self._decoded:
            [found] = _found_in([x], self._samples)
            self._decoded[layer] = found.nonzero, found.magnitude

    def cotangent(self, reader: Reader, ct: Any, x: Any) -> None:
        """Of one more reader of its array, and what it reads."""
        layer = reader.layer
        found, *rest = _found_in([ct] if layer in self._decoded else [ct, x], self._samples)
        for of_read in rest:
            self._decoded[layer] = of_read.nonzero, of_read.magnitude
        seen = sum(other == layer for other, _ in self._cotangents)
        self._cotangents[layer, seen] = found.magnitude, found.power, reader.share / found.share

    def sums(self) -> Statistics:
        """What devices of a `shard_map` found is added up, if they share the bounds."""

        def added(found, wanted):
            found = found + self._nothing
            axes = tuple(jax.typeof(found).manual_axis_type.varying - jax.typeof(wanted).manual_axis_type.varying)
            return lax.psum(found, axes) if axes else found

        return jax.tree.map(added, self._found(), self._like)

    def _found(self) -> Statistics:
        bits, overflows, examples = (self._each(field) for field in range(3))
        used = jnp.asarray([float(layer in self._codes) for layer in range(self._layers)], jnp.float32)
        # A code of exactly a rung's size fits.
        rung = jnp.sum(bits[:, None] > jnp.asarray(LADDER) * (1 + 1e-6), 1)
        needed = jax.nn.one_hot(rung, len(LADDER) + 1, dtype=jnp.float32) * used[:, None]
        places = [(layer, i) for layer in range(self._layers) for i in range(self._width)]
        means, powers = (
            [self._cotangents[at][field] if at in self._cotangents else None for at in places] for field in (0, 1)
        )
        factors = [self._cotangents[at][2] if at in self._cotangents else 0.0 for at in places]
        table = (self._layers, self._width)
        pairs = [self._decoded.get(layer, (None, None)) for layer in range(self._layers)]
        nonzero, magnitude = (_totals([pair[field] for pair in pairs], mean=True) for field in (0, 1))
        return Statistics(
            uses=used,
            examples=examples,
            nonzero=nonzero,
            magnitude=magnitude,
            bits=bits,
            overflows=overflows,
            needed=needed,
            cotangent=_totals(means, mean=True).reshape(table),
            power=(_totals(powers, mean=False) * jnp.asarray(factors, jnp.float32)).reshape(table),
        )

    def _each(self, field: int) -> Any:
        """Of every code."""
        numbers = [self._codes[layer][field] if layer in self._codes else 0.0 for layer in range(self._layers)]
        return jnp.stack([jnp.asarray(number, jnp.float32) for number in numbers])


def _totals(vectors: Sequence[Any], *, mean: bool) -> Any:
    """The sum, or the mean, of each vector; 0 of None."""
    longest = max((len(vector) for vector in vectors if vector is not None), default=0)
    rows, lengths = [], []
    for vector in vectors:
        vector = jnp.zeros(0, jnp.float32) if vector is None else vector
        lengths.append(max(len(vector), 1) if mean else 1)
        rows.append(jnp.pad(vector, (0, longest - len(vector))))
    return jnp.sum(jnp.stack(rows), 1) / jnp.asarray(lengths, jnp.float32)


class _Found(NamedTuple):
    """In some of an array's values, by example.

    Attributes:
      nonzero: their share that is not zero.
      magnitude: their mean magnitude.
      power: the sum of their squares.
      share: of all values, how many these are.
    """

    nonzero: Any
    magnitude: Any
    power: Any
    share: float


def _found_in(arrays: Sequence[Any], samples: int | None) -> list[_Found]:
    """Of samples as rows of one matrix: that makes one kernel."""
    parts = [_some(x, samples) for x in arrays]
    widest = max(part.shape[1] for part, _ in parts)
    rows = [jnp.pad(part.astype(jnp.float32), ((0, 0), (0, widest - part.shape[1]))) for part, _ in parts]
    groups = [rows] if samples is not None else [[row] for row in rows]
    found = []
    for group in groups:
        x = jnp.concatenate(group)
        sums = [jnp.sum(of, 1) for of in ((x != 0).astype(jnp.float32), jnp.abs(x), jnp.square(x))]
        ends = np.cumsum([len(row) for row in group])[:-1]
        found += zip(*(jnp.split(total, ends) for total in sums), strict=True)
    return [
        _Found(nonzero / max(part.shape[1], 1), magnitude / max(part.shape[1], 1), power, share)
        for (part, share), (nonzero, magnitude, power) in zip(parts, found, strict=True)
    ]


def _some(x: Any, samples: int | None) -> tuple[Any, float]:
    """Part of the values, (examples, values), and which share of them it is."""
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
