"""A function as two passes: one forwards, which gives residuals, and one backwards, which reads them.

Every transform that looks into a derivative asks here for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from memjax._core.lists import Arrays, drop, merge, pick
from memjax._core.program.jaxpr import Program, calls_in_place, instead, trace


def vjp(
    f: Callable[[Arrays], Sequence[Any]], inputs: Sequence[Any], wrt: Sequence[bool], outs: Sequence[bool] | None = None
) -> tuple[Arrays, Any]:
    """The outputs of `f`, and JAX's pullback, from cotangents of the outputs in `outs` to those of the inputs in `wrt`.

    The pullback returns a tuple of one list. It is a pytree, whose leaves are the residuals. Without `outs` all outputs have
    cotangents.
    """

    def outputs(chosen: Arrays) -> tuple[Arrays, Arrays]:
        every = list(f(merge(chosen, drop(inputs, wrt), wrt)))
        return (every, []) if outs is None else (pick(every, outs), drop(every, outs))

    found, pullback, others = jax.vjp(outputs, pick(inputs, wrt), has_aux=True)
    return (found if outs is None else merge(found, others, outs)), pullback


class TracedPasses:
    """The two passes of a function as programs.

    Args:
      f: the function, from a list of arrays to a list of arrays.
      types: of its inputs.
      wrt: which inputs to differentiate with respect to.
      outs: which outputs have a cotangent.
      axes: sizes of the named axes that its collectives run over.

    Attributes:
      closed: the forward pass as JAX traces it, from the inputs to the outputs, then the residuals.
      count: how many of its results are outputs.
      axes: as given.
    """

    def __init__(
        self,
        f: Callable[[Arrays], Sequence[Any]],
        types: Sequence[Any],
        wrt: Sequence[bool],
        outs: Sequence[bool],
        axes: dict[str, int],
    ):
        trees = []

        def with_residuals(*inputs: Any) -> Arrays:
            outputs, pullback = vjp(f, inputs, wrt, outs)
            residuals, tree = jax.tree.flatten(pullback)
            trees.append(tree)
            return [*outputs, *residuals]

        self.closed: Any = trace(with_residuals, types, axes)
        [self._tree] = trees
        self.count, self.axes = len(outs), axes

    @functools.cached_property
    def forward(self) -> Program:
        """The forward pass with calls in place."""
        return calls_in_place(self.closed, differentiable=False)

    @property
    def outputs(self) -> list[Any]:
        """The outputs, of `forward`."""
        return self.forward.outvars[: self.count]

    @property
    def residuals(self) -> list[Any]:
        """What of `forward` the backward pass reads: variables and literals."""
        return self.forward.outvars[self.count :]

    def backward(self, cotangents: Sequence[Any]) -> Program:
        """The backward pass from cotangents of these types, with calls in place. It reads variables of `forward`."""
        types = [self.closed.out_avals[self.count :], list(cotangents)]
        program = calls_in_place(trace(self.pull, types, self.axes), differentiable=False)
        return instead(program, dict(zip(program.invars, self.residuals, strict=False)))

    def pull(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Arrays:
        """The cotangents of the inputs in `wrt`."""
        return jax.tree.unflatten(self._tree, residuals)(list(cotangents))[0]
