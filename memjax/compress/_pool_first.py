"""ReLUs after the max-pooling that they come before: the same values and gradients, with less to compute and to keep.

The ReLU then is of a fraction of the values, and its mask, which a ReLU before pooling needs by itself, often follows from
what is kept of the array that was pooled: it is the next convolution's input.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from memjax._jaxpr import bind, is_literal, read
from memjax.remat._step import is_float


def evaluate_pools_first(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], *, replace: dict[str, Callable[..., Any]]
) -> list[Any]:
    """The outputs of a jaxpr without calls.

    Args:
      jaxpr: of `consts` and `inputs`.
      consts, inputs: values.
      replace: by the name of a primitive, a function of its inputs and parameters that does the same.
    """
    late = _late(jaxpr)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    for eqn in jaxpr.eqns:
        values = read(env, eqn.invars)
        if eqn.outvars[0] in late:
            outs = values
        elif eqn.primitive.name in replace:
            outs = [replace[eqn.primitive.name](*values, **eqn.params)]
        else:
            outs = bind(eqn, values)
        if eqn.invars and not is_literal(eqn.invars[0]) and eqn.invars[0] in late:
            outs = [jax.nn.relu(outs[0])]
        env.update(zip(eqn.outvars, outs, strict=True))
    return read(env, jaxpr.outvars)


def _late(jaxpr: Any) -> set[Any]:
    """Outputs of ReLUs that only a max-pooling reads."""
    readers: dict[Any, list[Any]] = {var: [None] for var in jaxpr.outvars if not is_literal(var)}
    for eqn in jaxpr.eqns:
        for atom in eqn.invars:
            if not is_literal(atom):
                readers.setdefault(atom, []).append(eqn)
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "custom_jvp_call" and len(eqn.outvars) == 1:
            [out] = eqn.outvars
            [*_, reader] = readers.get(out, [None])
            if len(readers.get(out, [])) == 1 and reader is not None and _is_pooling(reader) and _is_relu(eqn):
                found.add(out)
    return found


def _is_pooling(eqn: Any) -> bool:
    """Maxima of windows none of which is all padding: of such a one the ReLU would no longer be minus infinity."""
    if eqn.primitive.name != "reduce_window_max" or any(d != 1 for d in eqn.params["base_dilation"]):
        return False
    if any(d != 1 for d in eqn.params["window_dilation"]):
        return False
    [x], [out] = eqn.invars, eqn.outvars
    sizes = zip(x.aval.shape, out.aval.shape, strict=True)
    windows = zip(
        sizes, *(eqn.params[name] for name in ("window_dimensions", "window_strides", "padding")), strict=True
    )
    return all(low < k and (m - 1) * s < n + low for (n, m), k, s, (low, _) in windows)


def _is_relu(eqn: Any) -> bool:
    """Whether it has the values and the derivative of `jax.nn.relu`, told by what these are computed by."""
    if len(eqn.invars) != 1 or not is_float(eqn.invars[0].aval) or eqn.params["call_jaxpr"].consts:
        return False
    aval = eqn.invars[0].aval
    own, known = (
        jax.make_jaxpr(lambda x, t, f=f: jax.jvp(f, (x,), (t,)))(aval, aval)
        for f in (lambda x: bind(eqn, [x])[0], jax.nn.relu)
    )
    return str(own) == str(known)
