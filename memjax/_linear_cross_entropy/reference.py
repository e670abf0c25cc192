"""The loss with all of its logits, in plain `jax.numpy`: what every other implementation is tested
against."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memjax._core.arrays import accumulator
from memjax._linear_cross_entropy.options import Array, Operands, Options, Result, matmul, psum
from memjax._linear_cross_entropy.rows import targets_of


def full(operands: Operands, options: Options, counted: Array) -> Result:
    """Per-token losses, differentiated by JAX. Holds the logits, in float32, and their gradient.

    Tokens that are not `counted` have no part in gradients, whatever their activations.
    """
    x, w, bias, labels, targets, _, class_weights = operands
    z = _linear(options, x, w, bias, counted)
    z = z * options.logit_scale
    if options.softcap is not None:
        z = options.softcap * jnp.tanh(z / options.softcap)

    axis = options.axis_name
    maximum = lax.stop_gradient(z).max(-1)
    maximum = maximum if axis is None else lax.pmax(maximum, axis)
    lse = maximum + jnp.log(psum(jnp.exp(z - maximum[..., None]).sum(-1), axis))

    first = 0 if axis is None else lax.axis_index(axis) * z.shape[-1]
    q = targets_of(labels - first, targets, class_weights, z.shape[-1], z.dtype, options)
    # `lse - z` is minus the logarithm of the probability; an impossible entry that is no target costs
    # nothing.
    loss = jnp.where(q == 0, 0.0, q * (lse[..., None] - z)).sum(-1)
    z_loss = options.z_loss * lse**2
    loss = loss + (z_loss if axis is None else jnp.where(lax.axis_index(axis) == 0, z_loss, 0.0))
    if not options.aux:
        return Result(loss, lse, None, None)

    one_hot = jax.nn.one_hot(labels - first, z.shape[-1], dtype=z.dtype)
    at_label = psum(jnp.where(one_hot > 0, z, 0.0).sum(-1), axis)
    p = jnp.exp(z - lse[..., None])
    entropy = psum(jnp.where(p == 0, 0.0, p * (lse[..., None] - z)).sum(-1), axis)
    return Result(loss, lse, (at_label >= maximum).astype(z.dtype), entropy)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _linear(options: Options, x: Array, w: Array, bias: Array | None, counted: Array) -> Array:
    z = matmul("...d,vd->...v", x, w, options, accumulator(x.dtype))
    return z if bias is None else z + bias.astype(z.dtype)


@_linear.defjvp
def _linear_jvp(options: Options, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """The transpose multiplies by rows of x, and 0 times NaN is NaN: so rows that do not count are left out."""
    (x, w, bias, counted), (dx, dw, d_bias, _) = primals, tangents
    moved = _linear(options, dx, w, d_bias, counted)
    moved = moved + _linear(options, jnp.where(counted[..., None], x, 0), dw, None, counted)
    return _linear(options, x, w, bias, counted), jnp.where(counted[..., None], moved, 0.0)
