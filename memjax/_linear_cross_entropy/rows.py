"""The arithmetic on a chunk of products x w^T, row by row, in plain `jax.numpy`.

With z = softcap(logit_scale (x w^T + bias)) and targets q (one-hot or soft, smoothed, weighted), a token's loss is

    mass * lse - sum_v q_v z_v + z_loss * lse^2,        lse = log sum_v exp(z_v),  mass = sum_v q_v,

and its gradient in the products

    ((mass + 2 z_loss lse) softmax(z)_v - q_v) (1 - (z_v / cap)^2) logit_scale.

All sums run over columns, so chunks of columns and devices that hold them are merged by `merge` and
`all_reduce`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from memjax._core.arrays import accumulator
from memjax._linear_cross_entropy.options import Array, Chunk, Options


class Stats(NamedTuple):
    """Row sums over the columns seen so far, each (N,)."""

    max: Array
    sum: Array  # of exp(z - max)
    target: Array  # of q z
    mass: Array | None  # of q, for soft targets and weighted classes (1 otherwise)
    label: Array | None  # z at the label, for aux
    moment: Array | None  # of exp(z - max) z, for aux


def logits(products: Array, bias: Array | None, options: Options) -> Array:
    z = products.astype(accumulator(products.dtype))
    if bias is not None:
        z = z + bias.astype(z.dtype)
    z = z * options.logit_scale
    return z if options.softcap is None else options.softcap * jnp.tanh(z / options.softcap)


def targets_of(
    labels: Array, targets: Array | None, class_weights: Array | None, width: int, dtype: Any, options: Options
) -> Array:
    """(..., width) factors of the logits: the smoothed targets, times the classes' weights."""
    if targets is None:
        targets = lax.broadcasted_iota(jnp.int32, (*labels.shape, width), labels.ndim) == labels[..., None]
    q = (1.0 - options.label_smoothing) * targets.astype(dtype) + options.label_smoothing / options.vocabulary
    return q if class_weights is None else q * class_weights.astype(dtype)


def _finite(maximum: Array) -> Array:
    """Rows without any possible entry have a maximum of -inf, which must not be subtracted from itself."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def stats(chunk: Chunk, options: Options) -> Stats:
    products, bias, labels, targets, class_weights = chunk
    z = logits(products, bias, options)
    maximum = z.max(-1)
    exponentials = jnp.exp(z - _finite(maximum)[:, None])
    width = products.shape[-1]
    inside = (labels >= 0) & (labels < width)
    column = jnp.clip(labels, 0, width - 1)
    # Gathering before the cast keeps the float32 logits inside one fusion.
    product = jnp.take_along_axis(products, column[:, None], 1)
    at_label = logits(product, None if bias is None else bias[column][:, None], options)[:, 0]
    label = jnp.where(inside, at_label, 0.0)
    mass = None
    keep = 1.0 - options.label_smoothing
    spread = options.label_smoothing / options.vocabulary
    if targets is None and class_weights is None:
        target = keep * label if keep != 1.0 else label
        if spread:
            target = target + spread * z.sum(-1)
    else:
        q = targets_of(labels, targets, class_weights, width, z.dtype, options)
        # A target of exactly zero asks nothing of a logit of -inf.
        target = jnp.where(q == 0, 0.0, q * z).sum(-1)
        mass = q.sum(-1)
    moment = None
    if options.aux:
        moment = jnp.where(exponentials == 0, 0.0, exponentials * z).sum(-1)
    return Stats(maximum, exponentials.sum(-1), target, mass, label if options.aux else None, moment)


def from_sums(maximum: Array, total: Array, plain: Any, moment: Any, label: Array, options: Options) -> Stats:
    """Statistics for integer labels from a kernel's sums: `plain` is that of z, which only smoothing needs."""
    target = label
    if options.label_smoothing:
        target = (1.0 - options.label_smoothing) * label + options.label_smoothing / options.vocabulary * plain
    return Stats(maximum, total, target, None, *((label, moment) if options.aux else (None, None)))


def merge(a: Stats, b: Stats) -> Stats:
    """Statistics of two disjoint sets of columns."""
    maximum = jnp.maximum(a.max, b.max)
    scale_a, scale_b = jnp.exp(a.max - _finite(maximum)), jnp.exp(b.max - _finite(maximum))
    return Stats(
        maximum,
        a.sum * scale_a + b.sum * scale_b,
        a.target + b.target,
        None if a.mass is None or b.mass is None else a.mass + b.mass,
        None if a.label is None or b.label is None else a.label + b.label,
        None if a.moment is None or b.moment is None else a.moment * scale_a + b.moment * scale_b,
    )


def all_reduce(local: Stats, options: Options) -> Stats:
    """Statistics of all devices that share the vocabulary, by one max and one sum. `target` stays local, since the loss
    is returned as a share."""
    if options.axis_name is None:
        return local
    maximum = lax.pmax(lax.stop_gradient(local.max), options.axis_name)
    scale = jnp.exp(local.max - _finite(maximum))
    moment = None if local.moment is None else local.moment * scale
    summed, mass, label, moment = lax.psum((local.sum * scale, local.mass, local.label, moment), options.axis_name)
    return Stats(maximum, summed, local.target, mass, label, moment)


def log_sum_exp(total: Stats) -> Array:
    return total.max + jnp.log(total.sum)


def loss_share(total: Stats, options: Options) -> Array:
    """This device's share of each token's loss: the first device of the axis takes what all of them know."""
    lse = log_sum_exp(total)
    common = lse if total.mass is None else total.mass * lse
    if options.z_loss:
        common = common + options.z_loss * lse**2
    if options.axis_name is not None:
        common = jnp.where(lax.axis_index(options.axis_name) == 0, common, 0.0)
    return common - total.target


def diagnostics(total: Stats) -> tuple[Array | None, Array | None]:
    """(correct, entropy) per token, where asked for."""
    if total.label is None or total.moment is None:
        return None, None
    correct = (total.label >= total.max).astype(total.max.dtype)
    return correct, log_sum_exp(total) - total.moment / total.sum


def gradient(chunk: Chunk, lse: Array, mass: Array | None, scale: Array, options: Options) -> Array:
    """`scale` times the gradient in the products, in their shape and dtype. It is 0 where the scale is, whatever the products."""
    products, bias, labels, targets, class_weights = chunk
    z = logits(products, bias, options)
    weight = (1.0 if mass is None else mass) + 2.0 * options.z_loss * lse
    d = weight[:, None] * jnp.exp(z - lse[:, None])
    keep = 1.0 - options.label_smoothing
    if targets is None and class_weights is None:
        column = lax.broadcasted_iota(jnp.int32, products.shape, 1)
        d = d - jnp.where(column == labels[:, None], keep, 0.0).astype(z.dtype)
        if options.label_smoothing:
            d = d - options.label_smoothing / options.vocabulary
    else:
        d = d - targets_of(labels, targets, class_weights, products.shape[1], z.dtype, options)
    if options.softcap is not None:
        d = d * (1.0 - (z / options.softcap) ** 2)
    d = jnp.where(scale[:, None] == 0, 0.0, d * (scale * options.logit_scale)[:, None])
    return d.astype(products.dtype)
