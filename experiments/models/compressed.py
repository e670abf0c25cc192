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
      net: of (B, H, W, C) floats.
      layers: codec of what its convolutions read.
      rest: codec of everything else; None: left alone.
      smallest: number of values below which an array is left alone.
    """

    def __init__(self, net: nnx.Module, *, layers: compress.Layers, rest: compress.Codec | None, smallest: int):
        self.net, self.rest, self.smallest = net, rest, smallest
        self.codec = nnx.Param(layers)

    def from_bytes(self, images: jax.Array, prepare: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """The network's output for `prepare(images)`: what the first convolution reads is made again from the images.

        Args:
          images: (B, H, W, C) uint8.
          prepare: gives the floats that the network reads; of no fewer pixels.
        """
        return _compressed(_Prepared(self.net, prepare), self.codec.get_value(), self.rest, self.smallest)(images)


class _Prepared(nnx.Module):
    def __init__(self, net: nnx.Module, prepare: Callable[[jax.Array], jax.Array]):
        self.net, self.prepare = net, prepare

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.net(self.prepare(images))


def compressed_classifier(
    make_net: Callable[[], nnx.Module],
    image: jax.ShapeDtypeStruct,
    prepare: Callable[[jax.Array], jax.Array],
    *,
    rest: compress.Codec | None,
    bound: float,
    bits_per_value: float | None,
    smallest: int,
) -> Compressed:
    """The network with the settings that a gradient with batches like `prepare(image)` asks for."""
    net = make_net()
    net.train()
    graph, params, state = nnx.split(net, nnx.Param, ...)  # type: ignore[misc]

    def total(codec, params, state, images):
        model = nnx.merge(graph, params, state, copy=True)
        return jnp.sum(_compressed(_Prepared(model, prepare), codec, rest, smallest)(images))

    layers = compress.layers(total, params, state, image, bound=bound, bits_per_value=bits_per_value)
    return Compressed(net, layers=layers, rest=rest, smallest=smallest)


def _compressed(net: nnx.Module, codec, rest: compress.Codec | None, smallest: int) -> nnx.Module:
    net = memjax.compressed(net, codec, where="conv", smallest=smallest)
    return net if rest is None else memjax.compressed(net, rest, smallest=smallest)
