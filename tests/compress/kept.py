"""What a function keeps between forward and backward pass, nothing compiled."""

import jax
import jax.numpy as jnp

from memjax._program import gradient, traced
from memjax._residuals import residuals


def kept_bytes(f, *args):
    """Residual bytes of the gradient of a function."""
    return residuals(jax.jit(jax.grad(f)).trace(*args).jaxpr).device.nbytes


def kept_of_sum(f, x):
    return kept_bytes(lambda x: jnp.sum(f(x)), x)


def saved(f, *args):
    """Shapes and dtypes of what a function keeps, arguments left out."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], *args))
    return sorted((str(leaf.dtype), leaf.size) for leaf in leaves if leaf.size >= 512)


def measured_bytes(f, *args):
    """The residual bytes of `memjax.measure`, which takes modules, too."""
    return gradient(traced("measure", f, args, {})).residuals.device.nbytes
