"""What a backward pass finds out about each encoded array: see `Statistics`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memjax._core.compat import varying
from memjax.compress._training.layers import LADDER, Statistics
from memjax.compress._transform.readers import Reader

_EXAMPLES = 256
"""Samples are taken from about so many, at most twice as many: rather from many than many of each, for late in training a
few examples have most of the loss. The usual number of samples is few enough to be added up in one small kernel."""


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
            axes = tuple(varying(jax.typeof(found)) - varying(jax.typeof(wanted)))
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
    """Of samples, as rows of one matrix: that makes one kernel."""
    parts = [_some(x, samples) for x in arrays]
    rows = [part.astype(jnp.float32) for part, _ in parts]
    groups = [[row] for row in rows]
    if samples is not None:
        widest = max(row.shape[1] for row in rows)
        groups = [[jnp.pad(row, ((0, 0), (0, widest - row.shape[1]))) for row in rows]]
    found: list[Any] = []
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
