"""A stack of equal layers, run in a loop that keeps what a recipe says for the backward pass."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import memjax
from experiments.models.recipe import GROUP, Recipe
from memjax.compress import Codec, GroupQuantized
from memjax.remat import policies

Layer = Callable[[Any, jax.Array], jax.Array]


def run_stack(layer: Layer, recipe: Recipe, params: Any, x: jax.Array) -> jax.Array:
    """`x = layer(p, x)` for the rows p of `params`, whose arrays have a leading layer axis."""
    if recipe.kept == "bits":
        return _with_codec(layer, codec(recipe, x.shape[-1]), params, x)
    if recipe.kept == "slots":
        step, coded = lambda x, p: (layer(p, x), None), codec(recipe, x.shape[-1]) if recipe.bits else None
        return memjax.remat.scan(step, x, params, slots=recipe.slots, strategy="hidden", codec=coded)[0]
    if recipe.kept == "budget":
        return memjax.remat.scan(lambda x, p: (layer(p, x), None), x, params, budget=recipe.budget)[0]
    if recipe.kept == "checkpoint":
        return lax.scan(jax.checkpoint(lambda x, p: (layer(p, x), None)), x, params)[0]
    if recipe.kept == "offload":
        step = lambda x, p: (layer(p, checkpoint_name(x, policies.BLOCK_INPUT)), None)
        return lax.scan(jax.checkpoint(step, policy=policies.offload(policies.BLOCK_INPUT)), x, params)[0]
    return lax.scan(lambda x, p: (layer(p, x), None), x, params)[0]


def codec(recipe: Recipe, dim: int) -> GroupQuantized:
    """The codec of layer inputs. Each position has scales of its own, one for 256 features, so that none makes others coarse."""
    assert recipe.bits is not None
    return GroupQuantized(recipe.bits, group_size=GROUP if dim % GROUP == 0 else dim)


def _with_codec(layer: Layer, coded: Codec, params: Any, x: jax.Array) -> jax.Array:
    """Layers whose inputs are kept encoded; the backward pass recomputes each layer from what is decoded.

    The result is exact. Gradients are those at rounded inputs: the products of weights and of their gradients see the rounding
    once, unbiased; what is nonlinear in the layer sees its square as well.
    """

    @jax.custom_vjp
    def run(params, x):
        return lax.scan(lambda x, p: (layer(p, x), None), x, params)[0]

    def keep(params, x):
        y, codes = lax.scan(lambda x, p: (layer(p, x), coded.encode(x)), x, params)
        return y, (params, codes)

    def back(kept, dy):
        def step(dy, row):
            p, code = row
            _, pull = jax.vjp(layer, p, coded.decode(code))
            dp, dx = pull(dy)
            return dx, dp

        dx, d_params = lax.scan(step, dy, kept, reverse=True)
        return d_params, dx

    run.defvjp(keep, back)
    return run(params, x)
