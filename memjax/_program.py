"""A function and its arguments as the program that JAX traces from them, and the program of its gradient."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType

from memjax._core import check
from memjax._core.arguments import (
    Parts,
    Statics,
    check_options,
    is_array,
    is_array_or_number,
    is_jitted,
    is_nnx,
    of_arrays,
    unbound,
)
from memjax._core.arrays import is_float
from memjax._core.clear_errors import call_errors, refuse_leaks, trace_errors
from memjax._core.meshes import device_of, own_sharding, parts, split_over
from memjax._residuals import Residuals, differentiated, residuals


@dataclass(frozen=True)
class Program:
    """What tracing `fn(*args, **kwargs)` gave.

    Attributes:
      stage: the traced stage; Flax NNX may have wrapped it.
      args, kwargs: those of the jitted function that was traced.
      parts: the arrays among the arguments, and Python's numbers, which are traced as scalars.
      given: how many positional arguments the caller gave. What `fn` is bound to comes before them.
      result: which of the program's flat results are differentiated if it has no backward pass of its own.
    """

    stage: Any
    args: tuple
    kwargs: dict[str, Any]
    parts: Parts
    given: int
    result: list[bool]

    @property
    def jaxpr(self) -> Any:
        return of_jax(self.stage).jaxpr

    @functools.cached_property
    def shardings(self) -> list[Any]:
        """Those of the program's inputs, as their arrays have them; None where that is not known."""
        told: dict[Any, Any] = {}  # Flax NNX has inputs in an order of its own
        for array in self.parts.arrays:
            kind, sharding = _kind(array), own_sharding(array)
            told[kind] = sharding if told.get(kind, sharding) == sharding else None
        if self.has_arrays_in_order:
            return [*map(own_sharding, self.parts.arrays)]
        return [told.get((aval.shape, aval.dtype)) for aval in self.jaxpr.in_avals]

    @property
    def has_arrays_in_order(self) -> bool:
        """Whether the program's inputs are the arrays of the arguments in their order, as far as types tell."""
        return [*map(_kind, self.parts.arrays)] == [(aval.shape, aval.dtype) for aval in self.jaxpr.in_avals]

    def floats_of(self, positions: Sequence[int]) -> list[bool]:
        """For each input, whether it is a float array in the positional arguments at these positions, or in what `fn` is bound
        to. In an NNX object only `nnx.Param`s count, as for `nnx.grad`."""
        marks = [jax.ShapeDtypeStruct(*_kind(array)) for array in self.parts.arrays]
        args, _, _ = self.parts.rebuild(marks)
        bound = len(args) - self.given
        chosen = [*args[:bound], *(args[bound + position] for position in positions)]
        found: set[int] = set()
        for leaf in jax.tree.leaves(chosen, is_leaf=is_nnx):
            found.update(map(id, jax.tree.leaves(nnx.split(leaf, nnx.Param, ...)[1]) if is_nnx(leaf) else [leaf]))
        return [id(mark) in found and is_float(mark) for mark in marks]

    @property
    def float_arrays(self) -> list[bool] | None:
        """For each input, whether it is a float array, and no number of Python; None if the order of inputs is not known."""
        if not self.has_arrays_in_order:
            return None
        pairs = zip(self.parts.arrays, self.jaxpr.in_avals, strict=True)
        return [is_array(leaf) and is_float(aval) for leaf, aval in pairs]

    @property
    def device(self) -> Any:
        """A device that it is compiled for."""
        return device_of(self.shardings)

    @property
    def devices(self) -> int:
        """Over how many devices what is computed under automatic axes is taken to be split."""
        return split_over(self.shardings, [not is_float(aval) for aval in self.jaxpr.in_avals])

    @property
    def notes(self) -> list[str]:
        """What bytes per device assume."""
        automatic = any(set(one.mesh.axis_types) == {AxisType.Auto} for one in self.shardings if parts(one) > 1)
        return [
            f"residual bytes are those of one of {self.devices} devices, if all is split as the arguments are"
        ] * automatic


