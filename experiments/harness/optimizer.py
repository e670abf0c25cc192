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
    # optax mixes the step with floats, which strict dtype promotion refuses for integers.
    return lambda step: schedule(jnp.asarray(step, jnp.float32))


def optimizer(config: RunConfig, total_steps: int) -> optax.GradientTransformation:
    """SGD: `v <- m v + (g + d w)`, `w <- w - lr (g + d w + m v)`: the penalty d is part of the gradient."""
    if config.optimizer == "adamw":
        adamw = optax.adamw(learning_rate(config, total_steps), weight_decay=config.weight_decay)
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay),
        optax.sgd(learning_rate(config, total_steps), momentum=config.momentum, nesterov=True),
    )
