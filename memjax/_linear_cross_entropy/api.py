"""`linear_cross_entropy`: the loss log sum exp(l) - l_label of logits l = x w^T, without holding all logits in memory at once.

This module checks arguments, chooses an implementation and reduces losses.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from memjax._core import check as _check
from memjax._core.arrays import accumulator, as_array, vary, varying_axes
from memjax._linear_cross_entropy import check, devices, primitive, reference
from memjax._linear_cross_entropy.options import Array, Operands, Options, Result, psum, scaled, with_rows


class Aux(NamedTuple):
    """Statistics for logging, without gradients.

    Counts and means are over valid tokens, whatever their weights.
    """

    log_sum_exp: Array  # (...,) float32, of every token's logits
    accuracy: Array  # () share of tokens with no logit larger than the label's
    entropy: Array  # () mean entropy of the predicted distribution, in nats
    valid_count: Array  # () int32 tokens that are not ignored


def linear_cross_entropy(
    x: Float[Array, "... d"],
    w: Float[Array, "v d"] | Float[Array, "d v"],
    labels: Int[Array, " ..."] | Float[Array, "... v"],
    *,
    layout: Literal["vd", "dv"] = "vd",
    bias: Float[Array, " v"] | None = None,
    ignore_index: int = -100,
    weights: Float[Array, " ..."] | None = None,
    class_weights: Float[Array, " v"] | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    chunk: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    token_axis_name: str | tuple[str, ...] | None = None,
    return_aux: bool = False,
    implementation: str | None = None,
) -> Any:
    """Cross-entropy of `softmax(x w^T)` against `labels`, without ever holding all logits.

    The (tokens, vocabulary) logits are `softcap(logit_scale * (x w^T + bias))` with `softcap(l) = cap * tanh(l / cap)`.
    Smoothing, ignored tokens and the mean follow `torch.nn.functional.cross_entropy`: a valid token's
    loss is

        lse - (1 - label_smoothing) l_label - label_smoothing mean(l) + z_loss lse^2,   lse = log sum exp l

    Args:
      x: (..., D) activations, bfloat16, float16, float32 or float64.
      w: the head, of x's dtype: (V, D), or (D, V) with `layout="dv"`. A tied `nnx.Embed` holds (V, D), an
        `nnx.Linear` or a Linen `Dense` kernel (D, V).
      labels: (...,) integers in [0, V), or `ignore_index`; or (..., V) floating-point soft targets, which
        get no gradient. Labels out of range raise when they are concrete, NumPy's compared in their own dtype;
        under `jit` their losses and all gradients are NaN.
      layout: which way `w` is stored; never guessed, since V may equal D.
      bias: (V,) added to the products.
      ignore_index: tokens with this label have no loss, no gradient, and no part in the mean, whatever their
        activations: NaN, too. The same holds for the gradients of tokens whose weight is 0.
      weights: (...,) per token, non-negative; "mean" divides by their sum.
      class_weights: (V,), of the whole vocabulary also where it is sharded: `weight` of
        `torch.nn.functional.cross_entropy`, with its formula. A token's loss, but for the z-loss, becomes
        `(1 - label_smoothing) c_label (lse - l_label) + label_smoothing mean(c (lse - l))`, with soft targets q
        `sum(c q (lse - l))`; "mean" divides by the sum of `weights * c_label`, with soft targets by that of `weights`. With
        smoothing, a z-loss or soft targets it gets no gradient, and kernels are XLA's.
      label_smoothing: in [0, 1], spread over the whole vocabulary.
      z_loss: coefficient of `lse**2`, added to the loss of each valid token.
      reduction: "mean" over valid tokens (0 if there are none), "sum", or "none" for losses of labels'
        shape, 0 where ignored.
      chunk: tokens per chunk for "forward_grad", vocabulary entries per chunk for "recompute". By default
        D rounded down to a power of two (at least 1024 on a GPU, 128 elsewhere), and 8 D / itemsize
        rounded likewise (at least 1024), or with Mosaic kernels to what fills the GPU.
      axis_name: inside `jax.shard_map`, the mesh axis over which the vocabulary is sharded: `w`, `bias`
        and soft targets are this device's V / n columns, in the order of the axis; labels stay those of
        the whole vocabulary. `x`, `labels`, `weights` and `class_weights` are the same on all its devices. One max and
        two sums per chunk; dW stays local. A `w` or `bias` that JAX knows to be the same on all devices is refused, and so
        are tokens that it takes to differ: gather them with `jax.lax.all_gather(..., to="invarying")`.
      token_axis_name: the mesh axis over which tokens are sharded: mean and sum are then over all of its
        tokens.
      return_aux: also return an `Aux`.
      implementation: None chooses "recompute" for "none". For "mean" and "sum" it chooses "forward_grad", or, on a GPU and
        without a `chunk`, whichever of the two a model of their times predicts to be faster for these shapes
        (`memjax/_linear_cross_entropy/choice.py`).
        - "forward_grad": chunks of tokens, gradients in the forward pass, three matmuls. Saved for the
          backward pass: dx and dW. Temporaries: itemsize * chunk * V, and 4 D V for dW's float32 sum (the
          output itself if w is float32, nothing if w is not differentiated or, but in float16, if one chunk has all
          tokens). Not for "none". Without differentiation, no gradient work.
        - "recompute": chunks of the vocabulary, four matmuls. Saved: x, w and N float32. Temporaries:
          itemsize * N * chunk + 4 N D + 2 * itemsize * chunk * D, the last term not with Mosaic kernels, but 12 N V / 256
          for the forward pass; and itemsize * N * D for x without the tokens that do not count, in x's own place if nothing
          else needs x. Takes any cotangent.
        - "full": all logits, in float32; the plain reference.
        "/jnp" or "/triton" appended to the first two insists on XLA's own fusions or on Triton kernels, "recompute/mosaic"
        on matmuls in Pallas with the softmax inside. By itself a Hopper GPU uses the latter for values and for "recompute"
        (from JAX 0.11; bfloat16 or float16, integer labels, D and V multiples of 64, and at least 256 of each and of
        tokens), and any GPU with `jax_triton` Triton kernels for what is left, but for soft targets. Neither can be
        differentiated twice.

    Returns:
      The loss in float32 (float64 for float64 inputs): () or, for "none", of labels' shape. With
      `return_aux` a pair (loss, `Aux`).

    Float32 matmuls follow `jax.default_matmul_precision`; other matmuls accumulate in float32. Logits are
    rounded to x's dtype (not with Mosaic kernels), row statistics and dW's sum are float32. Under `jax.vmap`
    with an unbatched `w`, tokens are flattened and "recompute" is used, so that dW is not batched.
    Forward-mode differentiation raises; "full" has it.

    Inside `jax.shard_map(check_vma=False)` JAX does not know what differs between devices. Values are right, and so are
    gradients taken outside of the `shard_map`. Taken inside, they are those of any function that ends in a `psum`: of the sum
    of what all n devices of both axes return, n times as large; and what is replicated gets the device's part of it only.
    Nor can arguments that should be sharded and are not be refused there.

    Outside of a `shard_map` tokens and head may be sharded anyhow, and nothing has to be said: each device computes its own
    tokens, and sums over devices follow at the end. Chunks are those of a device. Axes that shard the vocabulary and no tokens
    take the part of `axis_name`; a head that is sharded otherwise, as fully sharded parameters are, is gathered once, and its
    gradient is scattered. On a mesh of explicit axes (`AxisType.Explicit`) labels, weights and bias follow the types of x and w.

    Raises:
      TypeError: an argument of the wrong kind or dtype.
      ValueError: shapes that do not match, values out of range, an implementation that is unknown or
        cannot run here.

    Source: mgmalek, "Memory-efficient cross entropy loss" ("forward_grad", both optimisations); Wijmans
    et al., "Cut your losses in large-vocabulary language models", algorithms 1 to 3 ("recompute").
    """
    arguments = dict(locals())
    if devices.is_on_explicit_mesh(x, w, labels, bias, weights, class_weights):
        aux = lambda of_tokens, scalar: Aux(of_tokens, scalar, scalar, scalar)
        return devices.over_shards(linear_cross_entropy, aux, arguments)
    call = prepared(**arguments)
    check.same_on_all(axis_name, x=x, labels=labels, weights=weights, class_weights=class_weights)
    result = share(call)
    loss = psum(result.loss, axis_name)
    if reduction != "none":
        loss = psum(loss, token_axis_name)
    if not return_aux:
        return loss
    return loss, _aux(result, call.valid, axis_name, token_axis_name)


class Call(NamedTuple):
    """The checked arguments of one call."""

    operands: Operands
    options: Options
    valid: Array  # of labels' shape without the vocabulary
    algorithm: str | None  # None: the fastest
    reduction: str


def prepared(
    *,
    x: Any,
    w: Any,
    labels: Any,
    axis_name: Any,
    layout: Any = "vd",
    bias: Any = None,
    ignore_index: Any = -100,
    weights: Any = None,
    class_weights: Any = None,
    label_smoothing: Any = 0.0,
    z_loss: Any = 0.0,
    softcap: Any = None,
    logit_scale: Any = 1.0,
    reduction: Any = "mean",
    chunk: Any = None,
    token_axis_name: Any = None,
    return_aux: Any = False,
    implementation: Any = None,
) -> Call:
    """Checks the arguments of `linear_cross_entropy`, and computes the factor of each token's loss."""
    scalars = check.scalars(label_smoothing, z_loss, softcap, logit_scale, chunk, ignore_index)
    axes, token_axes = check.axes("axis_name", axis_name), check.axes("token_axis_name", token_axis_name)
    devices = math.prod(lax.axis_size(axis) for axis in axes)
    vocabulary = check.arrays(x, w, labels, layout, bias, weights, class_weights, devices)
    algorithm, kernels = check.implementation(implementation, reduction, x.dtype)
    soft = jnp.issubdtype(labels.dtype, jnp.floating)
    check.sharded(axes, token_axes, x, w, labels, bias, soft)
    options = Options(
        layout=layout,
        vocabulary=vocabulary,
        axis_name=axis_name,
        aux=_check.flag("return_aux", return_aux),
        kernels=kernels,
        **scalars,
    )
    # NumPy's arrays become JAX's, as in `jax.numpy`.
    x, w, bias, weights, class_weights = jax.tree.map(as_array, (x, w, bias, weights, class_weights))
    token_shape = x.shape[:-1]
    sums = accumulator(x.dtype)
    if soft:
        labels = as_array(labels)
        valid = jnp.ones(token_shape, bool)
        hard = _largest_target(labels, axis_name) if return_aux else jnp.full(token_shape, -1, jnp.int32)
    else:
        valid, hard, wrong = map(as_array, check.integer_labels(labels, ignore_index, vocabulary))

    scale = valid.astype(sums)
    if weights is not None:
        # An ignored token's weight may be anything.
        scale = jnp.where(valid, weights.astype(sums), 0.0)
    divisor = scale
    if class_weights is not None:
        if not soft:
            divisor = scale * jnp.where(hard < 0, 0.0, class_weights.astype(sums)[jnp.maximum(hard, 0)])
        if not soft and not options.label_smoothing and not options.z_loss:
            # The label's weight multiplies the whole loss, as a token's does: any kernel can do that.
            scale, class_weights = divisor, None
        elif axis_name is not None:
            local = w.shape[layout.index("v")]
            class_weights = lax.dynamic_slice_in_dim(class_weights, lax.axis_index(axis_name) * local, local)
    if reduction == "mean":
        total = psum(divisor.sum(), token_axis_name)
        scale = scale / jnp.where(total == 0, 1.0, total)
    if not soft:
        scale = jnp.where(wrong, jnp.nan, scale)

    operands = Operands(x, w, bias, hard, labels if soft else None, scale, class_weights)
    check.suited(with_rows(operands), options)
    return Call(operands, options, valid, algorithm, reduction)


