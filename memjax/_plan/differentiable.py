"""A program with the derivative that a plan says."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from memjax._core.arrays import is_float, zeros
from memjax._core.backward.derivatives import Static, forward_mode_message, perturbed, refusing_forward_mode
from memjax._core.barriers import barrier
from memjax._core.compat import eval_jaxpr
from memjax._core.lists import Arrays, drop, merge, pick
from memjax._core.program import costs
from memjax._core.program.jaxpr import axis_sizes, is_literal
from memjax._plan.budget.decide import decide
from memjax._plan.budget.digest import digest
from memjax._plan.budget.pieces import pieces
from memjax._plan.compiled import device_of
from memjax._plan.flat import Traced, sharding_of
from memjax._plan.free import free_bytes
from memjax._plan.result import Plan
from memjax._plan.run import KeepAll, Run, run
from memjax._plan.solve.chain import Chain
from memjax._plan.tile.choose import Program, choose

_OF_DEVICES = {"cuda": "gpu", "rocm": "gpu"}  # by what JAX compiles for, what it calls the platform of a device

_FORWARD_MODE = forward_mode_message("memjax.planned", "call the function itself there")


def differentiable(
    program: Traced,
    inputs: Arrays,
    budget: int | str | None,
    plan: Plan | None,
    known: dict[Any, Plan],
    allow: Sequence[str],
) -> Arrays:
    """The outputs of the program, differentiated by `plan`, or by one that is made for `budget` when that happens.

    Args:
      program: the function's.
      inputs: its constants and inputs.
      budget, plan: exactly one of them.
      known: the plans made so far, by digest of the program and shardings; more are added.
      allow: what a plan that is made may do.
    """
    closed, n = program.closed, len(program.closed.consts)
    axes = axis_sizes(closed)
    position = {var: i for i, var in enumerate([*closed.jaxpr.constvars, *closed.jaxpr.invars])}
    # An output that is an input goes round: it has nothing to do with what is kept.
    made = [is_literal(var) or var not in position for var in closed.jaxpr.outvars]

    @jax.custom_vjp
    def outputs(inputs):
        return pick(eval_jaxpr(closed.jaxpr, inputs[:n], inputs[n:]), made)

    def forward(inputs):
        wrt = perturbed(inputs)
        values = [one.value for one in inputs]
        types = [jax.typeof(value) for value in values]
        has_cotangent = [flag and mine for flag, mine in zip(program.has_cotangent, made, strict=True)]
        shardings = list(map(sharding_of, values))
        platform = device_of(shardings).platform if plan is None else _OF_DEVICES.get(plan.platform, plan.platform)
        parts = Program(closed, types, wrt, has_cotangent, axes, platform)
        acting = _acting(parts, types, shardings, budget, plan, known, allow)
        outs, kept = acting.forward(values)
        return pick(outs, made), (Static(wrt), acting, values, kept)

    def backward(saved, cotangents):
        wrt, acting, values, kept = saved
        planned = pick(acting.derivative.outs, made)
        others = drop(cotangents, planned)
        if all(isinstance(ct, SymbolicZero) for ct in others):
            given = [zeros(ct.aval) if isinstance(ct, SymbolicZero) else ct for ct in pick(cotangents, planned)]
            found = acting.backward(values, kept, given)
        else:  # of other results than were planned for: all is run again
            found = _whole_backward(closed, made, values, wrt.value, cotangents)
        return (merge(found, [None] * (len(wrt.value) - len(found)), wrt.value),)

    outputs.defvjp(forward, backward, symbolic_zeros=True)
    outs = iter(refusing_forward_mode(outputs, _FORWARD_MODE)(inputs))
    return [next(outs) if mine else inputs[position[var]] for var, mine in zip(closed.jaxpr.outvars, made, strict=True)]


def _acting(
    program: Program,
    types: Sequence[Any],
    shardings: Sequence[Any],
    budget: int | str | None,
    plan: Plan | None,
    known: dict[Any, Plan],
    allow: Sequence[str],
) -> Run | KeepAll:
    """The two passes of the program under a plan."""
    if plan is None:
        key = digest(program.derivative()), tuple(map(str, shardings))
        if key not in known:
            room = free_bytes(types, program.derivative(), shardings) if budget == "device" else budget
            assert room is not None
            more: dict[str, Any] = {"compress": "compress" in allow, "offload": "offload" in allow}
            solve = functools.partial(decide, types=types, shardings=shardings, budget=room, **more)
            known[key] = choose(program, solve, allow, room)
        plan = known[key]
    derivative = program.derivative(plan.tiled)
    if plan.program != (found := digest(derivative)):
        raise ValueError(
            "plan must be of the function, the types and the differentiated arguments that it is used for, got one of another "
            f"program ({plan.program} instead of {found}): call memjax.plan with what you pass here, and with the same argnums"
        )
    in_codes = any(kept.bits is not None for stretch in plan.stretches for kept in stretch.kept)
    chain = Chain(derivative, costs.device(device_of(shardings)), compress=in_codes, solved=False)
    return run(derivative, pieces(chain, plan.stretches), plan.platform if plan.in_steps else None)


def _whole_backward(
    closed: Any, made: Sequence[bool], values: Arrays, wrt: Sequence[bool], cotangents: Sequence[Any]
) -> Arrays:
    """The cotangents of the inputs in `wrt`, with nothing kept."""
    n = len(closed.consts)
    given = [zeros(ct.aval) if isinstance(ct, SymbolicZero) else ct for ct in cotangents]
    passed = barrier([*given, *values])
    given, values = passed[: len(given)], passed[len(given) :]

    def outputs(chosen):
        every = merge(chosen, drop(values, wrt), wrt)
        outs = pick(eval_jaxpr(closed.jaxpr, every[:n], every[n:]), made)
        return [out for out in outs if is_float(out)]

    _, pullback = jax.vjp(outputs, pick(values, wrt))
    floats = [ct for ct, out in zip(given, pick(closed.out_avals, made), strict=True) if is_float(out)]
    return pullback(floats)[0]
