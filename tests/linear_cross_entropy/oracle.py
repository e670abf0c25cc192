"""The loss as one writes it down, in float64, for oracles and for the plain low-precision code to compare
with."""

import jax
import jax.numpy as jnp
import numpy as np

IGNORED = -100


def grad(f, *args, **options):
    """`jax.grad`, compiled: operations one by one are compiled too, each by itself."""
    return jax.jit(jax.grad(f, *args, **options))


def value_and_grad(f, *args, **options):
    return jax.jit(jax.value_and_grad(f, *args, **options))


def plain_losses(
    x, w, labels, *, layout="vd", bias=None, label_smoothing=0.0, z_loss=0.0, softcap=None, logit_scale=1.0
):
    """Per-token losses through full logits in x's dtype, the softmax in at least float32. Ignored tokens:
    0."""
    z = x @ (w.T if layout == "vd" else w)
    z = z.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    if bias is not None:
        z = z + bias.astype(z.dtype)
    z = z * logit_scale
    if softcap is not None:
        z = softcap * jnp.tanh(z / softcap)
    classes = z.shape[-1]
    soft = jnp.issubdtype(labels.dtype, jnp.floating)
    q = labels.astype(z.dtype) if soft else jax.nn.one_hot(labels, classes, dtype=z.dtype)
    q = q * (1 - label_smoothing) + label_smoothing / classes
    losses = -(q * jax.nn.log_softmax(z)).sum(-1) + z_loss * jax.nn.logsumexp(z, -1) ** 2
    return losses if soft else jnp.where(labels == IGNORED, 0, losses)


def plain(x, w, labels, *, weights=None, reduction="mean", **options):
    losses = plain_losses(x, w, labels, **options)
    valid = jnp.ones(losses.shape, bool)
    if not jnp.issubdtype(labels.dtype, jnp.floating):
        valid = labels != IGNORED
    weights = (jnp.ones_like(losses) if weights is None else weights.astype(losses.dtype)) * valid.astype(losses.dtype)
    if reduction == "none":
        return losses * weights
    total = (losses * weights).sum()
    if reduction == "sum":
        return total
    return jnp.where(weights.sum() == 0, 0.0, total / jnp.where(weights.sum() == 0, 1.0, weights.sum()))


def to_float64(tree):
    return jax.tree.map(lambda a: a.astype(jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)


def relative_error(actual, expected):
    """Norm of the difference over the norm of what is expected."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    scale = np.linalg.norm(expected)
    return np.linalg.norm(actual - expected) / (scale if scale else 1.0)


def example(seed, tokens, dim, classes, *, dtype=jnp.float32, layout="vd", ignored=0.2):
    """(x, w, labels) with logits of standard deviation about 2."""
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(tokens, dim)), rng.normal(size=(classes, dim)) * (2 / dim**0.5)
    labels = np.where(rng.random(tokens) < ignored, IGNORED, rng.integers(0, classes, tokens))
    x, w = (jnp.asarray(a.astype(np.float32).astype(dtype)) for a in (x, w if layout == "vd" else w.T))
    return x, w, jnp.asarray(labels)
