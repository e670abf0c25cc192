"""What calls compute, as functions from named arrays to named arrays: on all tokens, or on each device's own (`devices`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import jax

from memjax._core.compat import is_x64, matmul_precision
from memjax._linear_cross_entropy import algorithms
from memjax._linear_cross_entropy.options import Array, Operands, Options, Result

Arrays = dict[str, Array]

_OF_ALL_TOKENS = ("w", "bias", "class_weights", "total")


@dataclass(frozen=True)
class Program:
    """One of `_PROGRAMS`. Arrays are named as in `Operands` and `Result`, gradients as what they belong to.

    Whatever belongs to tokens has all of their dimensions, as the user's arrays have: on a mesh each may be sharded.
    """

    name: str
    options: Options
    wanted: frozenset[str] = frozenset()
    # What else a trace depends on: a device's own program is traced when XLA compiles, when settings may be others.
    precision: str | None = field(default_factory=matmul_precision)
    x64: bool = field(default_factory=is_x64)

    def __call__(self, arrays: Arrays) -> Arrays:
        with jax.enable_x64(self.x64), jax.default_matmul_precision(self.precision):
            return self._of_rows(arrays)

    def _of_rows(self, arrays: Arrays) -> Arrays:
        tokens = arrays["labels"].shape
        of_tokens = lambda name: name not in _OF_ALL_TOKENS
        flat = {k: a.reshape(-1, *a.shape[len(tokens) :]) if of_tokens(k) else a for k, a in arrays.items()}
        out = _PROGRAMS[self.name](flat, self.options, self.wanted)
        return {k: a.reshape(*tokens, *a.shape[1:]) if of_tokens(k) else a for k, a in out.items()}

    def dimensions(self, name: str, tokens: int) -> tuple[str, ...]:
        """Names for the dimensions of an array, of `tokens` dimensions of tokens. "V" is the vocabulary, "D" the head's."""
        if name == "w":
            return tuple(self.options.layout.upper())
        if name in _OF_ALL_TOKENS:
            return () if name == "total" else ("V",)
        last = {"x": ("F",), "targets": ("V",)}.get(name, ())
        return (*(f"T{i}" for i in range(tokens)), *last)


def named(operands: Operands) -> Arrays:
    return {name: a for name, a in operands._asdict().items() if a is not None}


def as_operands(arrays: Arrays) -> Operands:
    return Operands._make(arrays.get(name) for name in Operands._fields)


def _rows(result: Result) -> Arrays:
    return {name: a for name, a in result._asdict().items() if a is not None}


def _total(arrays: Arrays, options: Options, _: frozenset[str]) -> Arrays:
    rows = _rows(algorithms.total_loss(as_operands(arrays), options))
    return {"total": rows.pop("loss"), **rows}


def _losses(arrays: Arrays, options: Options, _: frozenset[str]) -> Arrays:
    return _rows(algorithms.token_losses(as_operands(arrays), options)[0])


def _losses_and_mass(arrays: Arrays, options: Options, _: frozenset[str]) -> Arrays:
    """What the backward pass needs besides."""
    result, mass = algorithms.token_losses(as_operands(arrays), options)
    return _rows(result) | ({} if mass is None else {"mass": mass})


def _losses_and_gradients(arrays: Arrays, options: Options, wanted: frozenset[str]) -> Arrays:
    rows, grads = algorithms.loss_and_gradients(as_operands(arrays), options, wanted)
    return _rows(rows) | grads


def _gradients(arrays: Arrays, options: Options, wanted: frozenset[str]) -> Arrays:
    lse, mass, cotangent = (arrays.get(name) for name in ("lse", "mass", "cotangent"))
    assert lse is not None
    assert cotangent is not None
    return algorithms.gradients(as_operands(arrays), lse, mass, cotangent, options, wanted)


_PROGRAMS: dict[str, Callable[[Arrays, Options, frozenset[str]], Arrays]] = {
    "total": _total,
    "losses": _losses,
    "losses_and_mass": _losses_and_mass,
    "losses_and_gradients": _losses_and_gradients,
    "gradients": _gradients,
}
