"""Moves ReLUs from before a max-pooling to behind it: the same values and gradients, with less to compute and to keep.

The ReLU then has a fraction of the values. Its output is often the next convolution's input, from which its mask follows; before
pooling the mask has to be kept.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from memjax._core.arrays import is_float
from memjax._core.program.jaxpr import Program, bind, calls_in_place, consumers, inside, is_literal, read, same_program

_POOLING = "reduce_window_max"


def evaluate_pools_first(
    program: Program, inputs: Sequence[Any], *, replace: dict[str, Callable[[Any, list[Any]], list[Any]]]
) -> list[Any]:
    """The outputs of a program whose only calls are those with a derivative of their own.

    Args:
      program: see `calls_in_place`.
      inputs: values.
      replace: by the name of a primitive, a function of an equation and its inputs that does the same.
    """
    relus = _relus_before_pooling(program)
    env = dict(zip([*program.constvars, *program.invars], [*program.consts, *inputs], strict=True))
    for eqn in program.eqns:
        values = read(env, eqn.invars)
        name, first = eqn.primitive.name, eqn.invars[0] if eqn.invars else None
        if eqn.outvars and eqn.outvars[0] in relus:
            outs = values
        elif name in replace:
            with inside(eqn):
                outs = replace[name](eqn, values)
        else:
            outs = bind(eqn, values)
        if name == _POOLING and not is_literal(first) and first in relus:
            with inside(relus[first]):
                outs = [jax.nn.relu(outs[0])]
        env.update(zip(eqn.outvars, outs, strict=True))
    return read(env, program.outvars)


def _relus_before_pooling(program: Program) -> dict[Any, Any]:
    """The ReLUs that only a max-pooling reads, by their outputs."""
    readers = consumers(program)
    relus = {}
    for eqn in program.eqns:
        if eqn.primitive.name == "custom_jvp_call" and len(eqn.outvars) == 1:
            [out] = eqn.outvars
            pools = [_is_pooling(reader) for reader in readers.get(out, [])]
            if pools == [True] and not any(out is var for var in program.outvars) and _is_relu(eqn):
                relus[out] = eqn
    return relus


def _is_pooling(eqn: Any) -> bool:
    """Whether an equation takes maxima of windows. No window may be all padding: a ReLU would turn its -inf into zero."""
    if eqn.primitive.name != _POOLING or any(d != 1 for d in eqn.params["base_dilation"]):
        return False
    if any(d != 1 for d in eqn.params["window_dilation"]):
        return False
    [x], [out] = eqn.invars, eqn.outvars
    sizes = zip(x.aval.shape, out.aval.shape, strict=True)
    windows = zip(
        sizes, *(eqn.params[name] for name in ("window_dimensions", "window_strides", "padding")), strict=True
    )
    return all(n > 0 and low < k and (m - 1) * s < n + low for (n, m), k, s, (low, _) in windows)


def _is_relu(eqn: Any) -> bool:
    """Whether the equation has the value and the derivative of `jax.nn.relu`: the same program for both together."""
    if len(eqn.invars) != 1 or not is_float(eqn.invars[0].aval):
        return False
    body = calls_in_place(eqn.params["call_jaxpr"], differentiable=False)
    if [inner.primitive.name for inner in body.eqns] != ["max"]:
        return False  # before its derivative is asked for
    aval = eqn.invars[0].aval

    def derivative(f):
        traced = jax.make_jaxpr(lambda x, tangent: jax.jvp(f, (x,), (tangent,)))(aval, aval)
        return calls_in_place(traced, differentiable=False)

    return same_program(derivative(lambda x: bind(eqn, [x])[0]), derivative(jax.nn.relu))
