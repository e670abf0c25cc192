"""A region as a function with a derivative, tile by tile in both passes.

If all that is differentiated is one number, a sum over positions (a loss), its gradients are computed in the forward pass, in
the same tile: they are known up to the cotangent, which is a factor. Then no product is computed twice, and the gradients are
kept. Otherwise the arguments are kept, and the backward pass runs each tile again. So it is with float16: a factor that scales
the loss is there to keep small cotangents from being rounded to zero, and has to come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from memjax._core.arrays import is_float, strong, zeros
from memjax._core.backward.derivatives import Static, perturbed
from memjax._core.lists import Arrays, merge, pick
from memjax._core.positions.regions import Region
from memjax._core.positions.walk import Mixed, Positions, State, Summed, shape_of, shared
from memjax._core.program.dataflow import made_by
from memjax._core.program.jaxpr import Program, calls_in_place, evaluate_in, read, trace, without_dead_equations
from memjax._core.segments import Segments, segments
from memjax._core.tiles import Tiles, with_size
from memjax._plan.derivative import Derivative
from memjax._plan.tile.resized import Resized


class TiledPasses:
    """A region as a function of its shared and its mapped values, which is not differentiated: gradients are in it.

    Args:
      region: the region.
      tile: positions per tile.
      axes: sizes of the named axes around it.
      platform: of the device, as JAX calls it.

    Attributes:
      region: as given.

    Raises Mixed where it mixes positions.
    """

    def __init__(self, region: Region, tile: int, axes: dict[str, int], platform: str):
        self.region, self._tile, self._axes, self._platform = region, tile, axes, platform
        variables_in = [*region.shared, *(var for var, _ in region.mapped)]
        self._types = [strong(var.aval) for var in variables_in]
        self._out_types = [strong(var.aval) for var in region.outs]
        self._states: list[State] = [shared(shape_of(var)) for var in region.shared]
        self._states += [Positions(dim, 1) for _, dim in region.mapped]
        self._in_axes = [dim for _, dim in region.mapped]

        def run(*inputs: Any) -> Arrays:
            env = dict(zip(variables_in, inputs, strict=True))
            evaluate_in(region.eqns, env)
            return read(env, region.outs)

        self._closed = trace(run, self._types, axes)
        self._out_states: list[State] = [Summed() if axis is None else Positions(axis, 1) for axis in region.axes]
        forward = calls_in_place(self._closed, differentiable=False)
        self._forward = self._resized(forward, self._states, self._out_states)

    @property
    def reads(self) -> list[Any]:
        """What it is called with."""
        return [*self.region.shared, *(var for var, _ in self.region.mapped)]

    @property
    def makes(self) -> list[Any]:
        """What it returns."""
        return self.region.outs

    def __call__(self, values: Arrays) -> Arrays:
        """The outputs."""
        n = len(self.region.shared)
        return self._over_tiles(self._of_tiles(), values[:n], values[n:])

    def _of_tiles(self) -> Any:
        """The function of tiles, from (shared, tiles)."""
        return lambda some, tiles: self._forward([*some, *tiles])

    def _over_tiles(self, body: Any, shared_values: Arrays, mapped: Arrays) -> Arrays:
        region = self.region
        tiles = Tiles(body, self._in_axes, region.axes, self._out_types, *self._parts(mapped), jnp.float32)
        return tiles(shared_values, mapped)

    def _parts(self, mapped: Arrays) -> tuple[Segments, int]:
        """The segments of the axis, and positions per tile."""
        return segments(self.region.length, mapped, self._in_axes, self._tile)

    def _resized(self, program: Program, states: Sequence[State], out_states: Sequence[State]) -> Resized:
        found = Resized(program, states, out_states, self.region.length, self._platform)
        types = [
            aval.update(shape=_cut(aval.shape, state, self._tile))
            for aval, state in zip((strong(var.aval) for var in program.invars), states, strict=True)
        ]
        try:  # whether sizes fit
            outs = trace(lambda *inputs: found(list(inputs)), types, self._axes).out_avals
        except (TypeError, ValueError) as error:
            raise Mixed(str(error)) from None
        for out, atom, state in zip(outs, program.outvars, out_states, strict=True):
            same = out.dtype == atom.aval.dtype or isinstance(state, Summed)
            if not same or out.shape != _cut(shape_of(atom), state, self._tile):
                raise Mixed(f"a tile of {atom.aval.str_short()} would be {out.str_short()}")
        return found


class TiledRegion(TiledPasses):
    """A region as a function of its shared and its mapped values, with a derivative.

    Args:
      region: the region.
      has_cotangent: which of its outputs are differentiated.
      tile, axes, platform: as for `TiledPasses`.

    Raises Mixed where the derivative mixes positions.
    """

    def __init__(self, region: Region, has_cotangent: Sequence[bool], tile: int, axes: dict[str, int], platform: str):
        super().__init__(region, tile, axes, platform)
        self._has_cotangent = list(has_cotangent)
        number = [axis is None and aval.shape == () for axis, aval in zip(region.axes, self._out_types, strict=True)]
        scaled = any(var.aval.dtype == jnp.float16 for var in made_by(region.eqns))
        self._is_sum = not scaled and sum(has_cotangent) == 1 and pick(number, has_cotangent) == [True]
        self._derivatives: dict[tuple[bool, ...], Resized] = {}
        self._derivative(tuple(is_float(aval) for aval in self._types))  # raises Mixed early

    def __call__(self, values: Arrays) -> Arrays:
        """The outputs."""
        n = len(self.region.shared)
        return self._sums(values[:n], values[n:]) if self._is_sum else super().__call__(values)

    def _derivative(self, wrt: tuple[bool, ...]) -> Resized:
        """From inputs and cotangents to the outputs and the cotangents of the inputs in `wrt`."""
        if wrt not in self._derivatives:
            derivative = Derivative(self._closed, self._types, wrt, self._has_cotangent, self._axes)
            forward, backward = derivative.forward, derivative.backward
            both = Program(
                [*forward.constvars, *backward.constvars],
                [*forward.consts, *backward.consts],
                [*forward.invars, *backward.invars],
                [*derivative.outputs, *backward.outvars],
                [*forward.eqns, *backward.eqns],
            )
            axes = pick(self.region.axes, self._has_cotangent)
            cts = [
                shared(aval.shape) if axis is None else Positions(axis, 1)
                for aval, axis in zip(pick(self._out_types, self._has_cotangent), axes, strict=True)
            ]
            n = len(self.region.shared)
            wanted = pick([*[Summed()] * n, *self._states[n:]], wrt)
            out_states = [*self._out_states, *wanted]
            found = self._resized(without_dead_equations(both), [*self._states, *cts], out_states)
            self._derivatives[wrt] = found
        return self._derivatives[wrt]

    def _of_tiles(self) -> Any:
        @jax.custom_vjp
        def run(inputs: Arrays) -> Arrays:
            return typed(self._forward(inputs), self._out_types)

        def typed(values: Arrays, types: Sequence[Any]) -> Arrays:
            return [value.astype(aval.dtype) for value, aval in zip(values, types, strict=True)]

        def forward(inputs: Any) -> tuple[Arrays, Any]:
            values = [one.value for one in inputs]
            return typed(self._forward(values), self._out_types), (values, Static(perturbed(inputs)))

        def backward(saved: Any, cotangents: Any) -> tuple[Arrays]:
            values, wrt = saved
            given = pick(cotangents, self._has_cotangent)
            given = [zeros(ct.aval) if isinstance(ct, jax.custom_derivatives.SymbolicZero) else ct for ct in given]
            found = self._derivative(wrt.value)([*values, *given])[len(self._out_types) :]
            found = typed(found, pick(self._types, wrt.value))
            return (merge(found, [None] * (len(values) - len(found)), wrt.value),)

        run.defvjp(forward, backward, symbolic_zeros=True)
        return lambda shared_values, tiles: run([*shared_values, *tiles])

    def _sums(self, shared_values: Arrays, mapped: Arrays) -> Arrays:
        region, n = self.region, len(self.region.shared)

        def tiled(inputs: Arrays, body: Any, axes: Sequence[int | None], types: Sequence[Any]) -> Arrays:
            run = Tiles(
                lambda some, tiles: body([*some, *tiles]),
                self._in_axes,
                axes,
                types,
                *self._parts(inputs[n:]),
                jnp.float32,
            )
            return run(inputs[:n], inputs[n:])

        @jax.custom_vjp
        def run(inputs: Arrays) -> Arrays:
            return tiled(inputs, self._forward, region.axes, self._out_types)

        def forward(inputs: Any) -> tuple[Arrays, Any]:
            values, wrt = [one.value for one in inputs], perturbed(inputs)
            (ct_type,) = pick(self._out_types, self._has_cotangent)
            derivative = self._derivative(wrt)
            every = [*[None] * n, *self._in_axes]
            found = tiled(
                values,
                lambda tiles: derivative([*tiles, zeros(ct_type) + 1]),
                [*region.axes, *pick(every, wrt)],
                [*self._out_types, *(aval.to_ct_aval() for aval in pick(self._types, wrt))],
            )
            k = len(self._out_types)
            return found[:k], (found[k:], Static(wrt))

        def backward(saved: Any, cotangents: Any) -> tuple[Arrays]:
            gradients, wrt = saved
            (ct,) = pick(cotangents, self._has_cotangent)
            if isinstance(ct, jax.custom_derivatives.SymbolicZero):
                found: Arrays = [None] * len(gradients)
            else:
                found = [_times(gradient, ct) for gradient in gradients]
            return (merge(found, [None] * (len(wrt.value) - len(found)), wrt.value),)

        run.defvjp(forward, backward, symbolic_zeros=True)
        return run([*shared_values, *mapped])


def _times(gradient: Any, factor: Any) -> Any:
    wide = max(jnp.dtype("float32"), gradient.dtype, factor.dtype, key=lambda dtype: dtype.itemsize)
    return (gradient.astype(wide) * factor.astype(wide)).astype(gradient.dtype)


def _cut(shape: Sequence[int], state: Any, tile: int) -> tuple[int, ...]:
    return with_size(shape, state.dim, tile) if isinstance(state, Positions) else tuple(shape)
