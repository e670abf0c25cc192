"""A classifier whose saved activations pass through a codec with settings that training adapts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

import memjax
from memjax import compress


class Compressed(nnx.Module):
    """A network and, as a parameter of its own, the `Layers` of its compressed call.

    Args:
      net: of (B, H, W, C) images.
      where: of `memjax.compressed`.
      layers: its codec.
    """

    def __init__(self, net: nnx.Module, *, where: str | None, layers: compress.Layers):
        self.net, self.where = net, where
        self.codec = nnx.Param(layers)

    def __call__(self, images: jax.Array) -> jax.Array:
        return memjax.compressed(self.net, self.codec.get_value(), where=self.where)(images)


def compressed_classifier(
    make_net: Callable[[], nnx.Module],
    image: jax.ShapeDtypeStruct,
    *,
    where: str | None,
    bound: float,
    bits_per_value: float | None,
) -> Compressed:
    """The network with the settings that a gradient with batches like `image` asks for."""
    net = make_net()
    layers = find_layers(net, image, where=where, bound=bound, bits_per_value=bits_per_value)
    return Compressed(net, where=where, layers=layers)


def find_layers(net: nnx.Module, image: jax.ShapeDtypeStruct, *, where: str | None, **options) -> compress.Layers:
    """`memjax.compress.layers` of an NNX network."""
    net.train()
    graph, params, rest = nnx.split(net, nnx.Param, ...)  # type: ignore[misc]

    def total(codec, params, rest, images):
        model = nnx.merge(graph, params, rest, copy=True)
        return jnp.sum(memjax.compressed(model, codec, where=where)(images))

    return compress.layers(total, params, rest, image, **options)
