"""`fit_bits`: the fewest bits for each encoded array with which gradients are off by at most so much, from gradients.

The same idea as `adaptive`, for codes whose rate is a part of the compiled program: errors are predicted from the size of the
steps of codes, and what was chosen is looked at again now and then, on the host.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax._core import check
from memjax._core.clear_errors import call_errors
from memjax.compress._training.array_bits import (
    BITS,
    ArrayBits,
    BitsRecorder,
    Errors,
    base_of,
    check_bits,
    check_sigma,
    error_scale,
    fewest_bits,
)

_ROUNDS = 4  # of choosing and looking at what was chosen
_MOST_KNOWN = 5  # choices, each of which is a training step to compile
_WORTH = 0.9  # of the bytes: only then is another training step compiled
Bits = tuple[int, ...]
_SMALL = 1e-3  # of the size of the gradient's other values: an array of smaller ones is zero but for rounding


@dataclasses.dataclass(frozen=True)
class FittedBits:
    """What `fit_bits` found. It consists of numbers and text: `to_json` and `from_json` keep it beside a checkpoint.

    Attributes:
      bits: for each part, those of its arrays.
      sigma: the predicted error of gradients with these bits.
      alone: for each array, the error if it alone had 8 bits and all else were exact.
      step: when they were chosen.
      known: the bits of all arrays of each choice so far, whose training steps are compiled.

    Raises:
      TypeError, ValueError: a field is something else, or there are not as many numbers as arrays.
    """

    bits: tuple[ArrayBits, ...]
    sigma: float
    alone: tuple[float, ...]
    step: int = 0
    known: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.bits, tuple) or not all(isinstance(part, ArrayBits) for part in self.bits):
            raise check.fail(TypeError, "bits", "a tuple of ArrayBits", self.bits)
        count = sum(len(part.bits) for part in self.bits)
        check.number("sigma", self.sigma, least=0)
        check.integer("step", self.step, least=0)
        if not isinstance(self.alone, tuple) or len(self.alone) != count:
            raise check.fail(ValueError, "alone", f"{count} numbers, one for each array", self.alone)
        for i, error in enumerate(self.alone):
            check.number(f"alone[{i}]", error, least=0)
        if not isinstance(self.known, tuple):
            raise check.fail(TypeError, "known", "a tuple", self.known)
        for bits in self.known:
            if not isinstance(bits, tuple) or len(bits) != count:
                raise check.fail(ValueError, "known", f"tuples of {count} bits, one for each array", self.known)
            ArrayBits(max(BITS), bits)  # which checks them

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> FittedBits:
        """The inverse of `to_json`. Raises ValueError for any other text."""
        found = check.json_fields("FittedBits", text, [field.name for field in dataclasses.fields(FittedBits)])
        try:
            parts = [ArrayBits(part["base"], _of_list(part["bits"]), _of_list(part["names"])) for part in found["bits"]]
            known = tuple(map(_of_list, _of_list(found["known"])))
            return FittedBits(tuple(parts), found["sigma"], _of_list(found["alone"]), found["step"], known)
        except (TypeError, ValueError, KeyError) as error:
            raise check.fail(ValueError, "text", "what FittedBits.to_json wrote", text, str(error)) from error


def _of_list(found: Any) -> tuple[Any, ...]:
    if not isinstance(found, list):
        raise TypeError(f"{check.shown(found)} is no list")
    return tuple(found)


def fit_bits(
    gradient: Callable[..., Any],
    *args: Any,
    sigma: float,
    parts: int = 1,
    base: int | None = None,
    reference: Any = None,
    draws: int = 2,
    seed: int = 0,
) -> FittedBits:
    """The bits of each encoded array with which the fewest bytes are kept and gradients are off by at most `sigma`.

    An array gets 8, 6, 5, 4 or 3 bits, or is kept as it is; so any `sigma` can be met. With g_k the arrays of the exact gradient,
    G_k those of the gradient from codes, and m the number of those k whose g_k is not zero,

        sigma^2 = 1/m sum_k E |G_k - g_k|^2 / |r_k|^2

    where r_k is g_k, or that array of `reference`. An array whose values are a thousandth of those of the others or less, as
    the gradient of attention's key bias, is zero but for rounding: r_k is a thousandth of the others' size then.

    Errors of codes are independent, have the mean zero and are in proportion to steps: so their squares add up. A gradient for
    each array and draw, with random errors of 8 bits in it alone, gives the share of each. What is chosen is then tried with all
    errors at once, and the choice is made stricter if they are larger than predicted. All of that is one compiled program.

    Memory: three gradients, and what a gradient without codes keeps: measure with a small batch. Errors fall like the square
    root of the number of positions only if gradients do not; for a batch of another size measure again.

    Args:
      gradient: `gradient(bits, *args)` gives a pytree of gradients, given bits for each part: of
        `memjax.compressed(part, bits=bits[0])`, say. A part is a call of `compressed`, or several that encode the same arrays.
      *args: its other arguments, arrays, such as parameters and a batch.
      sigma: a positive number, such as 0.01.
      parts: how many there are: 1 for a model that is wrapped as a whole.
      base: what is encoded is decided as for `bits=base`. Default: the fewest bits with which normally distributed values are
        off by at most `sigma`, or 8.
      reference: what errors are compared with, a pytree like the gradients: AdamW's first moment, say,
        `optax.tree.get(state, "mu")`.
      draws: random errors that are averaged over for each array.
      seed: of the random errors.

    Raises:
      ValueError: `sigma` is not positive, `parts` or `draws` is less than 1, `base` is none of 8, 6, 4 and 3, the arrays of
        `reference` have other shapes than the gradients or are not finite, gradients are not finite, there are none, or the
        bits of a part are not used; or calls that share bits encode different arrays.
    """
    return BitsController(gradient, sigma, parts=parts, base=base, draws=draws, seed=seed).update(
        None, 0, *args, reference=reference
    )


class BitsController:
    """Bits that follow training: `fit_bits`, again every so many steps.

    Bits are part of a compiled training step. Other bits are chosen only where those in use are too coarse, or keep 10% more
    bytes; those that were in use before come first. After five choices there is one more, finer than each of them; so at
    most six training steps are compiled, and the program that measures. Its state, a `FittedBits`, is data: a controller that
    is made anew goes on with it.

        controller = memjax.compress.BitsController(gradient, sigma=0.01)
        fitted = controller.update(None, 0, params, batch)
        for step in range(steps):
            fitted = controller.update(fitted, step, params, batch)
            params = train(fitted.bits, params, batch)       # jitted, its first argument static

    Args:
      gradient, sigma, parts, base, draws, seed: see `fit_bits`.
      every: steps after which bits are chosen again.

    Raises:
      ValueError: as `fit_bits`; `every` is less than 1.
    """

    def __init__(
        self,
        gradient: Callable[..., Any],
        sigma: float,
        *,
        parts: int = 1,
        base: int | None = None,
        every: int = 1000,
        draws: int = 2,
        seed: int = 0,
    ):
        self._gradient = check.function("gradient", gradient, "gradient(bits, *args)")
        self._sigma = check_sigma(sigma)
        self._parts = check.integer("parts", parts, least=1)
        self._base = base_of(sigma) if base is None else check_bits(base, "base")
        self._every = check.integer("every", every, least=1)
        self._draws = check.integer("draws", draws, least=1)
        self._seed = check.integer("seed", seed)
        if not -(2**31) <= self._seed < 2**31 - self._draws:
            raise check.fail(ValueError, "seed", "an integer of at most 32 bits", seed)
        self._found: list[BitsRecorder] = []
        self._types: Any = None
        self._leaves = jax.jit(self._leaves_with_errors)

    def update(self, fitted: FittedBits | None, step: int, *args: Any, reference: Any = None) -> FittedBits:
        """The bits to train with at a step: those in `fitted`; others, if it is None or they have been in use for `every` steps.

        Args:
          fitted: what the last call gave. Where the gradient encodes other arrays since, their bits are chosen anew.
          step: the number of the step; at least that of `fitted`.
          *args: those of `gradient`.
          reference: see `fit_bits`.
        """
        step = check.integer("step", step, least=0)
        if fitted is not None and not isinstance(fitted, FittedBits):
            raise check.fail(TypeError, "fitted", "None or FittedBits", fitted, "FittedBits.from_json reads text")
        if fitted is not None and step < fitted.step:
            wanted = f"at least {fitted.step}, that of `fitted`"
            raise check.fail(ValueError, "step", wanted, step, "pass None for `fitted`")
        is_due = fitted is None or step - fitted.step >= self._every
        if is_due or self._found:
            self._record(args)
        counts = [len(part.sizes) for part in self._found]
        if fitted is not None and self._found and [len(part.bits) for part in fitted.bits] != counts:
            fitted, is_due = None, True
        if fitted is not None and not is_due:
            return fitted
        exact = self._leaves(jnp.zeros(sum(counts)), 0, *args)
        compared = _compared_with(reference, exact)

        def square(scales: Iterable[float]) -> float:
            """The mean square of errors that are so many times as large as those of 8 bits."""
            row = jnp.asarray(list(scales), jnp.float32)
            seeds = range(self._seed, self._seed + self._draws)
            return float(np.mean([_mean_square(self._leaves(row, s, *args), exact, compared) for s in seeds]))

        alone = [square(float(i == j) for j in range(sum(counts))) for i in range(sum(counts))]
        known = () if fitted is None else fitted.known
        if not np.isfinite(alone).all():
            fix = "look at the loss"
            raise check.fail(ValueError, "gradient", "one that gives finite gradients with random errors", alone, fix)
        chosen, found = self._chosen(alone, lambda bits: square(map(error_scale, bits)) ** 0.5, known)
        known = known if chosen in known else (*known, chosen)
        pairs = zip(self._found, self._in_parts(chosen), strict=True)
        bits = tuple(ArrayBits(self._base, tuple(own), part.names or ()) for part, own in pairs)
        return FittedBits(bits, found, tuple(np.sqrt(alone).tolist()), step, known)

    def _chosen(
        self, alone: Sequence[float], predicted: Callable[[Bits], float], known: Sequence[Bits]
    ) -> tuple[Bits, float]:
        """The bits of all arrays, and the predicted error with them."""
        sizes = [size for part in self._found for size in part.sizes]
        choices = [of_array for part in self._found for of_array in part.choices]
        cost = lambda bits: sum(size * b for size, b in zip(sizes, bits, strict=True))
        most = self._sigma
        new = fewest_bits(alone, sizes, most**2, choices)
        found = predicted(new)
        for _ in range(_ROUNDS - 1):  # stricter, until what is predicted is at most sigma
            if found <= self._sigma:
                break
            most /= 1.05 * found / self._sigma
            if (finer := fewest_bits(alone, sizes, most**2, choices)) != new:
                new, found = finer, predicted(finer)
        own = [bits for bits in dict.fromkeys(known) if len(bits) == len(sizes)]
        errors = {bits: predicted(bits) for bits in own}
        for bits in sorted(own, key=cost):
            if errors[bits] <= max(self._sigma, found) and _WORTH * cost(bits) <= cost(new):
                return bits, errors[bits]
        if len(own) == _MOST_KNOWN:  # one more, finer than they are
            new = tuple(max(bits) for bits in zip(new, *own, strict=True))
            found = predicted(new)
        elif len(own) > _MOST_KNOWN:
            met = [bits for bits in own if errors[bits] <= self._sigma]
            new = min(met, key=cost) if met else min(own, key=lambda bits: errors[bits])
            found = errors[new]
        return new, found

    def _record(self, args: Sequence[Any]) -> None:
        """Find out which arrays the gradient of arguments of these types encodes."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(args):
            if not check.is_number_or_array(leaf):
                name, wanted = f"args{jax.tree_util.keystr(path)}", "a pytree of arrays and numbers"
                raise check.fail(TypeError, name, wanted, leaf, "let gradient close over it")
        types = jax.tree.map(lambda leaf: (np.shape(leaf), str(jnp.result_type(leaf))), args)
        if types == self._types:
            return
        recorders = [BitsRecorder(self._base) for _ in range(self._parts)]
        with call_errors("gradient", self._gradient, {"bits": recorders, "arguments": args}):
            jax.eval_shape(lambda *args: self._gradient(recorders, *args), *args)
        if ignored := [i for i, part in enumerate(recorders) if part.names is None]:
            raise ValueError(
                f"gradient must use the bits of each part, got one that leaves out bits{ignored} of {self._parts}: wrap each "
                "part, as memjax.compressed(part, bits=bits[i]), inside of what is differentiated"
            )
        self._found, self._types = recorders, types

    def _in_parts(self, values: Any) -> list[Any]:
        """What belongs to all arrays, part by part."""
        ends = np.cumsum([len(part.sizes) for part in self._found]).tolist()
        return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def _leaves_with_errors(self, scales: jax.Array, seed: Any, *args: Any) -> list[jax.Array]:
        """The gradient's arrays, with random errors in each encoded array."""
        errors = [Errors(self._base, of_part, seed) for of_part in self._in_parts(scales)]
        return _floats(self._gradient(errors, *args))


