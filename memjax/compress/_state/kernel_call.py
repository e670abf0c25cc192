"""A kernel of an update as one equation, so that whoever traces a step can see what it computes, and move that.

`memjax.jit` runs updates of stacked weights in the loops of backward passes. There it takes the arithmetic of an equation, not
its kernel: a slice would be copied to a kernel and back.
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
    return UPDATE.bind(*values, region=region)


def arithmetic(region: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of a region without a kernel."""
    env = dict(zip(region.inputs, values, strict=True))
    for eqn in region.eqns:
        operands = read(env, eqn.invars)
        own = eqn.primitive in operations.OPERATIONS
        outs = operations.run(eqn.primitive, *operands, **eqn.params) if own else bind(eqn, operands)
        env |= zip(eqn.outvars, outs, strict=True)
    return read(env, region.outputs)


def _run(*values: Any, region: Any) -> list[Any]:
    return kernel.run(region, values)


def _batched(values: Sequence[Any], dims: Any, *, region: Any) -> tuple[list[Any], list[int]]:
    outs = jax.vmap(functools.partial(_run, region=region), in_axes=dims)(*values)
    return outs, [0] * len(outs)


UPDATE.def_abstract_eval(lambda *_, region: [ShapedArray(out.aval.shape, out.aval.dtype) for out in region.outputs])
UPDATE.def_impl(lambda *values, region: jax.jit(functools.partial(_run, region=region))(*values))
mlir.register_lowering(UPDATE, mlir.lower_fun(_run, multiple_results=True))
batching.primitive_batchers[UPDATE] = _batched