@dataclass(frozen=True)
class Gradient:
    """The program with a backward pass: the function's own, or its derivative's.

    Attributes:
      jaxpr: the program.
      is_own: whether it is the function's own.
      residuals: what it holds between the passes.
    """

    jaxpr: Any
    is_own: bool
    residuals: Residuals


def traced(
    name: str, fn: Callable, args: tuple, kwargs: dict[str, Any], static: dict[str, Any] | None = None
) -> Program:
    """The program of `fn`, for the public function `name`. It raises what that says of `fn`.

    Args:
      static: `static_argnums` and `static_argnames`, as for `jax.jit`; those that are None are left out.
    """
    check.function("fn", fn, f"call memjax.{name}(fn, *args), not memjax.{name}(fn(*args))")
    if isinstance(fn, jax.stages.Compiled | jax.stages.Lowered):
        raise check.fail(TypeError, "fn", "a function", fn, f"pass what was jitted; {name} compiles it")
    if asked := {option: value for option, value in (static or {}).items() if value is not None}:
        if is_jitted(fn):
            [option, value], *_ = asked.items()
            raise check.fail(ValueError, option, "None where fn is jitted", value, "give it to jax.jit or memjax.jit")
        check_options(fn, asked)
        args, kwargs = Statics(fn, asked.get("static_argnums"), asked.get("static_argnames")).marked(args, kwargs)
    given = len(args)
    fn, args, kwargs = unbound(fn, args, kwargs)
    parts = Parts(args, kwargs, is_array_or_number)
    if jitted := is_jitted(fn):
        program: Any = fn
    else:
        program, args, kwargs = jax.jit(of_arrays(fn, parts)), (parts.arrays,), {}
    with call_errors("fn", fn, {"arguments": (*args, *kwargs.values())}), trace_errors("fn", fn):
        stage = program.trace(*args, **kwargs)
    refuse_leaks(fn, of_jax(stage))
    if jitted and len(parts.arrays) != len(of_jax(stage).jaxpr.in_avals):
        parts = Parts(args, kwargs)  # numbers are static arguments
    result = _differentiable(stage.out_info, has_updates=not jitted or of_jax(stage) is not stage)
    return Program(stage, args, kwargs, parts, given, result)


def gradient(program: Program, wrt: Sequence[bool] | None = None) -> Gradient | str:
    """The program with a backward pass, or why there is none. `wrt`: which inputs are differentiated where it is not its own."""
    found = residuals(program.jaxpr, program.devices)
    if found is not None:
        return Gradient(program.jaxpr, True, found)
    try:
        both = differentiated(program.jaxpr, program.result, wrt)
    except (NotImplementedError, TypeError, ValueError) as error:
        return f"fn cannot be differentiated: {str(error).splitlines()[0]}"
    found = None if both is None else residuals(both, program.devices)
    if found is None:
        return "fn has no float argument or no float result to differentiate"
    return Gradient(both, False, found)


def of_jax(stage: Any) -> Any:
    """JAX's own stage, which Flax NNX wraps in one of the same kind."""
    return getattr(stage, "traced", getattr(stage, "compiled", stage))


def _kind(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of an array, the type of one, or a number."""
    aval = leaf if hasattr(leaf, "dtype") else jax.typeof(leaf)
    return tuple(aval.shape), aval.dtype


def _differentiable(out: Any, *, has_updates: bool) -> list[bool]:
    """Which of a program's flat results are differentiated if it has no backward pass of its own.

    With `has_updates` new values of variables come with the result: after it, or before it if there are three parts.
    """
    result = out if not has_updates else out[2] if len(out) == 3 else out[0]
    first: Any = result[0] if isinstance(result, tuple) and result else result
    is_loss = getattr(first, "shape", None) == () and jax.numpy.issubdtype(first.dtype, jax.numpy.floating)
    flags = [index == 0 or not is_loss for index in range(len(jax.tree.leaves(result)))]
    rest = [False] * (len(jax.tree.leaves(out)) - len(flags))
    return rest + flags if has_updates and len(out) == 3 else flags + rest
