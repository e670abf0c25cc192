"""Calls a function of pytrees so that its derivative passes saved arrays through codecs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax._core import check
from memjax._core.arguments import is_array
from memjax._core.arrays import is_float
from memjax._core.backward.derivatives import forward_mode_errors, forward_mode_message, reverse_only
from memjax._core.clear_errors import call_errors
from memjax._core.compat import eval_jaxpr
from memjax._core.lists import Arrays, drop, merge, pick
from memjax._core.program.jaxpr import axis_sizes, is_literal, nbytes
from memjax.compress._transform.array_codecs import ArrayCodecs
from memjax.compress._transform.derivative import Derivative
from memjax.compress._transform.keep.choose import Keep
from memjax.compress._transform.keep.which import Which

_FORWARD_MODE = forward_mode_message("memjax.compressed", "the function itself, of which forward mode saves nothing")


def call_compressed(
    f: Callable[..., Any], lasting: Any, passing: Any, *, user: Any, codecs: ArrayCodecs, which: Which
) -> Any:
    """`f(lasting, passing)`, differentiated through codecs.

    Args:
      f: a function of two pytrees. Their leaves, and those of its result, that are no arrays are left as they are.
      lasting: what lives until the backward pass anyway, and is never encoded; the same holds for what `f` closes over.
      passing: what may be encoded.
      user: what the user calls, for errors.
      codecs: the codecs of encoded arrays.
      which: which saved arrays to encode.
    """
    leaves, tree = jax.tree.flatten((lasting, passing))
    dynamic = [_is_dynamic(leaf) for leaf in leaves]
    arrays = [jnp.asarray(leaf) for leaf in pick(leaves, dynamic)]
    static_result = []

    def flat(*arrays):
        out = f(*jax.tree.unflatten(tree, merge(arrays, drop(leaves, dynamic), dynamic)))
        out_leaves, out_tree = jax.tree.flatten(out)
        out_dynamic = [_is_dynamic(leaf) for leaf in out_leaves]
        static_result.append((out_tree, out_dynamic, drop(out_leaves, out_dynamic)))
        return pick(out_leaves, out_dynamic)

    # A module's variables are not what a caller gives.
    given = passing if isinstance(user, type) else (lasting, passing)
    with call_errors("f_or_module", user, {"arguments": given}):
        closed = jax.make_jaxpr(flat)(*arrays)
    [(out_tree, out_dynamic, out_static)] = static_result
    inputs = [*closed.consts, *arrays]
    position = {var: i for i, var in enumerate([*closed.jaxpr.constvars, *closed.jaxpr.invars])}
    # An output that is an input is not passed through the derivative: it has nothing to do with what is saved.
    made = [is_literal(var) or var not in position for var in closed.jaxpr.outvars]
    lasts = [True] * (len(closed.consts) + sum(dynamic[: len(jax.tree.leaves(lasting))]))
    lasts += [False] * (len(inputs) - len(lasts))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path((lasting, passing))]
    names = [""] * len(closed.consts) + [_name(path) for path in pick(paths, dynamic)]

    run = _differentiable(closed, made, lasts, codecs, which, names)
    guarded = [reverse_only(value, _FORWARD_MODE) for value in inputs]
    with forward_mode_errors(_FORWARD_MODE):
        outs = iter(run(codecs.settings, guarded))
    every = [
        next(outs) if flag else inputs[position[var]] for var, flag in zip(closed.jaxpr.outvars, made, strict=True)
    ]
    return jax.tree.unflatten(out_tree, merge(every, out_static, out_dynamic))


def _is_dynamic(leaf: Any) -> bool:
    """Whether a leaf is traced; numbers are not."""
    return isinstance(leaf, jax.Array | np.ndarray) and is_array(leaf)


def _name(path: Any) -> str:
    """The path of a leaf of (lasting, passing) as text, without the position in that pair."""
    return jax.tree_util.keystr(path[1:], simple=True, separator="/")


def _differentiable(
    closed: Any, made: list[bool], lasting: list[bool], codecs: ArrayCodecs, which: Which, names: list[str]
) -> Callable[[Arrays, Arrays], Arrays]:
    """The program as a function of (the codecs' settings, its constants and inputs) that is differentiated by `Derivative`."""
    n_consts, axes = len(closed.consts), axis_sizes(closed)

    @jax.custom_vjp
    def run(settings, inputs):
        return pick(eval_jaxpr(closed.jaxpr, inputs[:n_consts], inputs[n_consts:]), made)

    def forward(settings, inputs):
        wanted = [primal.perturbed and is_float(primal.value) for primal in inputs]
        settings, inputs = ([primal.value for primal in group] for group in (settings, inputs))
        check.known_sizes("compressed", inputs)
        types = [jax.typeof(value) for value in inputs]
        derivative = Derivative(closed, made, types, wanted, lasting, which, codecs, names, axes)
        if which.where is not None and not derivative.keep.matched:
            fix = f"the named scopes of the function are {derivative.scopes}"
            raise check.fail(
                ValueError, "where", "a match for something that the backward pass reads", which.where, fix
            )
        _warn_if_nothing_is_encoded(derivative.keep, codecs)
        outs, kept = derivative.forward(inputs, codecs.with_settings(settings))
        return outs, (derivative, settings, kept)

    def backward(residuals, cotangents):
        derivative, settings, kept = residuals
        set_codecs = codecs.with_settings(settings)
        input_cotangents, statistics = derivative.backward(kept, set_codecs, cotangents)
        nones = [None] * (len(derivative.wanted) - len(input_cotangents))
        return set_codecs.settings_cotangents(statistics), merge(input_cotangents, nones, derivative.wanted)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _warn_if_nothing_is_encoded(keep: Keep, codecs: ArrayCodecs) -> None:
    if keep.refused and not keep.encoded:
        largest = max((var.aval for var in keep.refused), key=nbytes)
        warnings.warn(
            f"memjax.compressed leaves everything as it is: the code of {largest.str_short()} would take "
            f"{codecs.nbytes(largest):,} bytes and the array takes {nbytes(largest):,}. Give {codecs.name} fewer "
            f"bits per value, or leave the codec out for the default.",
            stacklevel=3,
        )
