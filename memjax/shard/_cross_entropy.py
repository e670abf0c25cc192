"""`vocab_cross_entropy`: the loss -log softmax(x w^T)[label], tokens and vocabulary spread over the same devices."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from memjax._core import check
from memjax._core.arrays import accumulator, vary, varying_axes
from memjax._core.backward.derivatives import forward_mode_message, refusing_forward_mode
from memjax._linear_cross_entropy.api import prepared, share

Array = jax.Array
_FORWARD_MODE = forward_mode_message("memjax.shard.vocab_cross_entropy")


def vocab_cross_entropy(
    x: Float[Array, "... d"],
    w: Float[Array, "v d"] | Float[Array, "d v"],
    labels: Int[Array, " ..."],
    *,
    axis_name: str,
    layout: Literal["vd", "dv"] = "vd",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: Literal["mean", "sum"] = "mean",
    implementation: str | None = None,
) -> Float[Array, ""]:
    """Cross-entropy of `softmax(x w^T)` against `labels`, with this device's tokens and its part of the vocabulary.

    A p-th of every device's tokens at a time is gathered, goes through `memjax.linear_cross_entropy` with the vocabulary
    sharded, and its gradient is scattered back. The gradient of the head stays where the head is. Gradients are computed in
    the forward pass.

    Args:
      x: (..., D), this device's tokens: different ones on every device of the axis.
      w: this device's V / p entries of the vocabulary, in the order of the axis: (V/p, D), or (D, V/p) with layout "dv".
      labels: (...) integers in [0, V), or `ignore_index`.
      axis_name: the axis of `jax.shard_map` over which tokens and vocabulary are sharded.
      reduction: "mean" over the valid tokens of all devices of the axis, or "sum".
      layout, ignore_index, label_smoothing, z_loss, softcap, logit_scale, implementation: as in
        `memjax.linear_cross_entropy`.

    Returns:
      The loss, () float32 (float64 for float64), the same on all devices of the axis.

    Saved for the backward pass: dx and dw. Temporaries for t tokens per device: items of x for t tokens, gathered, and those of
    `linear_cross_entropy` for t tokens and V / p entries. Traffic per device: x and dx, p-1 times.

    With `jax.shard_map(check_vma=False)` values are right, and gradients taken outside of it. Taken inside, they are p times as
    large, as those of any function that ends in a `psum`: divide them by p.

    Raises:
      ValueError, TypeError: as `memjax.linear_cross_entropy`; outside a `jax.shard_map` over `axis_name`; x, w or labels that
        JAX knows to be the same on all devices, which it does not with `check_vma=False`.
    """
    size = check.axis_size("axis_name", axis_name)
    check.choice("reduction", reduction, ("mean", "sum"))
    options = {
        "axis_name": axis_name,
        "layout": layout,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "reduction": "sum",
        "implementation": implementation,
    }
    if not jnp.issubdtype(check.array("labels", labels).dtype, jnp.integer):
        raise check.fail(TypeError, "labels", "integers", labels, "soft targets go to memjax.linear_cross_entropy")
    valid = prepared(x=x, w=w, labels=labels, **options).valid
    check.sharded("x", x, axis_name)
    check.sharded("labels", labels, axis_name)
    operands = (x.reshape(-1, x.shape[-1]), w, labels.reshape(-1))
    operands = vary(operands, varying_axes(*operands) | {axis_name})
    share_of = refusing_forward_mode(partial(_share, size, tuple(options.items())), _FORWARD_MODE)
    loss = lax.psum(share_of(*operands), axis_name)
    if reduction == "sum":
        return loss
    count = lax.psum(valid.sum(dtype=jnp.int32), axis_name)
    return loss / jnp.maximum(count, 1).astype(loss.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _share(size: int, options: Any, x: Array, w: Array, labels: Array) -> Array:
    """This device's share of the summed loss: the sum of the shares over the axis is the loss."""
    f = partial(_gathered_share, dict(options))
    return _over_chunks(size, lambda x, labels: (f(x, w, labels), None, None), x, w, labels)[0]


def _forward(size: int, options: Any, x: Array, w: Array, labels: Array) -> tuple[Array, Any]:
    f = jax.value_and_grad(partial(_gathered_share, dict(options)), argnums=(0, 1))

    def chunk(x: Array, labels: Array) -> tuple[Array, Array, Array]:
        loss, (dx, dw) = f(x, w, labels)
        return loss, dx, dw

    loss, dx, dw = _over_chunks(size, chunk, x, w, labels)
    return loss, (dx.reshape(x.shape), dw)


def _backward(size: int, options: Any, saved: Any, d: Array) -> tuple[Array, Array, None]:
    dx, dw = saved
    return (dx * d).astype(dx.dtype), (dw * d).astype(dx.dtype), None


_share.defvjp(_forward, _backward)


def _gathered_share(options: dict[str, Any], x: Array, w: Array, labels: Array) -> Array:
    """This device's share, that of its columns, of the loss of all devices' tokens. See `share` for why it is not summed."""
    gather = lambda a: lax.all_gather(a, options["axis_name"], tiled=True)
    return share(prepared(x=gather(x), w=w, labels=gather(labels), **options)).loss


def _over_chunks(size: int, f: Any, x: Array, w: Array, labels: Array) -> tuple[Array, Any, Any]:
    """Sums of losses and of gradients of w, and the gradients of x, over p parts of the tokens."""
    count = next(n for n in range(size, 0, -1) if x.shape[0] % n == 0)
    wide = accumulator(x.dtype)
    axes = varying_axes(x, w)

    def step(sums: Any, chunk: Any) -> tuple[Any, Any]:
        loss, dx, dw = f(*chunk)
        loss = sums[0] + vary(loss, axes)
        return (loss, None if dw is None else sums[1] + dw.astype(wide)), dx

    shape = jax.eval_shape(f, x[: x.shape[0] // count], labels[: x.shape[0] // count])[2]
    start = (jnp.zeros((), wide), None if shape is None else jnp.zeros(w.shape, wide))
    chunks = (x.reshape(count, -1, x.shape[1]), labels.reshape(count, -1))
    (loss, dw), dx = lax.scan(step, vary(start, axes), chunks)
    return loss, dx, dw
