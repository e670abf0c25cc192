"""`choose_bits`: the fewest bits for each part of a model with which gradients are off by at most so much."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax._core import check
from memjax._core.clear_errors import call_errors
from memjax.compress._codecs.bits import PLANES
from memjax.compress._codecs.step_errors import StepErrors
from memjax.compress._training.array_bits import error_scale

_ROUNDS = 4  # of choosing and looking at what was chosen
MOST_KNOWN = 5  # choices, each of which is a training step to compile
WORTH = 0.9  # of the bytes: only then is another training step compiled
_FRONT = 4096  # choices for the first parts that are looked at


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
    reference: Any = None,
    known: Sequence[tuple[int, ...]] = (),
) -> ChosenBits:
    """The bits of each part, 8, 6, 4 or 3, with which the fewest bytes are kept and gradients are off by at most `sigma`.

    An error is that of a gradient's array over the norm of that array, or of the array of `reference` in its place; `sigma` is
    the root mean square over all arrays. Errors of parts are independent, so their squares add up, and they are in proportion
    to steps. So one gradient for each part, with random errors
    of 8 bits in it alone, tells what all choices do. What was chosen is then tried with the errors of its own bits, and the
    choice is made stricter if they are larger than predicted.

    Bits are part of a compiled program. Choosing again after, say, 1,000 steps compiles a training step again only where the bits
    have changed. Give what was chosen before as `known`: then other bits are chosen only where these are too coarse or keep
    10% more bytes, and with five of them, only 8 bits for all parts. So a training compiles six steps at most. Here two
    programs are compiled, or a few more if the choice has to be made stricter or known ones are tried.

    Args:
      gradient: a pytree of gradients, given a codec for each part: of `compressed(part, codec)`, say, for each layer.
      parts: how many there are.
      sigma: a positive number, such as 0.01.
      sizes: of what each part keeps, relative to each other. Default: all the same.
      seed: of the random errors.
      reference: what errors are compared with, a pytree like the gradients: AdamW's first moment, say,
        `optax.tree.get(state, "mu")`, which changes less from batch to batch than they do (Jin et al. 2020, equation 8).
      known: bits whose training steps are compiled.

    Raises:
      ValueError: `parts` is less than 1, `sigma` or a size is not positive, there are not as many sizes as parts, `known`
        has bits of another number of parts, the arrays of `reference` have other shapes than the gradients or are not finite;
        gradients are not finite, there are none, or the codec of a part changes none of them, as it is not used, or encodes
        nothing.
    """
    check.function("gradient", gradient, "gradient(codecs)", arguments=1)
    parts = check.integer("parts", parts, least=1)
    check.number("sigma", sigma, positive=True, fix="0.01 is one per cent")
    sizes = [1.0] * parts if sizes is None else sizes
    if not isinstance(sizes, Sequence | np.ndarray) or len(sizes) != parts:
        raise check.fail(ValueError, "sizes", f"{parts} positive numbers, one for each part", sizes)
    sizes = [check.number(f"sizes[{i}]", size, positive=True) for i, size in enumerate(sizes)]
    known, finest = _checked_known(known, parts), (max(_rungs()),) * parts

    @jax.jit
    def gradients_at_8_bits(scales: jax.Array) -> list[jax.Array]:
        codecs = [StepErrors(8, seed, scales[i]) for i in range(parts)]
        with call_errors("gradient", gradient, {f"{parts} codecs, one for each part": codecs}):
            return floats(gradient(codecs))

    only = lambda part, scale: gradients_at_8_bits(jnp.zeros(parts).at[part].set(scale))
    exact = gradients_at_8_bits(jnp.zeros(parts))
    compared = compared_with(reference, exact)
    error = lambda gradients: _error(gradients, exact, compared)
    alone = [error(only(i, 1)) for i in range(parts)]
    # A gradient that is zero has no errors. One that a codec reaches is not finite where its errors are not.
    ignored = [i for i, found in enumerate(alone) if found == 0 and are_finite(only(i, jnp.nan))]
    if ignored:
        raise ValueError(
            f"gradient must use the codec of each part, got one that codecs{ignored} of {parts} do not change: wrap each "
            "part, as memjax.compressed(part, codecs[i]), inside of what is differentiated, and leave out parts of which nothing "
            "is encoded"
        )

    def predicted(bits: tuple[int, ...]) -> float:
        return error(jax.jit(lambda: floats(gradient([StepErrors(b, seed) for b in bits])))())

    cost = lambda bits: sum(size * b for size, b in zip(sizes, bits, strict=True))
    if len(known) < MOST_KNOWN:
        fewest = lambda most: fewest_bits([e**2 for e in alone], sizes, most**2)
        new = ChosenBits(*bits_within(sigma, fewest, predicted), tuple(alone))
    else:
        new = ChosenBits(finest, predicted(finest), tuple(alone))
    for bits in sorted(set(known), key=cost):
        is_near = WORTH * cost(bits) <= cost(new.bits)
        if is_near and (found := predicted(bits)) <= max(sigma, new.sigma):
            return ChosenBits(bits, found, tuple(alone))
    return new


def compared_with(reference: Any, exact: list[jax.Array]) -> list[jax.Array]:
    """What errors are compared with: the arrays of `reference`, by default those of the exact gradient."""
    if not exact:
        raise ValueError(
            "gradient must return floating-point arrays, got none: return jax.grad(loss)(params), for example"
        )
    if not are_finite(exact):
        shapes = [leaf.shape for leaf in exact if not are_finite([leaf])]
        raise check.fail(ValueError, "gradient", "one that gives finite gradients", shapes, "look at the loss")
    compared = exact if reference is None else floats(reference)
    if [leaf.shape for leaf in compared] != [leaf.shape for leaf in exact]:
        wanted = [leaf.shape for leaf in exact]
        raise check.fail(ValueError, "reference", f"arrays of the shapes {wanted}", [leaf.shape for leaf in compared])
    if not are_finite(compared):
        shapes = [leaf.shape for leaf in compared if not are_finite([leaf])]
        raise check.fail(ValueError, "reference", "finite arrays", shapes, "look at the loss of the steps before")
    if reference is not None and not any(bool(leaf.any()) for leaf in compared):
        shapes = [leaf.shape for leaf in compared]
        raise check.fail(
            ValueError, "reference", "arrays that are not all zero", shapes, "pass None before the first step"
        )
    return compared


def are_finite(arrays: Sequence[jax.Array]) -> bool:
    return all(bool(jnp.isfinite(array).all()) for array in arrays)


def _checked_known(known: Any, parts: int) -> list[tuple[int, ...]]:
    rungs = _rungs()
    wanted = f"tuples of {parts} of the numbers {rungs}"
    if not isinstance(known, Sequence) or any(not isinstance(bits, Sequence) for bits in known):
        raise check.fail(TypeError, "known", wanted, known)
    if any(len(bits) != parts or not set(bits) <= set(rungs) or float in map(type, bits) for bits in known):
        raise check.fail(ValueError, "known", wanted, known)
    return [tuple(bits) for bits in known]


def bits_within(
    sigma: float, fewest: Callable[[float], tuple[int, ...]], predicted: Callable[[tuple[int, ...]], float]
) -> tuple[tuple[int, ...], float]:
    """Bits and their predicted error: `fewest(most)`, with `most` made smaller until what is predicted is at most `sigma`."""
    most, bits = sigma, fewest(sigma)
    error = predicted(bits)
    for _ in range(_ROUNDS - 1):
        if error <= sigma:
            break
        most /= 1.05 * error / sigma
        if (finer := fewest(most)) != bits:
            bits, error = finer, predicted(finer)
    return bits, error


def fewest_bits(
    squares: Sequence[float], sizes: Sequence[float], most: float, choices: Sequence[Sequence[int]] | None = None
) -> tuple[int, ...]:
    """The bits for each part with which `sizes` times bits is least, and the sum of squares at most `most`; the most if none are.

    Of choices for the first parts only those matter that no other beats in both bits and error. If they are at most 4,096, as
    where sizes are equal, the result is the best of all choices. Of more, those are looked at that have the least error in
    each of so many equal ranges of bits.

    Args:
      squares: the square of each part's error at 8 bits.
      sizes: the number of values of each part.
      most: what the sum of squares may be.
      choices: the bits that each part may have, most first; with its own 16 or 32 it has no error. Default: 8, 6, 4 and 3.
    """
    choices = [_rungs()] * len(squares) if choices is None else choices
    front: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    least = [square * error_scale(own[0]) ** 2 for square, own in zip(squares, choices, strict=True)]
    needed = [sum(least[i:]) for i in range(1, len(least) + 1)]  # by the parts that follow, with the most bits
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


def _rungs() -> list[int]:
    return sorted(PLANES.keys() - {5}, reverse=True)  # bits=4 gives 5 where these matter


def floats(gradients: Any) -> list[jax.Array]:
    """The floating-point arrays of a pytree, as float32."""
    arrays = [leaf for leaf in jax.tree.leaves(gradients) if check.is_array(leaf)]
    return [leaf.astype(jnp.float32) for leaf in arrays if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _error(gradients: list[jax.Array], exact: list[jax.Array], compared: list[jax.Array]) -> float:
    """The root mean square of errors relative to `compared`; arrays that are zero there are left out."""
    wide = ([np.asarray(leaf, np.float64) for leaf in leaves] for leaves in (gradients, exact, compared))
    shares = [np.sum((a - b) ** 2) / np.sum(c**2) for a, b, c in zip(*wide, strict=True) if c.any()]
    return float(np.sqrt(np.mean(shares))) if shares else 0.0
