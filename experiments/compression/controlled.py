"""The optimizer of a training with compression, which also sets the bounds."""

import optax

from experiments.harness.optimizer import clipping, optimizer
from memjax import compress


def controlled(config, total_steps: int) -> optax.GradientTransformation:
    """The optimizer that a `CompressedConfig` describes."""
    return compress.adaptive(
        optimizer(config, total_steps, clipped=True),
        interval=config.interval,
        sigma=config.sigma,
        coefficient=config.coefficient,
        coarsest=config.coarsest,
        clip=clipping(config),
    )
