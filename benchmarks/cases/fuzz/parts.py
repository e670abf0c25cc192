"""What random programs are made of: parts, functions from a stream of features to another one of the same shape."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

Params = list[Any]
Data = dict[str, Any]
Apply = Callable[[Params, jax.Array, Data], jax.Array]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the residual stream, which has the shape (batch * length, width)."""

    batch: int
    length: int
    width: int

    @property
    def rows(self) -> int:
        return self.batch * self.length


@dataclasses.dataclass(frozen=True)
class Part:
    """A function of a stream.

    Args:
      params: NumPy arrays that it is differentiated by, and integers.
      apply: from (params, stream, data) to a stream. Data are the same for all parts: see `programs.data`.
      name: what it is, for people.
    """

    params: Params
    apply: Apply
    name: str


class Maker:
    """Makes one part: its parameters are those asked for.

    Args:
      rng: decides all that is random.
      shape: of the stream.
    """

    def __init__(self, rng: np.random.Generator, shape: Shape):
        self.rng, self.shape = rng, shape
        self.params: Params = []

    def weight(self, *shape: int, scale: float | None = None) -> int:
        """The number of a new parameter, whose products are about as large as what is multiplied by it."""
        size = scale if scale is not None else 1 / np.sqrt(np.prod(shape[:-1]))
        self.params.append(size * self.rng.normal(size=shape))
        return len(self.params) - 1

    def constant(self, value: np.ndarray) -> int:
        """The number of a new parameter that is not differentiated: integers."""
        self.params.append(value)
        return len(self.params) - 1

    def one_of(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)


def joined(parts: Sequence[Part]) -> tuple[Params, Callable[[Params, int], Params]]:
    """The parameters of several parts in one list, and what picks those of one of them."""
    ends = np.cumsum([len(part.params) for part in parts])
    starts = ends - [len(part.params) for part in parts]
    return [leaf for part in parts for leaf in part.params], lambda params, i: params[starts[i] : ends[i]]
