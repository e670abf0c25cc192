"""`adaptive`: an optax transformation that sets each array's bound from how far gradients may be off.

Equations 2 to 9 of Jin et al. 2020, "A Novel Memory-Efficient Deep Learning Training Framework via Error-Bounded Lossy
Compression".
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int32

from memjax._core import check
from memjax.compress._training.layers import Layers, Statistics, split_layers

_MOMENTA = ("trace", "mu")  # of optax.trace (SGD), and of Adam and its kin
# Half a step of `ErrorBounded` is a power of two, the largest below the allowed bound: between half of it and all of it, evenly
# on a logarithmic scale. The mean square of that share is 3 / (8 log 2); with bounds this many times as large it is 1.
_WIDER = (8 / 3 * math.log(2)) ** 0.5


class AdaptiveState(NamedTuple):
    """State of `adaptive`. It consists of arrays and can be saved like any other.

    Attributes:
      inner: state of the wrapped transformation.
      step: updates so far.
      since: updates since the bounds were last set.
      sums: for each `Layers` among the parameters, its statistics added up over the last `since` updates.
      last: for each `Layers`, the statistics of the latest update.
      clip: state of the transformation `clip`.
    """

    inner: Any
    step: Int32[Array, ""]
    since: Int32[Array, ""]
    sums: tuple[Statistics, ...]
    last: tuple[Statistics, ...]
    clip: Any = ()


def predicted_sigma(
    statistics: Statistics, half_width: Float[Array, " n"], *, coefficient: float | None = None
) -> Float[Array, "n m"]:
    """Standard deviation of the errors of gradients, if values have uniformly distributed errors.

    A gradient is a sum over positions, sum_j A_j L_j. Independent errors of the A_j between -e and e change it by a number whose
    variance is e^2 / 3 sum_j L_j^2, where j runs over the positions where A is not zero, a share R of all (Jin et al. 2020,
    equations 2 to 7):

        sigma = e sqrt(R sum_j L_j^2 / 3)

    `coefficient` selects their simplification, `a mean|L| sqrt(N R) e`, where N is the number of examples in a batch. They
    found a = 0.32, but it depends on the distribution of the cotangents.

    Args:
      statistics: the statistics of one step.
      half_width: the largest error e of each array. `ErrorBounded` has half its step, which is between half the bound and the
        bound; bounds that `adaptive` has set are half a step.
      coefficient: a, or None for the equation above.
    """
    if not isinstance(statistics, Statistics):
        raise check.fail(TypeError, "statistics", "those of memjax.compress.Layers", statistics)
    check.array("half_width", half_width, ndim=1, floating=True)
    if half_width.shape != statistics.uses.shape:
        wanted = f"of shape {statistics.uses.shape}, a number for each array"
        raise check.fail(ValueError, "half_width", wanted, half_width)
    if coefficient is not None:
        check.number("coefficient", coefficient, positive=True, fix="0.32 is the paper's")
    uses = jnp.maximum(statistics.uses, 1e-30)
    share = (statistics.nonzero / uses)[:, None]
    if coefficient is None:
        return half_width[:, None] * jnp.sqrt(statistics.power * share / 3)
    examples = statistics.examples[:, None]
    return coefficient * half_width[:, None] * statistics.cotangent / uses[:, None] * jnp.sqrt(examples * share)


def scale_gradient(gradients: Any, by: Float[Array, ""] | float) -> Any:
    """The gradient of a loss that is `by` times as large, with the statistics of such a gradient."""
    if not isinstance(by, jax.Array):
        by = check.number("by", by)
    elif by.shape != ():
        raise check.fail(ValueError, "by", "one number", by)

    def scaled(g: Any) -> Any:
        if not isinstance(g, Layers):
            check.array("gradients", g, fix="pass a pytree of arrays and Layers")
            return g * jnp.asarray(by, g.dtype)
        cotangent, power = g.statistics.cotangent * by, g.statistics.power * jnp.square(by)
        return dataclasses.replace(g, statistics=g.statistics._replace(cotangent=cotangent, power=power))

    return jax.tree.map(scaled, gradients, is_leaf=lambda node: isinstance(node, Layers))


def adaptive(
    tx: optax.GradientTransformation,
    *,
    interval: int = 1000,
    sigma: float = 0.01,
    coefficient: float | None = None,
    coarsest: float = 1.0,
    clip: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    """An optimizer that applies `tx` to the parameters and sets the bounds of the `Layers` among them.

    Every `interval` updates, and before that after 1, 2, 4, ... updates, the bound of each array is set so that the error of
    the gradients that it is multiplied into has a standard deviation of about `sigma` times their mean absolute momentum (Jin
    et al. 2020, equations 8 and 9):

        bound = sigma mean|M| / sqrt(R sum_j L_j^2 / 3)

    The statistics are means over the updates since the bounds were last set: see `predicted_sigma`. Bounds are rounded to
    powers of two, as steps are: the deviation for one array is 0.68 to 1.36 times `sigma`, and its root mean square over many
    arrays is `sigma`. If an array is multiplied into several gradients, the smallest bound is taken. M is the momentum in the
    state of `tx` (optax's `trace`, or `mu`), or else the gradient. Arrays that are not multiplied into a gradient of a weight
    keep their bound, as do those whose cotangents are zero.

    The equations assume that errors have zero mean. Equal values have errors with a small mean (`ErrorBounded`), which adds up
    where many values are alike, as in the first layers of networks for large images, and which grows with the step. So no step,
    which is at most twice the bound, is wider than `coarsest` times the mean magnitude of the values that are not zero. That
    mean is taken from decoded values, which wide steps enlarge: a `coarsest` of 4 or more limits nothing.

    Works under `jit` and `shard_map`, where gradients have to be added up or averaged over devices, and statistics with them.
    Averaging makes `sum_j L_j^2` too large, and bounds too strict by the square root of the number of devices.

    Args:
      tx: the optimizer; it does not see the `Layers`.
      interval: updates between changes of the bounds.
      sigma: the root mean square of the error over arrays, as a share of the momentum.
      coefficient: use the simplified equation 6 with this a, such as 0.32.
      coarsest: the widest step, in mean magnitudes.
      clip: applied to gradients before `tx`, such as `optax.clip_by_global_norm(1.0)`; it has to scale all gradients alike.
        Statistics are scaled by its change of the global norm: as a part of `tx` it would make the momentum smaller but not
        the statistics, and the bounds too strict by the same factor.

    Raises:
      TypeError: `tx` or `clip` is no gradient transformation.
      ValueError: `interval`, `sigma`, `coefficient` or `coarsest` is not positive; at `init`, there are no `Layers` among the
        parameters, or a weight of theirs is not.
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise check.fail(TypeError, "tx", "a gradient transformation", tx, "pass optax.sgd(0.1), for example")
    check.integer("interval", interval, least=1)
    check.number("sigma", sigma, positive=True, fix="0.01 is the default")
    if coefficient is not None:
        check.number("coefficient", coefficient, positive=True, fix="0.32 is the paper's")
    if not (isinstance(coarsest, float) and coarsest == math.inf):
        check.number("coarsest", coarsest, positive=True, fix="1 is the default, infinity no limit")
    if not isinstance(clip, optax.GradientTransformation | None):
        fix = "pass optax.clip_by_global_norm(1.0), for example"
        raise check.fail(TypeError, "clip", "a gradient transformation or None", clip, fix)
    bounds = functools.partial(_bounds, sigma=sigma, coefficient=coefficient, coarsest=coarsest)
    return optax.GradientTransformation(
        functools.partial(_init, tx, clip), functools.partial(_update, tx, clip, interval, bounds)
    )


def _init(tx: optax.GradientTransformation, clip: optax.GradientTransformation | None, params: Any) -> AdaptiveState:
    all_layers, weights = _without_layers(params)
    if not all_layers:
        raise ValueError("params must contain the Layers that memjax.compress.layers made, beside the parameters.")
    for layers in all_layers:
        _paths_of_weights(layers, weights)
    # Each array is its own: they are donated.
    zeros = lambda: tuple(jax.tree.map(jnp.zeros_like, layers.statistics) for layers in all_layers)
    none = lambda: jnp.zeros((), jnp.int32)
    return AdaptiveState(tx.init(weights), none(), none(), zeros(), zeros(), clip.init(weights) if clip else ())


def _update(
    tx: optax.GradientTransformation,
    clip: optax.GradientTransformation | None,
    interval: int,
    bounds_of: Callable[..., Array],
    updates: Any,
    state: AdaptiveState,
    params: Any = None,
) -> tuple[Any, AdaptiveState]:
    if params is None:
        raise ValueError("params must be given to the update of memjax.compress.adaptive: they hold the bounds.")
    if not isinstance(state, AdaptiveState):
        raise check.fail(TypeError, "state", "an AdaptiveState", state, "pass what init returned")
    all_layers, weights = _without_layers(params)
    clip_state = state.clip
    if clip is not None:
        updates, clip_state = _clipped(updates, clip, clip_state, weights)
    with_statistics, gradients = _without_layers(updates)
    if len(with_statistics) != len(all_layers):
        wanted = f"as many Layers as params has, {len(all_layers)}"
        fix = "differentiate with respect to the Layers, too"
        raise check.fail(ValueError, "updates", wanted, len(with_statistics), fix)
    new_updates, inner = tx.update(gradients, state.inner, weights)
    last = tuple(layers.statistics for layers in with_statistics)
    sums = jax.tree.map(jnp.add, state.sums, last)
    step, since = state.step + 1, state.since + 1
    due = (step % interval == 0) | ((step < interval) & (step & (step - 1) == 0))

    def new_bounds():
        magnitudes = _magnitudes(_momentum(inner, gradients))
        bounds = []
        for layers, total in zip(all_layers, sums, strict=True):
            momenta = [[magnitudes[path] for path in paths] for paths in _paths_of_weights(layers, weights)]
            mean = jax.tree.map(lambda field: field / since.astype(jnp.float32), total)
            bounds.append(bounds_of(layers.bound, mean, momenta))
        return bounds

    # The momenta are as large as the parameters: they are read only when they are needed.
    bounds = jax.lax.cond(due, new_bounds, lambda: [layers.bound for layers in all_layers])
    changes = [
        dataclasses.replace(layers, bound=bound - layers.bound, statistics=jax.tree.map(jnp.zeros_like, total))
        for layers, bound, total in zip(all_layers, bounds, sums, strict=True)
    ]
    sums = jax.tree.map(lambda total: jnp.where(due, jnp.zeros_like(total), total), sums)
    new_state = AdaptiveState(inner, step, jnp.where(due, 0, since), sums, last, clip_state)
    return _with_layers(new_updates, changes), new_state


def _clipped(updates: Any, clip: optax.GradientTransformation, state: Any, params: Any) -> tuple[Any, Any]:
    """Applies `clip` to the gradients and scales the statistics accordingly; returns these and the new state of `clip`."""
    all_layers, before = _without_layers(updates)
    after, state = clip.update(before, state, params)
    norms = [optax.tree_utils.tree_norm(gradients).astype(jnp.float32) for gradients in (after, before)]
    scale = norms[0] / norms[1]
    scale = jnp.where(jnp.isfinite(scale), scale, 1)
    return _with_layers(after, [scale_gradient(layers, scale) for layers in all_layers]), state


def _bounds(
    old: Array,
    mean: Statistics,
    momenta: list[list[Array]],
    *,
    sigma: float,
    coefficient: float | None,
    coarsest: float,
) -> Array:
    """New error bounds, one per saved array.

    `momenta[i][j]` is the mean absolute momentum of the j-th weight whose gradient reads array i. Where no usable bound results,
    the old one stays.
    """
    per_unit = predicted_sigma(mean, jnp.ones_like(old), coefficient=coefficient)
    readers = per_unit.shape[1]
    rows = [jnp.stack([*of_array, *[jnp.float32(jnp.inf)] * (readers - len(of_array))]) for of_array in momenta]
    bound = jnp.min(jnp.where(per_unit > 0, sigma * jnp.stack(rows) / jnp.maximum(per_unit, 1e-37), jnp.inf), 1)
    # Without a use both statistics are zero.
    widest = coarsest / 2 * mean.magnitude / jnp.maximum(mean.nonzero, 1e-30)
    new = _power_of_two(jnp.where(widest > 0, jnp.minimum(_WIDER * bound, widest), _WIDER * bound))
    return jnp.where(jnp.isfinite(bound) & jnp.isfinite(new) & (new > 0), new, old)


def _power_of_two(x: Array) -> Array:
    """The largest power of two that is not above `x`, as float32; zero for subnormal numbers."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)


def _without_layers(tree: Any) -> tuple[list[Layers], Any]:
    """Splits a tree into its `Layers` and the tree with `optax.MaskedNode` in place of these."""
    all_layers, rebuild = split_layers(tree)
    return all_layers, rebuild([optax.MaskedNode()] * len(all_layers))


def _with_layers(tree: Any, all_layers: list[Layers]) -> Any:
    """The inverse of `_without_layers`."""
    is_place = lambda node: isinstance(node, optax.MaskedNode)
    iterator = iter(all_layers)
    return jax.tree.map(lambda node: next(iterator) if is_place(node) else node, tree, is_leaf=is_place)


def _momentum(inner: Any, gradients: Any) -> list[Any]:
    """The trees of momenta in the state of an optimizer, or else the gradients."""
    for name in _MOMENTA:
        if momenta := optax.tree_utils.tree_get_all_with_path(inner, name):
            return [tree for _, tree in momenta]
    return [gradients]


def _magnitudes(trees: list[Any]) -> dict[str, Array]:
    """The mean absolute value of each leaf, by its path."""
    leaves = [pair for tree in trees for pair in jax.tree_util.tree_leaves_with_path(tree)]
    return {_path(path): jnp.mean(jnp.abs(leaf.astype(jnp.float32))) for path, leaf in leaves}


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _paths_of_weights(layers: Layers, params: Any) -> list[list[str]]:
    """Finds, for each array, the parameter paths of its weights: those that share the longest suffix with the weights' names."""
    paths = [_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]

    def common_end(name, path):
        pairs = zip(reversed(name.split("/")), reversed(path.split("/")), strict=False)
        return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))

    def find(name):
        scores = [common_end(name, path) for path in paths]
        best = max(scores, default=0)
        if best == 0 or scores.count(best) > 1:
            raise ValueError(f"params must contain {name!r}, whose gradient needs a saved array; they are {paths}.")
        return paths[scores.index(best)]

    return [[find(name) for name in names] for names in layers.weights]
