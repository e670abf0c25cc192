"""A kernel of an update as one equation, so that whoever traces a step can see what it computes, and move that.

`memjax.jit` runs updates of stacked weights in the loops of backward passes. There a kernel has the entry of a turn, which is
copied to it and back: 16 bytes a parameter. The arithmetic of an equation moves more, as its moments are float32 between passes,
and so are those of several arrays at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from memjax._core.arrays import varying_axes
from memjax._core.program.jaxpr import bind, read
from memjax.compress._state import kernel, operations

UPDATE: Any = Primitive("memjax_update")
UPDATE.multiple_results = True


def call(region: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of a region by its kernel, as one equation."""
    if varying_axes(
        *values
    ):  # types of results say over which axes of a mesh they vary: the kernel's own equation knows
        return kernel.run(region, values)
    return UPDATE.bind(*values, region=region, is_turn=False)


def call_for_turn(region: Any, turn: Any, values: Sequence[Any]) -> list[Any]:
    """The same of one entry along the first axis of all arrays, by its number."""
    return UPDATE.bind(*values, turn, region=region, is_turn=True)


def can_run_turns(region: Any) -> bool:
    """Whether there is a kernel for that."""
    return kernel.suits_turns(region.shape)


def arithmetic(region: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of a region without a kernel."""
    env = dict(zip(region.inputs, values, strict=True))
    for eqn in region.eqns:
        operands = read(env, eqn.invars)
        own = eqn.primitive in operations.OPERATIONS
        outs = operations.run(eqn.primitive, *operands, **eqn.params) if own else bind(eqn, operands)
        env |= zip(eqn.outvars, outs, strict=True)
    return read(env, region.outputs)


def _run(*values: Any, region: Any, is_turn: bool) -> list[Any]:
    if is_turn:
        return kernel.run(region, values[:-1], values[-1])
    return kernel.run(region, values) if kernel.suits(region.shape) else arithmetic(region, values)


def _types(*_: Any, region: Any, is_turn: bool) -> list[Any]:
    shape = lambda out: (1, *out.aval.shape[1:]) if is_turn else out.aval.shape
    return [ShapedArray(shape(out), out.aval.dtype) for out in region.outputs]


def _batched(values: Sequence[Any], dims: Any, **params: Any) -> tuple[list[Any], list[int]]:
    outs = jax.vmap(functools.partial(_run, **params), in_axes=dims)(*values)
    return outs, [0] * len(outs)


UPDATE.def_abstract_eval(_types)
UPDATE.def_impl(lambda *values, **params: jax.jit(functools.partial(_run, **params))(*values))
mlir.register_lowering(UPDATE, mlir.lower_fun(_run, multiple_results=True))
batching.primitive_batchers[UPDATE] = _batched
