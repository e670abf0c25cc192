"""Calls a function of pytrees so that its derivative passes saved arrays through codecs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax._core.arguments import is_array
from memjax._core.backward.derivatives import forward_mode_errors, forward_mode_message, reverse_only
from memjax._core.clear_errors import call_errors
from memjax._core.lists import drop, merge, pick
from memjax.compress._transform.array_codecs import ArrayCodecs
from memjax.compress._transform.differentiable import Differentiable
from memjax.compress._transform.keep.parameters import inputs_of
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
    lasts = [True] * (len(closed.consts) + sum(dynamic[: len(jax.tree.leaves(lasting))]))
    lasts += [False] * (len(inputs) - len(lasts))
    given_inputs = inputs_of(lasts, [jax.typeof(value) for value in inputs])
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path((lasting, passing))]
    names = [""] * len(closed.consts) + [_name(path) for path in pick(paths, dynamic)]

    run = Differentiable(closed, given_inputs, codecs, which, names)
    guarded = [reverse_only(value, _FORWARD_MODE) for value in inputs]
    with forward_mode_errors(_FORWARD_MODE):
        every = run(guarded)
    return jax.tree.unflatten(out_tree, merge(every, out_static, out_dynamic))


def _is_dynamic(leaf: Any) -> bool:
    """Whether a leaf is traced; numbers are not."""
    return isinstance(leaf, jax.Array | np.ndarray) and is_array(leaf)


def _name(path: Any) -> str:
    """The path of a leaf of (lasting, passing) as text, without the position in that pair."""
    return jax.tree_util.keystr(path[1:], simple=True, separator="/")
