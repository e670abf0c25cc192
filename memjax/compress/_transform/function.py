"""Functions of pytrees, differentiated through a codec."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax._core.arrays import is_float, zeros
from memjax._core.compat import eval_jaxpr
from memjax._core.derivatives import reverse_only
from memjax._core.jaxpr import axis_sizes, is_literal, nbytes
from memjax._core.lists import merge, pick
from memjax.compress._training.layers import AnyCodec, Layers, Recorder
from memjax.compress._transform.derivative import Derivative
from memjax.compress._transform.keep import Which

_FORWARD_MODE = (
    "memjax.compressed cannot be differentiated in forward mode (jax.jvp, jax.jacfwd, jax.linearize), which saves nothing "
    "that could be compressed. Call the function itself there, without memjax.compressed; or use reverse mode: jax.grad, "
    "jax.vjp or jax.jacrev"
)


def call_compressed(f: Callable[..., Any], lasting: Any, passing: Any, *, codec: AnyCodec, which: Which) -> Any:
    """`f(lasting, passing)`, differentiated through `codec`.

    Args:
      f: a function of two pytrees; their leaves that are no arrays are static.
      lasting: what lives until the backward pass anyway, and is never encoded. So is what `f` closes over.
      passing: what may be encoded.
      codec: of what is encoded.
      which: of the saved arrays to encode.
    """
    leaves, tree = jax.tree.flatten((lasting, passing))
    dynamic = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    static = [None if flag else leaf for leaf, flag in zip(leaves, dynamic, strict=True)]
    arrays = [jnp.asarray(leaf) for leaf in pick(leaves, dynamic)]

    def flat(*arrays):
        rest = iter(arrays)
        full = [next(rest) if flag else leaf for leaf, flag in zip(static, dynamic, strict=True)]
        return f(*jax.tree.unflatten(tree, full))

    names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path((lasting, passing))]
    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    jaxpr = closed.jaxpr
    inputs = [*closed.consts, *arrays]
    position = {var: i for i, var in enumerate([*jaxpr.constvars, *jaxpr.invars])}
    # An output that is an input goes round: it has nothing to do with what is saved.
    made = [is_literal(var) or var not in position for var in jaxpr.outvars]
    lasts = [True] * (len(closed.consts) + sum(dynamic[: len(jax.tree.leaves(lasting))]))
    lasts += [False] * (len(inputs) - len(lasts))

    names = [""] * len(closed.consts) + pick(names, dynamic)
    run = _differentiable(jaxpr, made, lasts, codec, which, names, axis_sizes(closed))
    guarded = [reverse_only(value, _FORWARD_MODE) if is_float(jax.typeof(value)) else value for value in inputs]
    try:
        outs = iter(run(_settings(codec), guarded))
    except TypeError as error:  # jax.vmap of jax.jvp meets the custom rule before the guard
        if "forward-mode" not in str(error):
            raise
        raise TypeError(_FORWARD_MODE) from error
    every = [next(outs) if flag else inputs[position[var]] for var, flag in zip(jaxpr.outvars, made, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shapes), every)


def _name(path: Any) -> str:
    """Of a leaf of (lasting, passing), without what says which argument it is in."""
    return jax.tree_util.keystr(path[1:], simple=True, separator="/")


def _is_setting(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


def _settings(codec: AnyCodec) -> list[Any]:
    """The codec's leaves that are arrays: its bound, perhaps. What is a Python number is part of the program."""
    return [leaf for leaf in jax.tree.leaves(codec) if _is_setting(leaf)]


def _with_settings(codec: AnyCodec, settings: list[Any]) -> AnyCodec:
    leaves, tree = jax.tree.flatten(codec)
    traced = [_is_setting(leaf) for leaf in leaves]
    return jax.tree.unflatten(tree, merge(settings, [leaf for leaf in leaves if not _is_setting(leaf)], traced))


def _differentiable(
    jaxpr: Any,
    made: list[bool],
    lasts: list[bool],
    codec: AnyCodec,
    which: Which,
    names: list[str],
    axes: dict[str, int],
) -> Callable[..., Any]:
    n_consts = len(jaxpr.constvars)

    @jax.custom_vjp
    def run(settings, inputs):
        return pick(eval_jaxpr(jaxpr, inputs[:n_consts], inputs[n_consts:]), made)

    def forward(settings, inputs):
        wanted = [primal.perturbed and is_float(primal.value) for primal in inputs]
        settings, inputs = ([primal.value for primal in group] for group in (settings, inputs))
        types = [jax.typeof(value) for value in inputs]
        zeros_kept = getattr(codec, "keeps_zeros", False)
        # Codes of `Layers` say what they need, so they are made even where they are larger.
        code_nbytes = None if isinstance(codec, Layers | Recorder) else codec.nbytes
        derivative = Derivative(jaxpr, made, types, wanted, lasts, which, zeros_kept, code_nbytes, names, axes)
        if which.where is not None and not derivative.keep.matched:
            raise ValueError(
                f"where={which.where!r} matches nothing that the backward pass reads. "
                f"The named scopes of the function are {derivative.scopes}."
            )
        if code_nbytes is not None and derivative.keep.refused and not derivative.keep.encoded:
            largest = max((var.aval for var in derivative.keep.refused), key=nbytes)
            warnings.warn(
                f"memjax.compressed leaves everything as it is: the code of {largest.str_short()} would take "
                f"{code_nbytes(largest):,} bytes and the array takes {nbytes(largest):,}. Give {type(codec).__name__} fewer "
                f"bits per value, or leave the codec out for the default.",
                stacklevel=2,
            )
        outs, kept = derivative.forward(inputs, _with_settings(codec, settings))
        return outs, (derivative, settings, kept)

    def backward(residuals, cotangents):
        derivative, settings, kept = residuals
        own = _with_settings(codec, settings)
        cts, statistics = derivative.backward(kept, own, cotangents)
        others = [None] * (len(derivative.wanted) - len(cts))
        found: list[Any] = [None] * len(settings)
        if statistics is not None:
            assert isinstance(own, Layers)
            nothing = dataclasses.replace(own, bound=zeros(jax.typeof(own.bound)), statistics=statistics)
            found = _settings(nothing)
        return found, merge(cts, others, derivative.wanted)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run
