"""SGD with Nesterov momentum and an L2 penalty, or AdamW, on a step or a cosine schedule."""

import jax.numpy as jnp
import optax

from experiments.harness.config import RunConfig


def learning_rate(config: RunConfig, total_steps: int) -> optax.Schedule:
    """The learning rate as a function of the step."""
    if config.schedule == "cosine":
        schedule = optax.cosine_decay_schedule(config.learning_rate, total_steps)
    else:
        drops = {round(fraction * total_steps): 0.1 for fraction in config.milestones}
        schedule = optax.piecewise_constant_schedule(config.learning_rate, drops)
    warmup = max(1, round(config.warmup * total_steps))

    def rate(step):
        step = jnp.asarray(step, jnp.float32)  # strict dtype promotion refuses integers beside optax's floats
        return schedule(step) * jnp.minimum(1.0, (step + 1) / warmup)

    return rate


def clipping(config: RunConfig) -> optax.GradientTransformation | None:
    """What is done to gradients first, if anything."""
    norm = 1.0 if config.clip is None and config.optimizer == "adamw" else config.clip
    return None if norm is None else optax.clip_by_global_norm(norm)


def optimizer(config: RunConfig, total_steps: int, *, clipped: bool = False) -> optax.GradientTransformation:
    """SGD: `v <- m v + (g + d w)`, `w <- w - lr (g + d w + m v)`: the penalty d is part of the gradient.

    Args:
      clipped: whether gradients come as `clipping` makes them; else it comes first.
    """
    rate, clip = learning_rate(config, total_steps), None if clipped else clipping(config)
    if config.optimizer == "adamw":
        rules = [optax.adamw(rate, weight_decay=config.weight_decay)]
    else:
        penalty = optax.add_decayed_weights(config.weight_decay)
        rules = [penalty, optax.sgd(rate, momentum=config.momentum, nesterov=True)]
    return optax.chain(*([] if clip is None else [clip]), *rules)
