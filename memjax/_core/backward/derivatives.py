"""Rules of derivatives: a function takes those of another, or refuses forward mode with a reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from memjax._core.arrays import is_float
from memjax._core.compat import in_forward_rule, lower_early
from memjax._core.lists import Arrays, drop, merge, pick


@jax.tree_util.register_static
class Static:
    """A hashable value that travels from a forward to a backward rule."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.value == other.value


def perturbed(arguments: Sequence[Any]) -> tuple[bool, ...]:
    """Whether a gradient is wanted of each argument of a forward rule with symbolic zeros."""
    return tuple(argument.perturbed and is_float(jax.typeof(argument.value)) for argument in arguments)


def differentiated_as(
    reference: Callable[..., Any], fast: Callable[..., Any], *, replaced: bool = False
) -> Callable[..., Any]:
    """`fast`, which returns (out, extra), with the derivatives of `reference`, which returns `out`; `extra` has none.

    With `replaced`, where it is differentiated, `out` has the values of `reference`, too. What `fast` computes for it is then
    dead code.

    This is for derivatives of derivatives. What `fast` does to save memory, loops of varying length included, need
    not be differentiable, and nothing of it is kept for a second backward pass.
    """

    @jax.custom_jvp
    def run(*arguments):
        return fast(*arguments)

    def rule(primals, tangents):
        out, extra = run(*primals)
        leaves, tree = jax.tree.flatten(primals)
        directions = jax.tree.leaves(tangents)
        moving = [not isinstance(tangent, SymbolicZero) for tangent in directions]
        of_leaves = lambda leaves: reference(*jax.tree.unflatten(tree, leaves))
        again, tangent = jvp_of_some(of_leaves, leaves, moving, pick(directions, moving))
        return (again if replaced else out, extra), (tangent, zero_from_primal(extra, symbolic_zeros=True))

    run.defjvp(rule, symbolic_zeros=True)
    return in_forward_rule(run)


def jvp_of_some(f: Callable[[Arrays], Any], values: Arrays, moving: Sequence[bool], tangents: Arrays) -> Any:
    """`jax.jvp` of `f(values)` with respect to the values that are `moving`, in the direction of their `tangents`."""
    fixed = drop(values, moving)
    of_moving = lambda some: f(merge(some, fixed, moving))
    return jax.jvp(of_moving, (pick(values, moving),), (tangents,))


_reverse_only_p = core.Primitive("reverse_only")
"""The identity on tangents, of which only the transpose can be evaluated."""


def _refuse(*_: Any, message: str, **__: Any) -> Any:
    raise TypeError(message)


_reverse_only_p.def_impl(_refuse)
_reverse_only_p.def_abstract_eval(lambda tangent, *, message: tangent)
mlir.register_lowering(_reverse_only_p, lambda _, *__, message: _refuse(message=message))
batching.defvectorized(_reverse_only_p)
ad.deflinear2(_reverse_only_p, lambda ct, _, *, message: [ct])
lower_early(_reverse_only_p, _refuse)


_without_derivative_p = core.Primitive("without_derivative")
"""The identity on values that must not be differentiated."""


_without_derivative_p.def_impl(lambda value, *, message: value)
_without_derivative_p.def_abstract_eval(lambda value, *, message: value)
mlir.register_lowering(_without_derivative_p, lambda _, value, *, message: [value])
batching.defvectorized(_without_derivative_p)
ad.primitive_jvps[_without_derivative_p] = _refuse


def without_derivative(value: Any, message: str) -> Any:
    """`value`. Differentiating it in any mode raises TypeError with `message`."""
    return _without_derivative_p.bind(value, message=message)


_only_differentiated_p = core.Primitive("only_differentiated")
"""The identity on a value of a function with rules of derivatives, which is never computed where these are used."""


_only_differentiated_p.def_impl(lambda value, *, message: _refuse_value(message))
_only_differentiated_p.def_abstract_eval(lambda value, *, message: value)
mlir.register_lowering(_only_differentiated_p, lambda _, value, *, message: _refuse_value(message))
batching.defvectorized(_only_differentiated_p)
lower_early(_only_differentiated_p, lambda value, *, message: _refuse_value(message))


def _refuse_value(message: str) -> Any:
    raise ValueError(message)


def only_differentiated(value: Any, message: str) -> Any:
    """`value`, in the body of a `jax.custom_vjp`. Evaluating that undifferentiated raises ValueError with `message`."""
    return _only_differentiated_p.bind(value, message=message)


def only_transposed(tangent: Any, message: str) -> Any:
    """`tangent`, which can be transposed. Evaluating it, as forward mode does, raises TypeError with `message`."""
    return _reverse_only_p.bind(tangent, message=message)


def forward_mode_message(name: str, instead: str = "") -> str:
    """Why `name` refuses forward mode, and what to use."""
    other = f", or {instead}" if instead else ""
    modes = "jax.jvp, jax.jacfwd, jax.linearize"
    reverse = "jax.grad, jax.vjp, jax.jacrev"
    return f"{name} cannot be differentiated in forward mode ({modes}): use reverse mode ({reverse}){other}"


@contextlib.contextmanager
def forward_mode_errors(message: str) -> Iterator[None]:
    """Says `message` where `jax.vmap` of `jax.jvp` meets a `jax.custom_vjp` before a guard evaluates a tangent."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(message) from error


def reverse_only(value: Any, message: str) -> Any:
    """`value`. Forward-mode differentiation of a float raises TypeError with `message`."""
    if not is_float(jax.typeof(value)):
        return value

    @jax.custom_jvp
    def identity(value):
        return value

    @identity.defjvp
    def _(primals, tangents):
        return primals[0], only_transposed(tangents[0], message)

    return in_forward_rule(identity)(value)


def refusing_forward_mode(f: Callable[..., Any], message: str) -> Callable[..., Any]:
    """`f`. Forward-mode differentiation with respect to its arguments raises TypeError with `message`.

    Forward mode over reverse mode stays: only the tangents of `f` itself are refused, not those of its backward pass.
    """

    def run(*arguments: Any) -> Any:
        guarded = jax.tree.map(lambda leaf: reverse_only(leaf, message), arguments)
        with forward_mode_errors(message):
            return f(*guarded)

    return run
