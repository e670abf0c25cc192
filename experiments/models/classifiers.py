"""Four classical image classifiers as published: AlexNet, VGG-16, ResNet-18 and ResNet-50.

With 1000 classes and images of 224x224 they have 60,965,224, 138,357,544, 11,689,512 and 25,557,032 parameters. Smaller images
give smaller fully connected layers; `width` scales all channels.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

_HE = functools.partial(nnx.initializers.variance_scaling, 2.0, distribution="normal")


class Conv(nnx.Module):
    """A convolution; in the residual networks with a batch norm after it."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        *,
        stride: int = 1,
        groups: int = 1,
        norm: bool,
        dtype,
        rngs: nnx.Rngs,
    ):
        padding = ((size // 2, size // 2),) * 2
        self.conv = nnx.Conv(
            inputs,
            outputs,
            (size, size),
            strides=stride,
            padding=padding,
            feature_group_count=groups,
            use_bias=not norm,
            # Without a norm after it a convolution has to keep the scale of what it reads, forwards.
            kernel_init=_HE("fan_out" if norm else "fan_in"),
            dtype=dtype,
            rngs=rngs,
        )
        batch_norm = nnx.BatchNorm(outputs, momentum=0.9, dtype=dtype, rngs=rngs) if norm else None
        self.norm: nnx.BatchNorm | None = nnx.data(batch_norm)

    def __call__(self, x: Array) -> Array:
        x = self.conv(x)
        return x if self.norm is None else self.norm(x)


class Head(nnx.Module):
    """Fully connected layers, ReLU and dropout between them; float32 logits."""

    def __init__(self, sizes: Sequence[int], *, dropout: float, dtype, rngs: nnx.Rngs):
        pairs = list(itertools.pairwise(sizes))
        self.layers = nnx.List(
            nnx.Linear(a, b, dtype=dtype if b != sizes[-1] else jnp.float32, rngs=rngs) for a, b in pairs
        )
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(self.dropout(x)))
        return self.layers[-1](x.astype(jnp.float32))


class AlexNet(nnx.Module):
    """Krizhevsky et al. 2012: grouped convolutions, local response normalisation, overlapping pooling."""

    def __init__(self, num_classes: int, *, image_size: int = 224, width: float = 1, dtype=jnp.float32, rngs: nnx.Rngs):
        conv = functools.partial(Conv, norm=False, dtype=dtype, rngs=rngs)
        channels = [_scaled(n, width) for n in (96, 256, 384, 384, 256)]
        # The published first convolution is of 227 pixels without padding; this is the same for 224 with 2.
        self.conv1 = conv(3, channels[0], 11, stride=4)
        self.conv1.conv.padding = ((2, 2), (2, 2))
        self.conv2 = conv(channels[0], channels[1], 5, groups=2)
        self.conv3 = conv(channels[1], channels[2], 3)
        self.conv4 = conv(channels[2], channels[3], 3, groups=2)
        self.conv5 = conv(channels[3], channels[4], 3, groups=2)
        side = (image_size - 7) // 4 + 1
        for _ in range(3):
            side = (side - 3) // 2 + 1
        hidden = _scaled(4096, width)
        self.head = Head([side * side * channels[4], hidden, hidden, num_classes], dropout=0.5, dtype=dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(self, x: Float[Array, "b h w 3"]) -> Float[Array, "b classes"]:
        pool = functools.partial(nnx.max_pool, window_shape=(3, 3), strides=(2, 2))
        x = pool(_response_norm(nnx.relu(self.conv1(x.astype(self.dtype)))))
        x = pool(_response_norm(nnx.relu(self.conv2(x))))
        for conv in (self.conv3, self.conv4, self.conv5):
            x = nnx.relu(conv(x))
        x = pool(x)
        return self.head(x.reshape(len(x), -1))


class VGG16(nnx.Module):
    """Simonyan and Zisserman 2014, configuration D."""

    def __init__(self, num_classes: int, *, image_size: int = 224, width: float = 1, dtype=jnp.float32, rngs: nnx.Rngs):
        inputs = 3
        self.blocks: nnx.List = nnx.List()
        for outputs, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            outputs = _scaled(outputs, width)
            block: nnx.List = nnx.List()
            for _ in range(layers):
                block.append(Conv(inputs, outputs, 3, norm=False, dtype=dtype, rngs=rngs))
                inputs = outputs
            self.blocks.append(block)
        hidden = _scaled(4096, width)
        size = (image_size // 32) ** 2 * inputs
        self.head = Head([size, hidden, hidden, num_classes], dropout=0.5, dtype=dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(self, x: Float[Array, "b h w 3"]) -> Float[Array, "b classes"]:
        x = x.astype(self.dtype)
        for block in self.blocks:
            for conv in block:
                x = nnx.relu(conv(x))
            x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        return self.head(x.reshape(len(x), -1))


class Residual(nnx.Module):
    """A residual block: two 3x3 convolutions, or 1x1, 3x3 and 1x1 around a bottleneck of a quarter of the channels."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, bottleneck: bool, dtype, rngs: nnx.Rngs):
        conv = functools.partial(Conv, norm=True, dtype=dtype, rngs=rngs)
        if bottleneck:
            inner = outputs // 4
            convs = [conv(inputs, inner, 1), conv(inner, inner, 3, stride=stride), conv(inner, outputs, 1)]
        else:
            convs = [conv(inputs, outputs, 3, stride=stride), conv(outputs, outputs, 3)]
        self.convs = nnx.List(convs)
        projects = stride != 1 or inputs != outputs
        self.shortcut: Conv | None = nnx.data(conv(inputs, outputs, 1, stride=stride) if projects else None)

    def __call__(self, x: Array) -> Array:
        y = x
        for conv in self.convs[:-1]:
            y = nnx.relu(conv(y))
        return nnx.relu(self.convs[-1](y) + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    """He et al. 2016: `blocks` residual blocks at each of four sizes; the stride is in the 3x3 convolution."""

    def __init__(
        self,
        blocks: Sequence[int],
        num_classes: int,
        *,
        bottleneck: bool,
        image_size: int = 224,
        width: float = 1,
        dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        channels = _scaled(64, width)
        self.stem = Conv(3, channels, 7, stride=2, norm=True, dtype=dtype, rngs=rngs)
        inputs = channels
        self.blocks: nnx.List = nnx.List()
        for i, count in enumerate(blocks):
            outputs = channels * 2**i * (4 if bottleneck else 1)
            for j in range(count):
                stride = 2 if i and not j else 1
                self.blocks.append(
                    Residual(inputs, outputs, stride=stride, bottleneck=bottleneck, dtype=dtype, rngs=rngs)
                )
                inputs = outputs
        self.head = Head([inputs, num_classes], dropout=0.0, dtype=dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(self, x: Float[Array, "b h w 3"]) -> Float[Array, "b classes"]:
        x = nnx.relu(self.stem(x.astype(self.dtype)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x.astype(jnp.float32), axis=(1, 2)))


MODELS: dict[str, Callable[..., nnx.Module]] = {
    "alexnet": AlexNet,
    "vgg16": VGG16,
    "resnet18": functools.partial(ResNet, (2, 2, 2, 2), bottleneck=False),
    "resnet50": functools.partial(ResNet, (3, 4, 6, 3), bottleneck=True),
}


def _scaled(channels: int, width: float) -> int:
    return max(4, round(channels * width / 4) * 4)


def _response_norm(x: Array) -> Array:
    """x / (2 + 1e-4 sum over 5 neighbouring channels of x^2)^0.75, as published."""
    squares = jax.lax.reduce_window(jnp.square(x), 0.0, jax.lax.add, (1, 1, 1, 5), (1, 1, 1, 1), "SAME")
    return x * (2 + 1e-4 * squares) ** -0.75
