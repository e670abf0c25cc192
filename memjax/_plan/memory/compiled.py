"""What the compiler takes for a step under a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax._core.barriers import barrier
from memjax._core.compat import names_an_axis
from memjax._core.lists import drop, pick
from memjax._core.meshes import platform_of
from memjax._measure import remat_compiler_options
from memjax._plan.memory.alone import compile_alone, temporary
from memjax._plan.memory.layout import Layout
from memjax._plan.run import KeepAll, Run


def compiled_bytes(run: Run | KeepAll, types: Sequence[Any], layout: Layout) -> int | None:
    """Temporary bytes of `compiled_step`, per device; None where there is none."""
    program = compiled_step(run, types, layout)
    return None if program is None else temporary(program)


def compiled_step(run: Run | KeepAll, types: Sequence[Any], layout: Layout) -> Any | None:
    """Value and gradient, compiled; None where they are no program of their own.

    Gradients have the shardings of what they are gradients of, as in a step that updates parameters: left to itself the compiler
    may return them whole, in the memory of results.

    Those of a chain of blocks include its outputs and the cotangents, which are made from these by an operation of one pass.

    Args:
      run: the two passes.
      types: of its inputs.
      layout: of its inputs.
    """
    derivative = run.derivative
    out_types = [atom.aval for atom in derivative.outputs]
    scalar = [aval.shape == () for aval in pick(out_types, derivative.outs)]

    def step(inputs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        outs, kept = run.forward(inputs)
        own = pick(outs, derivative.outs)
        if derivative.of_blocks:
            cts = barrier([out + out for out in own])
            return drop(outs, derivative.outs), run.backward(inputs, kept, cts)
        given = iter(cotangents)
        cts = [jnp.ones_like(out) if one else next(given) for out, one in zip(own, scalar, strict=True)]
        return outs, run.backward(inputs, kept, cts)

    given = [aval for aval, one in zip(pick(out_types, derivative.outs), scalar, strict=True) if not one]
    others = [] if derivative.of_blocks else given
    has_axes = any(names_an_axis(effect) for eqn in derivative.forward.eqns for effect in eqn.effects)
    fixed = derivative.constants
    return compile_step(step, types, others, layout, derivative.wrt, has_axes=has_axes, constants=fixed)


def compile_step(
    step: Callable[[Sequence[Any], Sequence[Any]], Any],
    types: Sequence[Any],
    others: Sequence[Any],
    layout: Layout,
    wrt: Sequence[bool],
    *,
    has_axes: bool,
    constants: Mapping[int, np.ndarray] = MappingProxyType({}),
) -> Any | None:
    """A step, compiled; None where it is no program of its own.

    Args:
      step: from (inputs, other arguments) to (other results, gradients of the inputs in `wrt`).
      types, layout: of the inputs.
      others: types of the other arguments.
      wrt: which inputs are differentiated.
      has_axes: it has collectives over named axes.
      constants: by position, inputs that are constants of the program: the compiler makes others of their values.
    """
    manual = any(jax.sharding.AxisType.Manual in aval.sharding.mesh.axis_types for aval in types)
    if manual or has_axes:
        return compile_alone(jax.make_jaxpr(step)(list(types), list(others)))
    explicit = any(jax.sharding.AxisType.Explicit in aval.sharding.mesh.axis_types for aval in types)
    if explicit and any(sharding is None for sharding in layout.shardings):
        return None
    inputs = {
        i: jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for i, (aval, sharding) in enumerate(zip(types, layout.shardings, strict=True))
        if i not in constants
    }
    platform, options = platform_of(layout.shardings), dict[str, Any]()
    if platform == "cpu":
        options |= remat_compiler_options("cpu")
        options["xla_backend_optimization_level"] = 0  # machine code is made after memory has been assigned

    def run(inputs: dict[int, Any], others: Sequence[Any]) -> Any:
        every = {**inputs, **constants}
        return step([every[i] for i in range(len(every))], others)

    jitted = jax.jit(run, out_shardings=(None, pick(layout.of_results, wrt)))
    lowered = jitted.trace(inputs, list(others)).lower(lowering_platforms=(platform,))
    return lowered.compile(compiler_options=options)
