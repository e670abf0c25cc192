"""`choose_bits`: the fewest bits for each part of a model with which gradients are off by at most so much."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax._core import check
from memjax.compress._codecs.planes import PLANES
from memjax.compress._codecs.step_errors import StepErrors

_ROUNDS = 4  # of choosing and looking at what was chosen


@dataclasses.dataclass(frozen=True)
class ChosenBits:
    """What `choose_bits` found.

    Attributes:
      bits: for each part.
      sigma: the predicted error of gradients with these bits; above what was asked for if 8 bits are not enough.
      alone: for each part, the error if it alone had 8 bits and all else were exact.
    """

    bits: tuple[int, ...]
    sigma: float
    alone: tuple[float, ...]


def choose_bits(
    gradient: Callable[[Sequence[StepErrors]], Any],
    parts: int,
    sigma: float,
    *,
    sizes: Sequence[float] | None = None,
    seed: int = 0,
) -> ChosenBits:
    """The bits of each part, 8, 6, 4 or 3, with which the fewest bytes are kept and gradients are off by at most `sigma`.

    An error is that of a gradient's array over its norm; `sigma` is the root mean square over all arrays. Errors of parts are
    independent, so their squares add up, and they are in proportion to steps. So one gradient for each part, with random errors
    of 8 bits in it alone, tells what all choices do. What was chosen is then tried with the errors of its own bits, and the
    choice is made stricter if they are larger than predicted.

    Bits are part of a compiled program. Choosing again after, say, 1,000 steps compiles a training step again only where the bits
    have changed. Here two programs are compiled, or up to five if the choice has to be made stricter.

    Args:
      gradient: a pytree of gradients, given a codec for each part: of `compressed(part, codec)`, say, for each layer.
      parts: how many there are.
      sigma: a positive number, such as 0.01.
      sizes: of what each part keeps, relative to each other. Default: all the same.
      seed: of the random errors.

    Raises:
      ValueError: `parts` is less than 1, `sigma` or a size is not positive, or there are not as many sizes as parts.
    """
    check.function("gradient", gradient, "gradient(codecs)", arguments=1)
    parts = check.integer("parts", parts, least=1)
    check.number("sigma", sigma, positive=True, fix="0.01 is one per cent")
    sizes = [1.0] * parts if sizes is None else list(sizes)
    if len(sizes) != parts or not all(size > 0 for size in sizes):
        raise check.fail(ValueError, "sizes", f"{parts} positive numbers, one for each part", sizes)

    @jax.jit
    def gradients_at_8_bits(scales: jax.Array) -> list[jax.Array]:
        return _leaves(gradient([StepErrors(8, seed, scales[i]) for i in range(parts)]))

    exact = gradients_at_8_bits(jnp.zeros(parts))
    alone = [_error(gradients_at_8_bits(jnp.zeros(parts).at[i].set(1)), exact) for i in range(parts)]
    stricter = 1.0
    for _ in range(_ROUNDS):
        bits = fewest_bits([error**2 for error in alone], sizes, (sigma / stricter) ** 2)
        chosen = jax.jit(lambda bits=bits: _leaves(gradient([StepErrors(b, seed) for b in bits])))
        predicted = _error(chosen(), exact)
        if predicted <= sigma or set(bits) == {8}:
            break
        stricter *= 1.05 * predicted / sigma
    return ChosenBits(bits, predicted, tuple(alone))


def fewest_bits(squares: Sequence[float], sizes: Sequence[float], most: float) -> tuple[int, ...]:
    """The bits for each part with which `sizes` times bits is least, and the sum of squares at most `most`.

    From 8 bits for all, again and again what saves most for its error: optimal but for the last step.

    Args:
      squares: the square of each part's error at 8 bits.
      sizes: the number of values of each part.
      most: what the sum of squares may be.
    """
    rungs = sorted(PLANES.keys() - {5}, reverse=True)  # bits=4 gives 5 where these matter
    level = [0] * len(squares)
    square = lambda i, at: squares[i] * ((2**8 - 1) / (2 ** rungs[at] - 1)) ** 2
    total = sum(square(i, 0) for i in range(len(squares)))
    while True:
        steps = []
        for i, at in enumerate(level):
            # To any lower rung at once: a rung that pays little may stand before one that pays.
            for to in range(at + 1, len(rungs)):
                added = square(i, to) - square(i, at)
                if total + added <= most:
                    saved = sizes[i] * (rungs[at] - rungs[to])
                    steps.append((saved / added if added > 0 else math.inf, saved, i, to))
        if not steps:
            return tuple(rungs[at] for at in level)
        _, _, i, to = max(steps)
        total += square(i, to) - square(i, level[i])
        level[i] = to


def _leaves(gradients: Any) -> list[jax.Array]:
    return [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(gradients) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _error(gradients: list[jax.Array], exact: list[jax.Array]) -> float:
    """The root mean square of relative errors; arrays without a gradient are left out."""
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(gradients, exact, strict=True)]
    shares = [np.sum((a - b) ** 2) / np.sum(b**2) for a, b in pairs if b.any()]
    return float(np.sqrt(np.mean(shares))) if shares else 0.0
