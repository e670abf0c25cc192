"""Random programs: a loss of parameters, a stream and data, from a seed."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases.fuzz.around import AROUND, residual
from benchmarks.cases.fuzz.indexing import INDEXING
from benchmarks.cases.fuzz.loops import LOOPS_ALONE
from benchmarks.cases.fuzz.operations import OPERATIONS
from benchmarks.cases.fuzz.parts import Data, Maker, Params, Part, Shape, joined

_DEPTH = 3  # of parts round parts
_LOOPS = 0.2  # of the parts that are not round others
_MOST = 9  # parts of a program


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss and its arguments.

    Args:
      loss: of (parameters that are differentiated, stream, those that are not, data).
      args: of it.
      has_aux: it has other results.
      parts: names of what it is made of.
    """

    loss: Callable[..., Any]
    args: tuple[Params, jax.Array, Params, Data]
    has_aux: bool
    parts: tuple[str, ...]


class _Grammar:
    def __init__(self, rng: np.random.Generator, shape: Shape):
        self._rng, self._shape, self._left = rng, shape, _MOST

    def part(self, depth: int) -> Part:
        m = Maker(self._rng, self._shape)
        self._left -= 1
        if depth and self._left > 0 and m.chance(0.55):
            make = m.one_of(*AROUND)
            names: list[str] = []

            def inner() -> Part:
                names.append((part := self.part(depth - 1)).name)
                return part

            apply = make(m, inner)
            return Part(m.params, apply, f"{make.__name__}({', '.join(names)})")
        make = m.one_of(*(LOOPS_ALONE if m.chance(_LOOPS) else INDEXING if m.chance(0.35) else OPERATIONS))
        apply = make(m)
        return Part(m.params, apply, make.__name__)

    def layers(self) -> list[Part]:
        """A stack of layers of a few kinds, most of them round a stream."""
        kinds = int(self._rng.integers(1, 4))
        parts = []
        for _ in range(kinds):
            m = Maker(self._rng, self._shape)
            if m.chance(0.6):
                inside = self.part(_DEPTH - 1)
                apply = residual(m, functools.partial(copy.copy, inside))
                parts.append(Part(m.params, apply, f"residual({inside.name})"))
            else:
                parts.append(self.part(_DEPTH))
        # Layers that are alike have parameters of their own, or the same ones.
        return parts * int(self._rng.integers(2, 5 if kinds == 1 else 4 if self._left > 8 else 3))


def program(seed: int) -> Program:
    """The program of a seed."""
    rng = np.random.default_rng(seed)
    batch, rows, width = (int(rng.choice(sizes)) for sizes in ([2, 4], [64, 128, 256], [8, 16, 32]))
    shape = Shape(batch, rows // batch, width)
    m = Maker(rng, shape)
    parts, shared = _Grammar(rng, shape).layers(), m.chance(0.2)
    params, of = joined(list({id(part): part for part in parts}.values()) if shared else parts)
    places = {id(part): i for i, part in enumerate({id(part): part for part in parts}.values())}
    head, has_aux, kind = len(params), m.chance(0.3), m.one_of("squares", "classes", "contrast", "weighted")
    params.append(rng.normal(size=(shape.width, int(rng.choice([32, 128, 512])))) / shape.width**0.5)
    # JAX's arrays for all of them; a copy of each, so that layers that are alike do not share what is donated.
    leaves = [jnp.array(leaf) for leaf in params]
    floats = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def loss(given, h, others, data):
        given, others = iter(given), iter(others)
        own = [next(given) if one else next(others) for one in floats]
        data = data | {"first": h}
        for i, part in enumerate(parts):
            h = part.apply(of(own, places[id(part)] if shared else i), h, data)
        h = h * jax.lax.rsqrt(1 + jnp.mean(h**2))
        value = _value(kind, h, own[head], data)
        return (value, {"last": h.mean(0), "step": data["step"] + 1}) if has_aux else value

    split = lambda wanted: [leaf for leaf, one in zip(leaves, floats, strict=True) if one == wanted]
    args = split(True), jnp.asarray(rng.normal(size=(shape.rows, shape.width))), split(False), data(rng, shape)
    return Program(loss, args, has_aux, tuple(part.name for part in parts))


def data(rng: np.random.Generator, shape: Shape) -> Data:
    """What is not differentiated."""
    return {
        "ids": jnp.asarray(rng.integers(0, 1000, shape.rows)),
        "key": jax.random.key(int(rng.integers(1000))),
        "mask": jnp.asarray(rng.random((shape.rows, shape.width)) < 0.7),
        "step": jnp.int32(rng.integers(0, 6)),
    }


def _value(kind: str, h: jax.Array, head: jax.Array, data: Data) -> jax.Array:
    if kind == "squares":
        return jnp.mean(jnp.sin(h) ** 2) + jnp.mean(jnp.tanh(h @ head))
    if kind == "classes":
        logits = jax.nn.log_softmax(h @ head)
        return -jnp.mean(jnp.take_along_axis(logits, (data["ids"] % head.shape[1])[:, None], 1))
    if kind == "contrast":
        small = jnp.tanh(h @ head[:, :16])
        scores = small @ small.T
        return jnp.mean(jax.nn.logsumexp(scores, 1) - jnp.diag(scores))
    weights = jnp.where(data["mask"], 1.0, 0.3)
    return jnp.sum(weights * jnp.log1p(h**2)) / jnp.sum(weights) + jnp.mean(jax.nn.gelu(h @ head) ** 2)
