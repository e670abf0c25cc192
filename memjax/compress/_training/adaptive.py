"""The controller: each array's bound from how far a gradient may be off, as an optax transformation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int32

from memjax._core import check
from memjax.compress._training.layers import Layers, Statistics, split_layers

_MOMENTA = ("trace", "mu")  # of optax.trace (SGD), and of Adam and its kin
# Half of a step of `ErrorBounded` is a power of two, from half of what would do to all of it, on a logarithmic scale evenly. Of
# that the mean square is 3 / (8 log 2). So of this many times what would do it is 1.
_WIDER = (8 / 3 * math.log(2)) ** 0.5


class AdaptiveState(NamedTuple):
    """State of `adaptive`: arrays alone, to be saved like any other.

    Attributes:
      inner: of the wrapped transformation.
      step: updates so far.
      since: updates since the bounds were last set.
      sums: by `Layers` among the parameters, statistics added up over these.
      last: those of the latest update.
      clip: of the transformation that scales gradients.
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
    """Standard deviation of the errors of gradients, if values are off by uniformly distributed errors.

    A gradient is a sum over positions, sum_j A_j L_j, and independent errors of width +-e change it by one with variance
    e^2 / 3 sum_j L_j^2, j running over the positions where A is not zero (Jin et al. 2020, equations 2 to 7):

        sigma = e sqrt(R sum_j L_j^2 / 3)

    With `coefficient` their simplification, `a mean|L| sqrt(N R) e`, N being the examples of a batch; they found a = 0.32, but
    it depends on how cotangents are distributed, and where.

    Args:
      statistics: of one step.
      half_width: of the errors: the bound; of `ErrorBounded` half its step, which is from half the bound to the bound. Bounds
        that `adaptive` has set are half a step.
      coefficient: a; None: none is needed.
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
    """The gradient of a loss `by` times as large: what statistics in it are no derivatives change as they must."""

    if not isinstance(by, jax.Array):
        by = check.number("by", by)
    elif by.shape != ():
        raise check.fail(ValueError, "by", "one number", by)

    def scaled(g: Any) -> Any:
        if not isinstance(g, Layers):
            check.array("gradients", g, fix="pass a pytree of arrays and Layers")
            return g * jnp.asarray(by, g.dtype)
        found = g.statistics
        more = found._replace(cotangent=found.cotangent * by, power=found.power * jnp.square(by))
        return dataclasses.replace(g, statistics=more)

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
    """`tx` for the parameters, and for the `Layers` among them bounds that keep the errors of gradients small.

    Every `interval` updates, and after 1, 2, 4, ... updates before the first of them, the bound of each array is set so that
    the error of the gradients that it is multiplied into has a standard deviation of about `sigma` times their mean absolute
    momentum (Jin et al. 2020, equations 8 and 9):

        bound = sigma mean|M| / sqrt(R sum_j L_j^2 / 3)

    the statistics being means over the updates since the last time: see `predicted_sigma`. Steps are powers of two, so bounds
    are, too, the nearest ones: of one array the deviation is 0.68 to 1.36 times `sigma`, and over many arrays the mean of its
    square is that of `sigma`. Of several gradients of an array the strictest counts. M is the momentum in the state of `tx`
    (optax's `trace`, or `mu`), or else the gradient. Arrays that are not multiplied into a gradient of a weight keep their
    bound, as do those whose cotangents are zero.

    The equations have errors without a mean. Those of equal values have a small one (`ErrorBounded`), which adds up where many
    values are alike, in the first layers of networks for large images, the more the wider steps are beside values. So no step,
    which is at most twice the bound, is wider than `coarsest` mean magnitudes of the values that are not zero. They are taken
    from decoded values, which wide steps enlarge: a `coarsest` of 4 or more limits nothing.

    Gradients that are clipped by their norm have smaller errors. So give what clips them as `clip`, not as a part of `tx`,
    where it would make the momentum smaller without these errors, and bounds stricter by what it scales gradients with.

    Works under `jit` and `shard_map`: gradients have to be added up or averaged over devices, statistics along with them.
    An averaged `sum_j L_j^2` is too large: by the square root of the number of devices bounds are too strict then.

    Args:
      tx: the optimizer; sees no `Layers`.
      interval: updates between changes.
      sigma: as a share of the momentum; the root of the mean square over arrays.
      coefficient: use the simplified equation 6 with this a, such as 0.32.
      coarsest: the widest step, in mean magnitudes. Wider ones save space, but what is predicted is too small for first layers.
      clip: applied to gradients before `tx`, scaling all of them alike: `optax.clip_by_global_norm(1.0)`, for one. Statistics are
        scaled by what it makes of their global norm.

    Raises:
      TypeError: `clip` is a number, say, instead of a transformation.
      ValueError: `interval`, `sigma`, `coefficient` or `coarsest` is not positive; at `init`, there are no `Layers` among the
        parameters, or a weight of theirs is not.
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise check.fail(TypeError, "tx", "a gradient transformation", tx, "pass optax.sgd(0.1), for example")
    check.integer("interval", interval, least=1)
    check.number("sigma", sigma, positive=True, fix="0.01 is the default")
    if coefficient is not None:
        check.number("coefficient", coefficient, positive=True, fix="0.32 is the paper's")
    if coarsest != math.inf:
        check.number("coarsest", coarsest, positive=True, fix="1 is the default, infinity no limit")
    if not isinstance(clip, optax.GradientTransformation | None):
        fix = "pass optax.clip_by_global_norm(1.0), for example"
        raise check.fail(TypeError, "clip", "a gradient transformation or None", clip, fix)

    def init(params):
        own, rest = _apart(params)
        if not own:
            raise ValueError("params must contain the Layers that memjax.compress.layers made, beside the parameters.")
        for layers in own:
            _weights(layers, rest)
        zeros = lambda: tuple(jax.tree.map(jnp.zeros_like, layers.statistics) for layers in own)
        none = lambda: jnp.zeros((), jnp.int32)
        clipped = clip.init(rest) if clip is not None else ()
        return AdaptiveState(tx.init(rest), none(), none(), zeros(), zeros(), clipped)

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("params must be given to the update of memjax.compress.adaptive: they hold the bounds.")
        if not isinstance(state, AdaptiveState):
            raise check.fail(TypeError, "state", "an AdaptiveState", state, "pass what init returned")
        own, rest = _apart(params)
        clipped = state.clip
        if clip is not None:
            updates, clipped = _clipped(updates, clip, clipped, rest)
        found, gradients = _apart(updates)
        if len(found) != len(own):
            wanted = f"as many Layers as params has, {len(own)}"
            raise check.fail(ValueError, "updates", wanted, len(found), "differentiate with respect to the Layers, too")
        new_updates, inner = tx.update(gradients, state.inner, rest)
        last = tuple(layers.statistics for layers in found)
        sums = jax.tree.map(jnp.add, state.sums, last)
        step, since = state.step + 1, state.since + 1
        due = (step % interval == 0) | ((step < interval) & (step & (step - 1) == 0))
        bounds = [layers.bound for layers in own]

        def renewed():
            magnitudes = _magnitudes(_momentum(inner, gradients))
            momenta = [[[magnitudes[path] for path in paths] for paths in _weights(layers, rest)] for layers in own]
            updates_since = since.astype(jnp.float32)
            return [
                _bounds(bound, total, magnitude, updates_since, sigma, coefficient, coarsest)
                for bound, total, magnitude in zip(bounds, sums, momenta, strict=True)
            ]

        # The momenta are as large as the parameters: they are read when they are needed.
        new = jax.lax.cond(due, renewed, lambda: bounds)
        changes = [
            dataclasses.replace(
                layers, bound=bound - layers.bound, statistics=jax.tree.map(jnp.zeros_like, layers.statistics)
            )
            for layers, bound in zip(own, new, strict=True)
        ]
        sums = jax.tree.map(lambda total: jnp.where(due, jnp.zeros_like(total), total), sums)
        since = jnp.where(due, 0, since)
        return _with_layers(new_updates, changes), AdaptiveState(inner, step, since, sums, last, clipped)

    return optax.GradientTransformation(init, update)


def _clipped(updates: Any, clip: optax.GradientTransformation, state: Any, params: Any) -> tuple[Any, Any]:
    """Gradients that `clip` has scaled, with statistics scaled along."""
    own, before = _apart(updates)
    after, state = clip.update(before, state, params)
    norms = [optax.tree_utils.tree_norm(gradients).astype(jnp.float32) for gradients in (after, before)]
    scale = norms[0] / norms[1]
    scale = jnp.where(jnp.isfinite(scale), scale, 1)
    return _with_layers(after, [scale_gradient(layers, scale) for layers in own]), state


def _bounds(
    old: Array,
    total: Statistics,
    momenta: list[list[Array]],
    updates: Array,
    sigma: float,
    coefficient,
    coarsest: float,
) -> Array:
    """New bounds from statistics added up over so many updates."""
    mean = jax.tree.map(lambda found: found / updates, total)
    per_unit = predicted_sigma(mean, jnp.ones_like(old), coefficient=coefficient)
    rows = [jnp.stack([*own, *[jnp.float32(jnp.inf)] * (per_unit.shape[1] - len(own))]) for own in momenta]
    allowed = sigma * jnp.stack(rows)
    bound = jnp.min(jnp.where(per_unit > 0, allowed / jnp.maximum(per_unit, 1e-37), jnp.inf), 1)
    # Neither statistic is positive without a use.
    widest = coarsest / 2 * mean.magnitude / jnp.maximum(mean.nonzero, 1e-30)
    new = _power_of_two(jnp.where(widest > 0, jnp.minimum(_WIDER * bound, widest), _WIDER * bound))
    is_read = jnp.isfinite(bound)
    return jnp.where(is_read & jnp.isfinite(new) & (new > 0), new, old)


def _power_of_two(x: Array) -> Array:
    """The largest one that is not above `x`, as float32; zero for what is no normal number."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)


def _apart(tree: Any) -> tuple[list[Layers], Any]:
    """The `Layers` of a tree, and the tree with nothing in their place."""
    own, rebuild = split_layers(tree)
    return own, rebuild([optax.MaskedNode()] * len(own))


def _with_layers(updates: Any, changes: list[Layers]) -> Any:
    """`updates`, which have nothing in the place of `Layers`, with `changes` there."""
    is_place = lambda node: isinstance(node, optax.MaskedNode)
    rest = iter(changes)
    return jax.tree.map(lambda node: next(rest) if is_place(node) else node, updates, is_leaf=is_place)


def _momentum(inner: Any, gradients: Any) -> list[Any]:
    """Trees of momenta."""
    for name in _MOMENTA:
        found = optax.tree_utils.tree_get_all_with_path(inner, name)
        if found:
            return [tree for _, tree in found]
    return [gradients]


def _magnitudes(trees: list[Any]) -> dict[str, Array]:
    """Means of absolute values, by path."""
    leaves = [pair for tree in trees for pair in jax.tree_util.tree_leaves_with_path(tree)]
    return {_path(path): jnp.mean(jnp.abs(leaf.astype(jnp.float32))) for path, leaf in leaves}


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _weights(layers: Layers, params: Any) -> list[list[str]]:
    """Paths among the parameters of the weights of each array: those that end most alike."""
    paths = [_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]

    def alike(name, path):
        pairs = zip(reversed(name.split("/")), reversed(path.split("/")), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(name.count("/"), path.count("/")) + 1)

    def find(name):
        scores = [alike(name, path) for path in paths]
        best = max(scores, default=0)
        if best == 0 or scores.count(best) > 1:
            raise ValueError(f"params must contain {name!r}, whose gradient needs a saved array; they are {paths}.")
        return paths[scores.index(best)]

    return [[find(name) for name in own] for own in layers.weights]
