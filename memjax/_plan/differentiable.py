"""A program with a derivative that is decided on when it is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from memjax._core import check
from memjax._core.arrays import is_float, zeros
from memjax._core.backward.derivatives import (
    Static,
    differentiated_as,
    only_differentiated,
    perturbed,
    refusing_forward_mode,
)
from memjax._core.backward.passes import vjp
from memjax._core.barriers import barrier
from memjax._core.compat import eval_jaxpr
from memjax._core.lists import Arrays, drop, merge, pick
from memjax._core.program.dataflow import is_literal
from memjax._plan.again import in_checkpoints
from memjax._plan.memory.layout import Layout, layout_of
from memjax._plan.run import Run

Act = Callable[[Sequence[Any], Sequence[bool], Sequence[bool], Layout], Any]
"""From types and layout of a program's inputs, and flags for those that are differentiated and for the outputs that have a
cotangent, to its two passes, with the methods of `Run`. In order: types, inputs, outputs, layout."""


def differentiable(
    closed: Any,
    has_cotangent: Sequence[bool],
    inputs: Arrays,
    act: Act,
    name: str,
    forward_mode: str,
    undifferentiated: str = "",
) -> Arrays:
    """The outputs of the program, differentiated by the two passes that `act` gives when that happens.

    Args:
      closed: the program.
      has_cotangent: which of its outputs are differentiated.
      inputs: its constants and inputs.
      act: gives the two passes.
      name: of the public function.
      forward_mode: what to say of forward mode.
      undifferentiated: what to say where the program runs without being differentiated; "": it may.
    """
    n = len(closed.consts)
    position = {var: i for i, var in enumerate([*closed.jaxpr.constvars, *closed.jaxpr.invars])}
    # An output that is an input goes round: it has nothing to do with what is kept.
    made = [is_literal(var) or var not in position for var in closed.jaxpr.outvars]
    has_cotangent = [flag and mine for flag, mine in zip(has_cotangent, made, strict=True)]

    @jax.custom_vjp
    def outputs(inputs):
        outs = pick(eval_jaxpr(closed.jaxpr, inputs[:n], inputs[n:]), made)
        return [only_differentiated(out, undifferentiated) for out in outs] if undifferentiated else outs

    def forward(inputs):
        wrt = perturbed(inputs)
        values = [one.value for one in inputs]
        check.known_sizes(name, values)
        acting = act([jax.typeof(value) for value in values], wrt, has_cotangent, layout_of(closed, values, wrt))
        outs, kept = _outputs(closed, acting)(values)
        return pick(outs, made), (Static(wrt), acting, values, kept)

    def backward(saved, cotangents):
        wrt, acting, values, kept = saved
        planned = pick(has_cotangent, made)
        others = drop(cotangents, planned)
        if all(isinstance(ct, SymbolicZero) for ct in others):
            given = [zeros(ct.aval) if isinstance(ct, SymbolicZero) else ct for ct in pick(cotangents, planned)]
            found, _ = _pullback(closed, acting, wrt.value, has_cotangent)(values, kept, given)
        else:  # of other results than were planned for: all is run again
            found = _whole_backward(closed, made, values, wrt.value, cotangents)
        return (merge(found, [None] * (len(wrt.value) - len(found)), wrt.value),)

    outputs.defvjp(forward, backward, symbolic_zeros=True)
    outs = iter(refusing_forward_mode(outputs, forward_mode)(inputs))
    return [next(outs) if mine else inputs[position[var]] for var, mine in zip(closed.jaxpr.outvars, made, strict=True)]


def _has_exact_passes(acting: Any) -> bool:
    """Whether the two passes are those of a plan, without codes: with these a second derivative is refused; others are JAX's."""
    return isinstance(acting, Run) and not acting.is_rounded


def _outputs(closed: Any, acting: Any) -> Callable[..., Any]:
    """The forward pass, from values to outputs and what is kept. Its own derivative is that of the program in checkpoints."""
    if not _has_exact_passes(acting):
        return acting.forward
    return differentiated_as(functools.partial(in_checkpoints, closed), acting.forward, replaced=True)


def _pullback(closed: Any, acting: Any, wrt: Sequence[bool], outs: Sequence[bool]) -> Callable[..., Any]:
    """The backward pass, with nothing besides, likewise."""
    fast = lambda values, kept, cotangents: (acting.backward(values, kept, cotangents), ())
    if not _has_exact_passes(acting):
        return fast

    def reference(values: Arrays, _: Any, cotangents: Arrays) -> Arrays:
        wanted = lambda inputs: pick(in_checkpoints(closed, inputs), outs)
        return vjp(wanted, values, wrt)[1](list(cotangents))[0]

    return differentiated_as(reference, fast, replaced=True)


def _whole_backward(
    closed: Any, made: Sequence[bool], values: Arrays, wrt: Sequence[bool], cotangents: Sequence[Any]
) -> Arrays:
    """The cotangents of the inputs in `wrt`, with nothing kept."""
    n = len(closed.consts)
    given = [zeros(ct.aval) if isinstance(ct, SymbolicZero) else ct for ct in cotangents]
    passed = barrier([*given, *values])
    given, values = passed[: len(given)], passed[len(given) :]

    def outputs(inputs):
        outs = pick(eval_jaxpr(closed.jaxpr, inputs[:n], inputs[n:]), made)
        return [out for out in outs if is_float(out)]

    _, pullback = vjp(outputs, values, wrt)
    floats = [ct for ct, out in zip(given, pick(closed.out_avals, made), strict=True) if is_float(out)]
    return pullback(floats)[0]
