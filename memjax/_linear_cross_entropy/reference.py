"""The loss with all of its logits, in plain `jax.numpy`: what every other implementation is tested
against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from memjax._linear_cross_entropy.options import Array, Operands, Options, Result, accumulator, matmul


def full(operands: Operands, options: Options) -> Result:
    """Per-token losses, differentiated by JAX. Holds the logits, in float32, and their gradient."""
    x, w, bias, labels, targets, _ = operands
    z = matmul("nd,vd->nv", x, w, options, accumulator(x.dtype))
    if bias is not None:
        z = z + bias.astype(z.dtype)
    z = z * options.logit_scale
    if options.softcap is not None:
        z = options.softcap * jnp.tanh(z / options.softcap)

    axis = options.axis_name
    maximum = _pmax(lax.stop_gradient(z).max(-1), axis)
    lse = maximum + jnp.log(_psum(jnp.exp(z - maximum[:, None]).sum(-1), axis))

    first = 0 if axis is None else lax.axis_index(axis) * z.shape[1]
    one_hot = jax.nn.one_hot(labels - first, z.shape[1], dtype=z.dtype)
    q = one_hot if targets is None else targets.astype(z.dtype)
    q = (1.0 - options.label_smoothing) * q + options.label_smoothing / options.vocabulary
    # `lse - z` is minus the logarithm of the probability; an impossible entry that is no target costs
    # nothing.
    loss = jnp.where(q == 0, 0.0, q * (lse[:, None] - z)).sum(-1)
    z_loss = options.z_loss * lse**2
    loss = loss + (z_loss if axis is None else jnp.where(lax.axis_index(axis) == 0, z_loss, 0.0))
    if not options.aux:
        return Result(loss, lse, None, None)

    at_label = _psum(jnp.where(one_hot > 0, z, 0.0).sum(-1), axis)
    p = jnp.exp(z - lse[:, None])
    entropy = _psum(jnp.where(p == 0, 0.0, p * (lse[:, None] - z)).sum(-1), axis)
    return Result(loss, lse, (at_label >= maximum).astype(z.dtype), entropy)


def _pmax(a: Array, axis: str | tuple[str, ...] | None) -> Array:
    return a if axis is None else lax.pmax(a, axis)


def _psum(a: Array, axis: str | tuple[str, ...] | None) -> Array:
    return a if axis is None else lax.psum(a, axis)
