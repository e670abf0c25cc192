"""`plan` and `planned`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from memjax._core import check
from memjax._core.backward.derivatives import forward_mode_message
from memjax._core.clear_errors import call_errors, trace_errors
from memjax._core.meshes import device_of
from memjax._core.platforms import traced_for_arguments
from memjax._core.program.jaxpr import axis_sizes
from memjax._core.program.scopes import Paths
from memjax._explain.compared import PeakComparison, compared
from memjax._explain.peak import alive_at_peak
from memjax._plan.acting import Asked, acting, by_plan
from memjax._plan.budget.checked import check_tiles
from memjax._plan.differentiable import differentiable
from memjax._plan.flat import Flat
from memjax._plan.memory.compiled import compiled_step
from memjax._plan.memory.layout import Layout, layout_of
from memjax._plan.memory.rings import ring_notes
from memjax._plan.not_a_step import step_message
from memjax._plan.predicted import predicted_at_peak
from memjax._plan.result import Plan
from memjax._plan.tile.choose import Program, choose

_ALLOWED = ("recompute", "offload", "tile", "compress")
_EXACT = ("recompute",)
_FORWARD_MODE = forward_mode_message("memjax.planned", "call the function itself there")


@traced_for_arguments
def plan(
    f: Callable[..., Any],
    *args: Any,
    budget: int | str,
    allow: Sequence[str] = _EXACT,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    **kwargs: Any,
) -> Plan:
    """How `jax.value_and_grad(f, argnums)(*args, **kwargs)` fits a budget of memory in the least time.

    The program of `f` is divided where few bytes are alive: between layers, and inside them. What each stretch keeps for its
    backward pass, arrays inside custom derivatives included (the log-sum-exp of an attention kernel), and what it computes again
    at its turn there, is chosen together for all: a minimum cut at several prices of memory for each stretch that differs
    from the others, and one dynamic program over all of them. So is the body of a `jax.lax.scan`, with one choice for all
    turns, or two. Then the step is compiled, which says how far off the model is, and the plan corrected.

    Args:
      f: a function of pytrees, NNX modules among them; a loss, or a loss and auxiliary results. Checkpoints in it are taken out.
      *args: arrays or `jax.ShapeDtypeStruct`s. Nothing is run. Their shardings are those that the step is compiled for, on the
        platform of their devices, which need not be there. Gradients are taken to have the shardings of what they are gradients
        of, as in a step that updates parameters: `Plan.assumes`.
      budget: temporary bytes of the compiled step, per device, or a text like "40GiB"; "device": what is free on the device
        beside arguments and results; "min": the least memory.
      allow: what the plan may do. "recompute": compute again what is not kept; always. "tile": run parts of the program tile by
        tile in both passes, where positions do not mix and something large is made on the way: a language model's head with
        its loss, so that logits never exist as a whole; messages between the nodes of a graph, some edges at a time. It does
        so where no plan fits otherwise, or none is as fast.
        "offload": move what the loops of `jax.lax.scan` keep to the pinned memory of the host and back, where no other plan
        fits, or where that takes less time than computing it again. It is exact. Outside of loops nothing is moved, for it frees
        no memory there, and on CPUs nothing at all; `Plan.notes` says so. It needs JAX 0.11.2: XLA:GPU of JAX 0.11.0 read
        what loops had moved in the wrong order.
        "compress": keep floats that may be rounded in 8 bits, where that takes less time than computing them again: gradients are
        no longer those of `f`, see below.
      argnums: which of `args` are differentiated: all their floats; of NNX modules the `nnx.Param`, as `nnx.grad` does, or what
        an `nnx.DiffState` in place of the number chooses.
      **kwargs: as `args`; they are not differentiated.

    Returns:
      A `Plan`, which `planned` takes. Its gradients are those of `f`: what is computed again is the same. Booleans may be kept as
      bits, and of a max pool where its maxima are, which is exact.

      With "compress" they are off by the rounding of what the plan lists with bits, as those of `memjax.compressed` are, and by
      the same analysis: parameters, statistics, masks, and what has to agree with something else (queries and keys with a
      log-sum-exp) are exact, and so is what they follow from. An error is at most half a step of 255 in the range of about 128
      features of one position, and its mean over places is zero; finite values stay finite. Exact plans are compared, too.

    Raises:
      ValueError: a budget below the least possible (the message states that, the time there, and what holds it up); a training
        step, or a function that returns the gradients of `argnums`: pass the loss.
      TypeError: an argument of the wrong kind, or nothing to differentiate.
    """
    check.function("f", f)
    room = _budget(budget)
    check.names("allow", allow, _ALLOWED)
    program, layout = _problem(f, args, kwargs, argnums)
    found = choose(program, layout, room, allow)
    rings = ring_notes([program.derivative()], layout.shardings, lambda: layout)
    return dataclasses.replace(found, notes=(*found.notes, *rings))


@traced_for_arguments
def explain_peak(
    f: Callable[..., Any],
    *args: Any,
    plan: Plan,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    **kwargs: Any,
) -> PeakComparison:
    """Why a plan takes other bytes than were predicted: what is alive at its predicted peak, and at the compiled one.

    A plan is plain data, and may come from JSON: it does not know the program. So it takes that, as `memjax.plan` does, and
    compiles it once. Of a step under `memjax.jit`, `step.explain_peak(*args)` says the same.

        print(memjax.explain_peak(loss, params, batch, plan=plan))

    Args:
      f, *args, argnums, **kwargs: as for `memjax.plan`, when it made the plan.
      plan: the plan.

    Returns:
      A `PeakComparison`: print it. Its predicted bytes are `plan.first_nbytes`, as the model alone has them, and its compiled
      ones `plan.compiled_nbytes`. Of a plan without stretches they are those of keeping everything.

    Raises:
      ValueError: the plan is of another program, or what it plans is no program of its own, as within a `jax.vmap` with a name.
    """
    check.function("f", f)
    if not isinstance(plan, Plan):
        raise check.fail(TypeError, "plan", "a Plan", plan, "memjax.plan makes one")
    program, layout = _problem(f, args, kwargs, argnums)
    if plan.tiled:
        check_tiles(program.every, plan)
    derivative = program.derivative(plan.tiled)
    compiled = compiled_step(by_plan(derivative, plan, layout), program.types, layout)
    if compiled is None:
        raise ValueError("the compiled peak is not known: f is no program of its own here")
    return compared(predicted_at_peak(derivative, plan, layout), alive_at_peak(compiled, Paths(f)))


def planned(
    f: Callable[..., Any],
    *,
    budget: int | str | None = None,
    plan: Plan | None = None,
    allow: Sequence[str] = _EXACT,
) -> Callable[..., Any]:
    """`f`, differentiated in reverse within a budget of memory, in the least time.

    Args:
      f: as for `memjax.plan`. What it closes over is differentiated, too.
      budget: as for `memjax.plan`. The plan is made when the result is differentiated, once for each program: the temporary bytes
        are those of value and gradient of `f` alone, on one device. Under `jax.vmap` they are those of one example. While
        `jax.jit` traces, explicit axes of a mesh tell the shardings of arguments, automatic axes do not: there arguments are
        taken to be split evenly over the mesh, along their first axis that can be, and a UserWarning says so. Where no mesh is
        seen (host arrays and `in_shardings`) they are taken to be on one device. For other shardings, or another platform than
        that of the default device, plan ahead.
      plan: what `memjax.plan` found for `f` and arguments of these shapes and dtypes, wherever these lie. Exactly one of `budget`
        and `plan` is to be given.
      allow: as for `memjax.plan`, where a plan is made; a plan that is given says itself what it does.

    Returns:
      A function with the signature of `f`. Where it is not differentiated it is `f`; but a training step, which computes its
      gradients itself, is refused there: a plan would do nothing. On a CPU compile with
      `memjax.remat_compiler_options()`, or the compiler may undo the recomputation.

    Saved between forward and backward: the arguments, and what the plan's stretches keep and hand on.

    Raises:
      ValueError: both or neither of `budget` and `plan`; when called, a budget below the least possible, a plan of another
        program, or a training step that is not differentiated itself.
      TypeError: forward-mode differentiation (`jax.jvp`, `jax.jacfwd`).
    """
    check.function("f", f)
    check.exactly_one(budget=budget, plan=plan)
    check.names("allow", allow, _ALLOWED)
    if plan is not None and not isinstance(plan, Plan):
        raise check.fail(TypeError, "plan", "a Plan", plan, "memjax.plan makes one")
    asked = Asked(None if budget is None else _budget(budget), plan, allow, {})

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        flat = Flat(f, args, kwargs)
        with call_errors("f", f, {"arguments": (*args, *kwargs.values())}), trace_errors("f", f):
            program = flat.program()
        closed = program.closed
        inputs = [*closed.consts, *flat.arrays]
        act = functools.partial(acting, asked, closed, axis_sizes(closed))
        first = [False] * len(closed.consts) + flat.float_arrays_of({0: nnx.Param} if args else {})
        outs = differentiable(
            closed,
            program.has_cotangent,
            inputs,
            act,
            "planned",
            _FORWARD_MODE,
            step_message(f, program, first, is_guess=True),
        )
        return flat.result(program, outs)

    return run


def _problem(f: Callable[..., Any], args: tuple, kwargs: dict[str, Any], argnums: Any) -> tuple[Program, Layout]:
    """The program to differentiate, and where its inputs lie."""
    chosen = _positions(argnums, len(args))
    flat = Flat(f, args, kwargs)
    with call_errors("f", f, {"arguments": (*args, *kwargs.values())}), trace_errors("f", f):
        program = flat.program()
    wrt = [False] * len(program.closed.consts) + flat.float_arrays_of(chosen)
    if not any(wrt):
        raise check.fail(TypeError, "f", "a function with float arrays to differentiate", f, "see argnums")
    if not any(program.has_cotangent):
        raise check.fail(TypeError, "f", "a function with a float result", f)
    if refused := step_message(f, program, wrt):
        raise ValueError(refused)
    layout = layout_of(program.closed, [*program.closed.consts, *flat.arrays], wrt)
    platform = device_of(layout.shardings).platform
    return Program(program.closed, program.types, wrt, program.has_cotangent, {}, platform), layout


def _positions(argnums: Any, count: int) -> dict[int, Any]:
    """By position of an argument what of its NNX objects is differentiated."""
    chosen: dict[int, Any] = {}
    for one in argnums if isinstance(argnums, Sequence) else [argnums]:
        number, wanted = (one.argnum, one.filter) if isinstance(one, nnx.DiffState) else (one, nnx.Param)
        number = check.integer("argnums", number, what="positions of arguments")
        if not -count <= number < count:
            raise check.fail(ValueError, "argnums", f"positions among {count} arguments", argnums)
        chosen[number % count] = wanted
    return chosen


def _budget(value: Any) -> Any:
    return check.byte_count("budget", value, words=("min", "device"))
