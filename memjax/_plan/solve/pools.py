"""Max pools of a derivative, whose backward pass gets where in its window each maximum is: a byte, or the input again.

As JAX differentiates a pool, the backward pass reads all of its input to find the maxima once more. On CPUs and GPUs XLA does so
with an index in each dimension beside each value, and then adds cotangents up one by one: several times the memory of the input.
An index is a small value of the forward pass like any other, to be kept or computed again, and what follows from it is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memjax._core.barriers import barrier
from memjax._core.program.dataflow import is_literal
from memjax._core.program.jaxpr import Program, call_of
from memjax.compress._transform.max_pool import Axes, axes_of, from_index, has_index, with_index

_GRADIENT = "select_and_scatter_add"
_POOL = "reduce_window_max"
_WINDOWS = "window_dimensions", "window_strides", "padding"


def with_indices(forward: Program, backward: Program, axes: Mapping[str, int]) -> tuple[Program, Program]:
    """The two passes of a derivative, in which gradients of max pools follow from indices that the forward pass finds.

    Args:
      forward, backward: the passes, the second of which reads variables of the first. Without max pools they are returned.
      axes: sizes of the named axes around them.
    """
    if not any(map(_windows_of, backward.eqns)):
        return forward, backward
    found: dict[Any, Any] = {}  # by the input of a pool and its windows
    after: dict[int, list[Any]] = {}  # by number of an equation of the forward pass, what finds indices behind it
    eqns: list[Any] = []
    made = {out: i for i, eqn in enumerate(forward.eqns) for out in eqn.outvars}
    known = {*forward.invars, *forward.constvars}
    for eqn in backward.eqns:
        windows = _windows_of(eqn)
        if windows is None:
            eqns.append(eqn)
            continue
        cotangent, x = eqn.invars
        key = x, windows
        if key not in found:
            finds = call_of(max_pool_index, [x], eqn, axes, windows=windows)
            [found[key]] = finds.outvars
            if x in made or x in known:
                after.setdefault(_place(forward, x, windows, made), []).append(finds)
            else:
                eqns.append(finds)
        gradient = call_of(max_pool_gradient, [found[key], cotangent], eqn, axes, windows=windows)
        eqns.append(gradient.replace(outvars=eqn.outvars))
    changed = [*after.get(-1, []), *(one for i, eqn in enumerate(forward.eqns) for one in (eqn, *after.get(i, [])))]
    return (
        Program(forward.constvars, forward.consts, forward.invars, forward.outvars, changed),
        Program(backward.constvars, backward.consts, backward.invars, backward.outvars, eqns),
    )


def _windows_of(eqn: Any) -> Axes | None:
    """The windows of a max pool, if the equation is the gradient of one, and a byte says where maxima are."""
    if eqn.primitive.name != _GRADIENT or eqn.params["select_prim"].name != "ge" or any(map(is_literal, eqn.invars)):
        return None
    found = axes_of(eqn.invars[1].aval.shape, *(eqn.params[name] for name in _WINDOWS))
    return found if has_index(found) else None


def _place(forward: Program, x: Any, windows: Axes, made: Mapping[Any, int]) -> int:
    """After which equation the indices of the maxima of `x` are found: the pool, or what makes `x`; -1: before all."""
    for i in forward.flow.readers.get(x, []):
        eqn = forward.eqns[i]
        if eqn.primitive.name == _POOL and axes_of(x.aval.shape, *(eqn.params[name] for name in _WINDOWS)) == windows:
            return i
    return made.get(x, -1)


def max_pool_index(x: Any, *, windows: Axes) -> Any:
    # In memory: fused into what reads it, it would be found again for each element of the gradient, or the input be kept.
    return barrier(with_index(x, windows)[1])


def max_pool_gradient(index: Any, cotangent: Any, *, windows: Axes) -> Any:
    return from_index(windows, index, cotangent)[0]