@jax.jit
def _mean_square(changed: list[jax.Array], exact: list[jax.Array], compared: list[jax.Array]) -> jax.Array:
    """The mean over arrays of the squares of relative errors: see `fit_bits`."""
    power = lambda leaves: jnp.stack([jnp.sum(leaf**2) for leaf in leaves])
    errors, norms = power([a - b for a, b in zip(changed, exact, strict=True)]), power(compared)
    sizes = jnp.asarray([leaf.size for leaf in exact], jnp.float32)
    norms = jnp.maximum(norms, sizes * (_SMALL**2 * jnp.sum(norms) / jnp.sum(sizes)))
    counted = (power(exact) != 0).astype(jnp.float32)
    return jnp.sum(jnp.where(counted > 0, errors / jnp.maximum(norms, 1e-30), 0)) / jnp.maximum(jnp.sum(counted), 1)


def _compared_with(reference: Any, exact: list[jax.Array]) -> list[jax.Array]:
    """What errors are compared with: the arrays of `reference`, by default those of the exact gradient."""
    if not exact:
        raise ValueError(
            "gradient must return floating-point arrays, got none: return jax.grad(loss)(params), for example"
        )
    _check_finite("gradient", "one that gives finite gradients", exact, "look at the loss")
    if reference is None:
        return exact
    compared = _floats(reference)
    shapes, wanted = [leaf.shape for leaf in compared], [leaf.shape for leaf in exact]
    if shapes != wanted:
        raise check.fail(ValueError, "reference", f"arrays of the shapes {wanted}", shapes)
    _check_finite("reference", "finite arrays", compared, "look at the loss of the steps before")
    if not any(bool(leaf.any()) for leaf in compared):
        fix = "pass None before the first step"
        raise check.fail(ValueError, "reference", "arrays that are not all zero", shapes, fix)
    return compared


def _check_finite(name: str, wanted: str, arrays: Sequence[jax.Array], fix: str) -> None:
    if shapes := [array.shape for array in arrays if not bool(jnp.isfinite(array).all())]:
        raise check.fail(ValueError, name, wanted, shapes, fix)


def _floats(gradients: Any) -> list[jax.Array]:
    """The floating-point arrays of a pytree, as float32."""
    arrays = [leaf for leaf in jax.tree.leaves(gradients) if check.is_array(leaf)]
    return [leaf.astype(jnp.float32) for leaf in arrays if jnp.issubdtype(leaf.dtype, jnp.floating)]
