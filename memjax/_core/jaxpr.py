"""Evaluating jaxprs equation by equation, calls in place, so that what they keep and compute can be seen and replaced."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from memjax._core.compat import scope, settings
from memjax._core.primitives import CUSTOM_CALLS, PLAIN_CALLS


def nbytes(aval: Any) -> int:
    """Of an array of this type: integers of 2 and 4 bits are packed; typed PRNG keys included."""
    bits = jnp.iinfo(aval.dtype).bits if jnp.issubdtype(aval.dtype, jnp.integer) else 8 * aval.dtype.itemsize
    return -(-math.prod(aval.shape) * bits // 8)


def is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)


@contextlib.contextmanager
def inside(eqn: Any) -> Iterator[None]:
    """In an equation's scope, and with its settings."""
    name = scope(eqn)
    with settings(eqn), jax.named_scope(name) if name else contextlib.nullcontext():
        yield


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The equation's outputs for these inputs, in its scope."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with inside(eqn):
        out = eqn.primitive.bind(*values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def axis_sizes(jaxpr: Any) -> dict[str, int]:
    """Sizes of the named axes that the collectives of a program run over; to be asked where these names are known."""
    names = {effect.name for effect in jaxpr.effects if hasattr(effect, "name")}
    return {name: jax.lax.axis_size(name) for name in sorted(names, key=str)}


def trace(f: Callable[..., Any], types: Sequence[Any], axes: dict[str, int]) -> Any:
    """The program of `f` for arguments of these types, with the named axes `axes`.

    A rule of a custom derivative may run where the names of a surrounding `jax.vmap` or `jax.shard_map` are no longer known.
    """
    return jax.make_jaxpr(f, axis_env=[(name, size) for name, size in axes.items() if not _is_known(name)])(*types)


def _is_known(axis_name: str) -> bool:
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    *,
    differentiable: bool,
) -> list[Any]:
    """The outputs of a jaxpr, the bodies of calls evaluated in place.

    Args:
      jaxpr: of `consts` and `inputs`.
      consts, inputs: values.
      differentiable: keep calls with a derivative rule of their own as they are.
    """
    calls = PLAIN_CALLS if differentiable else PLAIN_CALLS | CUSTOM_CALLS
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    for eqn in jaxpr.eqns:
        values = read(env, eqn.invars)
        name = eqn.primitive.name
        body = eqn.params.get(calls[name]) if name in calls else None
        if isinstance(body, core.ClosedJaxpr):
            with jax.named_scope(scope(eqn)) if scope(eqn) else contextlib.nullcontext():
                outs = evaluate(body.jaxpr, body.consts, values, differentiable=differentiable)
        else:
            outs = bind(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return read(env, jaxpr.outvars)


def read(env: dict[Any, Any], atoms: Sequence[Any]) -> list[Any]:
    """The values of variables and literals."""
    return [atom.val if is_literal(atom) else env[atom] for atom in atoms]
