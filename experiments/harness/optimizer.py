"""The paper's optimizer: SGD with Nesterov momentum and an L2 penalty, on a step or a cosine schedule."""

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


def sgd(config: RunConfig, total_steps: int) -> optax.GradientTransformation:
    """`v <- m v + (g + d w)`, `w <- w - lr (g + d w + m v)`: the penalty d is part of the gradient."""
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay),
        optax.sgd(learning_rate(config, total_steps), momentum=config.momentum, nesterov=True),
    )
