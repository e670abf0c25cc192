"""ReLUs after the max-pooling that they come before: the same values and gradients, with less to compute and to keep.

The ReLU then is of a fraction of the values, and its mask, which a ReLU before pooling needs by itself, often follows from
what is kept of the array that was pooled: it is the next convolution's input.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from memjax._core.arrays import is_float
from memjax._core.jaxpr import bind, evaluate, inside, is_literal, read

_POOLING = "reduce_window_max"


def evaluate_pools_first(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], *, replace: dict[str, Callable[..., Any]]
) -> list[Any]:
    """The outputs of a jaxpr without calls.

    Args:
      jaxpr: of `consts` and `inputs`.
      consts, inputs: values.
      replace: by the name of a primitive, a function of its inputs and parameters that does the same.
    """
    relus = _relus_before_pooling(jaxpr)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    for eqn in jaxpr.eqns:
        values = read(env, eqn.invars)
        name, first = eqn.primitive.name, eqn.invars[0] if eqn.invars else None
        if eqn.outvars and eqn.outvars[0] in relus:
            outs = values
        elif name in replace:
            with inside(eqn):
                outs = [replace[name](*values, **eqn.params)]
        else:
            outs = bind(eqn, values)
        if name == _POOLING and not is_literal(first) and first in relus:
            with inside(relus[first]):
                outs = [jax.nn.relu(outs[0])]
        env.update(zip(eqn.outvars, outs, strict=True))
    return read(env, jaxpr.outvars)


def _relus_before_pooling(jaxpr: Any) -> dict[Any, Any]:
    """By output those that only a max-pooling reads."""
    readers: dict[Any, list[Any]] = {var: [None] for var in jaxpr.outvars if not is_literal(var)}
    for eqn in jaxpr.eqns:
        for atom in eqn.invars:
            if not is_literal(atom):
                readers.setdefault(atom, []).append(eqn)
    found = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "custom_jvp_call" and len(eqn.outvars) == 1:
            [out] = eqn.outvars
            mine = readers.get(out, [])
            if len(mine) == 1 and mine[0] is not None and _is_pooling(mine[0]) and _is_relu(eqn):
                found[out] = eqn
    return found


def _is_pooling(eqn: Any) -> bool:
    """Maxima of windows none of which is all padding: of such a one the ReLU would no longer be minus infinity."""
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
    """Whether it has the values and the derivative of `jax.nn.relu`, told by what these are computed by."""
    if len(eqn.invars) != 1 or not is_float(eqn.invars[0].aval):
        return False
    aval = eqn.invars[0].aval
    with_calls = jax.make_jaxpr(jax.nn.relu)(aval)
    in_place = lambda x: evaluate(with_calls.jaxpr, with_calls.consts, [x], differentiable=True)
    [relu] = jax.make_jaxpr(in_place)(aval).eqns
    if str(eqn.params["call_jaxpr"]) != str(relu.params["call_jaxpr"]):
        return False
    own, known = (
        jax.make_jaxpr(lambda x, t, one=one: jax.jvp(lambda x: bind(one, [x])[0], (x,), (t,)))(aval, aval)
        for one in (eqn, relu)
    )
    return str(own) == str(known)