def share(call: Call) -> Result:
    """Losses, or with a reduction their sum over this device's tokens, as this device's share: their sum over
    `axis_name` is the loss.

    Only of shares is the derivative the same with and without `check_vma`: without it JAX takes for the transpose of a
    `psum` another `psum`, so that a device's derivative of the sum is that of all devices' sums, p times too much.
    """
    operands, options, valid, algorithm, reduction = call
    if reduction != "none" and algorithm in (None, "forward_grad") and valid.size:
        return primitive.total_loss(operands, replace(options, choose=algorithm is None and options.chunk is None))
    if algorithm == "full" or not valid.size:
        operands = vary(operands, varying_axes(*jax.tree.leaves(operands)))
        result = reference.full(operands, options, operands.scale != 0)
    else:
        result = primitive.token_losses(operands._replace(scale=None), options)
    losses = scaled(operands.scale, result.loss)
    return result._replace(loss=losses if reduction == "none" else losses.sum())


def _largest_target(targets: Array, axis_name: Any) -> Array:
    """The column of each token's largest target, the first of equals."""
    column = targets.argmax(-1).astype(jnp.int32)
    if axis_name is None:
        return column
    largest = targets.max(-1)
    column = column + lax.axis_index(axis_name) * targets.shape[-1]
    is_mine = largest == lax.pmax(largest, axis_name)
    return lax.pmin(jnp.where(is_mine, column, jnp.iinfo(jnp.int32).max), axis_name)


def _aux(result: Result, valid: Array, axis_name: Any, token_axis_name: Any) -> Aux:
    lse, correct, entropy = lax.stop_gradient((result.lse, result.correct, result.entropy))
    if axis_name is not None:
        # Equal on all devices already; this says so to `shard_map`.
        lse, correct, entropy = (lax.pmax(a, axis_name) for a in (lse, correct, entropy))
    count = psum(valid.sum(dtype=jnp.int32), token_axis_name)
    divisor = jnp.maximum(count, 1).astype(lse.dtype)

    def mean(a: Any) -> Array:
        return psum(jnp.where(valid, a, 0.0).sum(), token_axis_name) / divisor

    return Aux(lse, mean(correct), mean(entropy), count)
