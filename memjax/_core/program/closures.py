"""Functions of any shapes whose closed-over arrays become arguments, as rules of custom derivatives need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from memjax._core.compat import is_tracer, varying
from memjax._core.lists import Arrays
from memjax._core.program.jaxpr import axis_sizes, evaluate


class Hoisted:
    """`f`, which may close over arrays, as a function of these and of its arguments.

    Unlike with `jax.closure_convert` the arguments may have other shapes than the examples: `f` is traced for each, the first
    time. In a backward pass what `f` closes over may be out of reach, so each shape has to have been there before.

    Attributes:
      axes: the sizes of the named axes over which `f` has collectives.
      constants: what `f` closes over, found by tracing it for the examples: the arrays that a derivative may be wanted of, and
        those that another trace has made.
    """

    def __init__(self, f: Callable[..., Any], *examples: Sequence[Any]):
        self._f = f
        self._programs: dict[Any, Any] = {}
        self.axes: dict[str, int] = {}
        self.constants: Arrays = []
        for example in examples:
            self.add(*example)

    def add(self, *example: Any) -> None:
        """One more example."""
        closed, _ = self.program(*example)
        self.axes |= axis_sizes(closed.jaxpr)
        known = set(map(id, self.constants))
        self.constants += [value for value in closed.consts if is_tracer(value) and id(value) not in known]

    def __call__(self, constants: Sequence[Any], *args: Any) -> Any:
        """`f(*args)` with `constants` in place of what it closes over."""
        closed, shapes = self.program(*args)
        values = {id(original): value for original, value in zip(self.constants, constants, strict=True)}
        consts = [values[id(value)] if id(value) in values else jnp.asarray(value) for value in closed.consts]
        outs = evaluate(closed.jaxpr, consts, jax.tree.leaves(args), differentiable=True)
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    def program(self, *args: Any) -> tuple[Any, Any]:
        """(program, types of results) for arguments like these."""
        leaves, tree = jax.tree.flatten(args)
        types = [leaf if hasattr(leaf, "manual_axis_type") else jax.typeof(leaf) for leaf in leaves]
        key = tree, *((aval.shape, aval.dtype, varying(aval)) for aval in types)
        if key not in self._programs:
            self._programs[key] = jax.make_jaxpr(self._f, return_shape=True)(*args)
        return self._programs[key]
