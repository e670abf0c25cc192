"""`ArrayBits`: the bits of each array that `compressed` encodes. Also the allowed bits, and a search for the fewest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from memjax._core import check
from memjax.compress._codecs.bits import widths_with

CODED = widths_with("planes")
"""The bits per value that an array may have, most first."""

BITS = tuple(bits for bits in reversed(CODED) if bits != 5)
"""Those that `memjax.compressed` takes for all arrays; with 4 some get 5."""

WIDE = 8
"""Bits, at least, of what has values of very unequal sizes, or has to be fine."""

_WHOLE = (16, 32)  # bits of floats that are kept as they are
_GAUSSIAN = 1.5  # the range of 128 Gaussian values in deviations, 5.2, over the root of 12
_FRONT = 4096  # choices for the first arrays that are looked at
_MADE_BY = "make it with memjax.compress.fit_bits from the gradient that is trained with"


@dataclasses.dataclass(frozen=True, repr=False)
class ArrayBits:
    """Bits for each array that one call of `compressed` encodes: its argument `bits`. `memjax.compress.fit_bits` makes it.

    What is encoded and what is recomputed is decided as for `bits=base`. The arrays take their bits in the order of the
    forward pass; calls that share an `ArrayBits` share the bits.

    Attributes:
      base: 8, 6, 4 or 3.
      bits: for each array 8, 6, 5, 4 or 3, or its own 16 or 32: then it is kept as it is. What convolutions and batch norms
        read has 8, 4 or its own.
      names: of the arrays, for messages.

    Raises:
      ValueError: `base` or one of `bits` is none of these, or there are not as many names as bits.
    """

    base: int
    bits: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_bits(self.base, "base")
        numbers = isinstance(self.bits, tuple) and float not in map(type, self.bits)
        if not numbers or not set(self.bits) <= {*CODED, *_WHOLE}:
            raise check.fail(ValueError, "bits", f"a tuple of the numbers {(*CODED, *_WHOLE)}", self.bits, _MADE_BY)
        texts = isinstance(self.names, tuple) and all(isinstance(name, str) for name in self.names)
        if not texts or (self.names and len(self.names) != len(self.bits)):
            raise check.fail(ValueError, "names", f"{len(self.bits)} names, one for each array", self.names, _MADE_BY)

    def __repr__(self) -> str:
        """A line for each array."""
        if not self.bits:
            return f"ArrayBits(base={self.base}, nothing is encoded: codes are no smaller, or values must be exact)"
        names = self.names or [f"array {i}" for i in range(len(self.bits))]
        say = lambda bits: "as it is" if is_whole(bits) else f"{bits} bits"
        lines = [f"  {name}: {say(bits)}" for name, bits in zip(names, self.bits, strict=True)]
        return "\n".join([f"ArrayBits({len(lines)} arrays, base={self.base})", *lines])

    def errors(self, seed: Any = 0) -> Any:
        """What predicts the errors of these bits: in their place, `compressed` adds random errors as large as those of the codes,
        and encodes nothing.

        Args:
          seed: of the errors: an integer, which may be traced.
        """
        return Errors(self.base, np.array([error_scale(bits) for bits in self.bits], np.float32), seed)

    def check_count(self, arrays: int) -> None:
        """Raises ValueError if a call encodes another number of arrays."""
        if arrays != len(self.bits):
            raise ValueError(
                f"bits must be those of the {arrays} arrays that are encoded, got bits of {len(self.bits)}: {_MADE_BY}"
            )


@jax.tree_util.register_static
class BitsRecorder:
    """Stands for an `ArrayBits` while a gradient is traced, and records which arrays are encoded.

    Attributes:
      base: see `ArrayBits`.
      names, sizes: of the arrays.
      choices: the bits that each may have, most first.
    """

    def __init__(self, base: int):
        self.base = base
        self.names: tuple[str, ...] | None = None
        self.sizes: tuple[int, ...] = ()
        self.choices: tuple[tuple[int, ...], ...] = ()

    def record(self, names: Sequence[str], sizes: Sequence[int], choices: Sequence[tuple[int, ...]]) -> None:
        found = tuple(sizes), tuple(choices)
        if self.names is not None and found != (self.sizes, self.choices):
            raise ValueError(
                "gradient must not share bits between calls that encode different arrays: count them as parts"
            )
        self.names, (self.sizes, self.choices) = tuple(names), found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Errors:
    """Stands for bits: `compressed` encodes nothing, and adds random errors in place of codes. Gradients are off by as much.

    Attributes:
      base: what would be encoded is decided as for `bits=base`.
      scales: (n,) float32: the errors of array i are those of 8 bits, `scales[i]` times as large. None: those of `bits=base`.
      seed: of the errors.
    """

    base: int = dataclasses.field(metadata={"static": True})
    scales: Any = None
    seed: Any = 0


def check_bits(bits: Any, name: str = "bits") -> int:
    """That it is a number of bits for all arrays."""
    bits = check.integer(name, bits)
    if bits not in BITS:
        raise check.fail(ValueError, name, f"one of {BITS}", bits)
    return bits


def check_sigma(sigma: Any) -> float:
    return check.number("sigma", sigma, positive=True, fix="0.01 is one per cent")


def is_whole(bits: int) -> bool:
    """Whether these bits stand for an array that is kept as it is."""
    return bits in _WHOLE


def error_scale(bits: int) -> float:
    """How many times as large the errors of these bits are as those of 8."""
    return 0.0 if is_whole(bits) else (2**8 - 1) / (2**bits - 1)


def gaussian_error(bits: int) -> float:
    """The relative error of a Gaussian array with these bits: its standard deviation over that of the array."""
    return _GAUSSIAN / (2**8 - 1) * error_scale(bits)


def base_of(sigma: float) -> int:
    """The fewest bits for all arrays with which a Gaussian array is off by at most `sigma`; 8 if none are."""
    return next((bits for bits in BITS if gaussian_error(bits) <= sigma), BITS[-1])


def fewest_bits(
    squares: Sequence[float], sizes: Sequence[float], most: float, choices: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """The bits of each array with which `sizes` times bits is least, and the sum of squares at most `most`; the most if none are.

    Of choices for the first arrays only those matter that no other beats in both bits and error. If they are at most 4,096, as
    where sizes are equal, the result is the best of all choices. Of more, those are looked at that have the least error in
    each of so many equal ranges of bits.

    Args:
      squares: the square of each array's error at 8 bits.
      sizes: the number of values of each.
      most: what the sum of squares may be.
      choices: the bits that each may have, most first; with its own 16 or 32 an array has no error.
    """
    front: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    least = [square * error_scale(own[0]) ** 2 for square, own in zip(squares, choices, strict=True)]
    needed = [sum(least[i:]) for i in range(1, len(least) + 1)]  # by the arrays that follow, with the most bits
    for square, size, rungs, of_others in zip(squares, sizes, choices, needed, strict=True):
        every = [
            (cost + size * bits, total + square * error_scale(bits) ** 2, (*before, bits))
            for cost, total, before in front
            for bits in rungs
        ]
        front = []
        for choice in sorted(every):
            allowed = choice[1] + of_others <= most
            if allowed and (not front or choice[1] < front[-1][1]):
                front.append(choice)
        if len(front) > _FRONT:
            width = (front[-1][0] - front[0][0]) / _FRONT
            of_range = {
                int((choice[0] - front[0][0]) / width): choice for choice in front
            }  # the last has the least error
            front = list(of_range.values())
    return front[0][2] if front else tuple(own[0] for own in choices)
