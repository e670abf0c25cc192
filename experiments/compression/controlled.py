"""What training with compression does differently with parameters: among them are settings, which training adapts."""

import jax
import optax
from flax import nnx

from experiments.harness.loop.optimizer import clipping, optimizer
from memjax import compress


def controlled(config, total_steps: int) -> optax.GradientTransformation:
    """The optimizer of a `CompressedConfig`, which also sets the bounds."""
    return compress.adaptive(
        optimizer(config, total_steps, clipped=True),
        interval=config.interval,
        sigma=config.sigma,
        coefficient=config.coefficient,
        coarsest=config.coarsest,
        clip=clipping(config),
    )


def parameter_count(params: nnx.State) -> int:
    """How many numbers are trained. The settings of codecs are none of them."""
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, compress.Layers))
    return sum(leaf.size for leaf in leaves if not isinstance(leaf, compress.Layers))
