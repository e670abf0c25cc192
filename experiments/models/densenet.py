"""DenseNets (Huang et al. 2017), with what training keeps in memory as an option.

Sizes as published; DenseNet-264's blocks are (6, 12, 64, 48): the report that introduced it prints another second
number, which would give 304 layers and 90.5M parameters instead of the 73M of its text.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import memjax

# Depth: (layers of each block, growth rate), for 224x224 images.
SIZES: dict[int, tuple[tuple[int, ...], int]] = {
    121: ((6, 12, 24, 16), 32),
    161: ((6, 12, 36, 24), 48),
    169: ((6, 12, 32, 32), 32),
    201: ((6, 12, 48, 32), 32),
    232: ((6, 12, 48, 48), 48),
    264: ((6, 12, 64, 48), 48),
}
_COMPRESSION = 0.5
_LATER = "later_convolutions"


def bc_blocks(depth: int) -> tuple[int, int, int]:
    """Block sizes of the DenseNet-BC of `depth` for 32x32 images: three equal blocks, two convolutions a layer."""
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(
            f"depth must be 6 n + 4 with n at least 1, got {depth}; try {max(10, round((depth - 4) / 6) * 6 + 4)}."
        )
    return ((depth - 4) // 6,) * 3


class DenseNet(nnx.Module):
    """A DenseNet with bottlenecks and compression: (B, H, W, in_channels) images to (B, num_classes) float32 logits.

    Args:
      block_sizes: layers of each block.
      growth_rate: channels that each layer adds (k); the stem makes 2k.
      num_classes: outputs.
      stem: `"imagenet"` (7x7 convolution and max-pool, each of stride 2) or `"cifar"` (3x3 convolution).
      keep: `memjax.remat.DenseBlock`'s, or `"later_convolutions"`: `"features"` in the first block, where the outputs of
        convolutions take the most bytes for the arithmetic that makes them, and `"convolutions"` in the others. Unless it is
        `"all"`, stem, transitions and head are recomputed too.
      dtype: of computation; parameters and statistics are float32.
      dropout_rate: share of each layer's new features dropped in training.
      in_channels: 3 for colour.
      implementation: `memjax.remat.DenseBlock`'s.
      rngs: needs `params`, and `dropout` with a dropout rate.
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        growth_rate: int,
        num_classes: int,
        *,
        stem: str = "imagenet",
        keep: str = "features",
        dtype: jnp.dtype = jnp.float32,
        dropout_rate: float = 0.0,
        in_channels: int = 3,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        if stem not in ("imagenet", "cifar"):
            raise ValueError(f"stem must be 'imagenet' or 'cifar', got {stem!r}.")
        if growth_rate < 1:
            raise ValueError(f"growth_rate must be at least 1, got {growth_rate}.")
        self.keep, self.dtype = keep, dtype
        channels = 2 * growth_rate
        conv = functools.partial(
            nnx.Conv, use_bias=False, dtype=dtype, kernel_init=nnx.initializers.he_normal(), rngs=rngs
        )
        if stem == "imagenet":
            self.conv0 = conv(in_channels, channels, (7, 7), strides=2)
            self.norm0: NormRelu | None = NormRelu(channels)
        else:
            self.conv0 = conv(in_channels, channels, (3, 3))
            self.norm0 = nnx.data(None)
        self.blocks: nnx.List = nnx.List()
        self.norms: nnx.List = nnx.List()
        self.transitions: nnx.List = nnx.List()
        for i, layers in enumerate(block_sizes):
            block = memjax.remat.DenseBlock(
                channels,
                growth_rate,
                layers,
                keep=keep if keep != _LATER else "convolutions" if i else "features",
                dropout_rate=dropout_rate,
                dtype=dtype,
                implementation=implementation,
                rngs=rngs,
            )
            self.blocks.append(block)
            channels = block.spec.out_features
            self.norms.append(NormRelu(channels))
            if i < len(block_sizes) - 1:
                self.transitions.append(conv(channels, int(channels * _COMPRESSION), (1, 1)))
                channels = int(channels * _COMPRESSION)
        self.head = nnx.Linear(channels, num_classes, dtype=_at_least_float32(dtype), rngs=rngs)

    def __call__(self, images: Float[Array, "b h w c"]) -> Float[Array, "b classes"]:
        recompute = (lambda f: f) if self.keep == "all" else nnx.remat
        x = recompute(_stem)(self.conv0, self.norm0, images.astype(self.dtype))
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i < len(self.transitions):
                x = recompute(_transition)(self.norms[i], self.transitions[i], x)
        return recompute(_head)(self.norms[-1], self.head, x)


def densenet(depth: int, num_classes: int, *, growth_rate: int | None = None, **options) -> DenseNet:
    """The published DenseNet of `depth` for 224x224 images; `options` are those of `DenseNet`."""
    if depth not in SIZES:
        raise ValueError(f"depth must be one of {sorted(SIZES)}, got {depth}.")
    block_sizes, published = SIZES[depth]
    return DenseNet(block_sizes, published if growth_rate is None else growth_rate, num_classes, **options)


def densenet_bc(depth: int, num_classes: int, *, growth_rate: int = 12, **options) -> DenseNet:
    """The DenseNet-BC of `depth` for 32x32 images; `options` are those of `DenseNet`."""
    return DenseNet(bc_blocks(depth), growth_rate, num_classes, stem="cifar", **options)


def _at_least_float32(dtype) -> jnp.dtype:
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


class NormRelu(nnx.Module):
    """Batch normalisation, then ReLU, rounded once.

    The gradient of `nnx.BatchNorm` takes two more arrays of the input's size.
    """

    def __init__(self, channels: int, *, momentum: float = 0.9, epsilon: float = 1e-5):
        self.scale, self.bias = nnx.Param(jnp.ones(channels)), nnx.Param(jnp.zeros(channels))
        self.mean, self.var = nnx.BatchStat(jnp.zeros(channels)), nnx.BatchStat(jnp.ones(channels))
        self.momentum, self.epsilon = momentum, epsilon
        self.use_running_average = False

    def __call__(self, x):
        wide = x.astype(_at_least_float32(x.dtype))
        if self.use_running_average:
            mean, var = (s[...].astype(wide.dtype) for s in (self.mean, self.var))
        else:
            axes = tuple(range(x.ndim - 1))
            mean = jnp.mean(wide, axes)
            var = jnp.maximum(jnp.mean(jnp.square(wide), axes) - jnp.square(mean), 0)
            for running, batch in ((self.mean, mean), (self.var, var)):
                new = jax.lax.stop_gradient(batch.astype(running.dtype))
                running[...] = self.momentum * running[...] + (1 - self.momentum) * new
        gain = self.scale[...].astype(wide.dtype) * jax.lax.rsqrt(var + self.epsilon)
        shift = self.bias[...].astype(wide.dtype) - mean * gain
        return jax.nn.relu(wide * gain + shift).astype(x.dtype)


def _stem(conv: nnx.Conv, norm: NormRelu | None, images):
    if norm is None:
        return conv(images)
    if images.shape[1] % 2 or images.shape[2] % 2:
        x = conv(images)
    else:
        in_blocks = functools.partial(_conv7x7_in_blocks, conv.kernel[...])
        x = jax.lax.platform_dependent(images, cpu=lambda images: conv(images), default=in_blocks)
    return max_pool(norm(x))


@jax.custom_vjp
def max_pool(x: Float[Array, "b h w c"]) -> Float[Array, "b h/2 w/2 c"]:
    """The maxima of 3x3 windows at every second pixel, with a pixel of padding, as `nnx.max_pool` has them.

    The gradient of `nnx.max_pool` scatters. Here every pixel gathers from the windows that chose it: one pass, whose sums
    of up to four terms are rounded once. Forward and backward share a byte for every window.
    """
    return _maxima(x)[0]


def _maxima(x):
    """The maximum of every window, and which of its pixels is the first to have it, or the last that is NaN."""
    height, width = (-(-size // 2) for size in x.shape[1:3])
    x = jnp.pad(x, ((0, 0), (1, 2), (1, 2), (0, 0)), constant_values=-jnp.inf)
    best = x[:, 0 : 2 * height : 2, 0 : 2 * width : 2]
    chosen = jnp.zeros(best.shape, jnp.uint8)
    for k in range(1, 9):
        top, left = divmod(k, 3)
        pixel = x[:, top : top + 2 * height : 2, left : left + 2 * width : 2]
        better = (pixel > best) | jnp.isnan(pixel)
        best, chosen = jnp.where(better, pixel, best), jnp.where(better, jnp.uint8(k), chosen)
    return best, chosen


def _max_pool_forward(x):
    best, chosen = _maxima(x)
    return best, (chosen, x[:0])  # of x the gradient needs the shape and the type


# For a pixel of a block of 2x2 (rows, then columns): which of its nine pixels a window must have chosen to mean that one. The
# windows: the block's own, the one to the right, the one below, and the one below that to the right. 9: no pixel of the window.
_MEANS = {
    (0, 0): ((4, 5), (7, 8)),
    (0, 1): ((9, 3), (9, 6)),
    (1, 0): ((9, 9), (1, 2)),
    (1, 1): ((9, 9), (9, 0)),
}


def _max_pool_backward(saved, d_best):
    chosen, like = saved
    batch, height, width, channels = d_best.shape
    dx = jnp.zeros((batch, height, 2, width, 2, channels), _at_least_float32(like.dtype))
    for (down, right), means in _MEANS.items():
        chose, gradient = (
            jnp.pad(a, ((0, 0), (0, down), (0, right), (0, 0)))[:, down:, None, right:, None] for a in (chosen, d_best)
        )
        here = jnp.asarray(means, jnp.uint8).reshape(1, 1, 2, 1, 2, 1)
        dx += jnp.where(chose == here, gradient.astype(dx.dtype), 0)
    dx = dx.reshape(batch, 2 * height, 2 * width, channels)
    return (dx[:, : like.shape[1], : like.shape[2]].astype(like.dtype),)


max_pool.defvjp(_max_pool_forward, _max_pool_backward)


def _conv7x7_in_blocks(kernel, images):
    """A 7x7 convolution of stride 2 as a 4x4 one of stride 1, whose pixels are blocks of 2x2 of the images.

    Three channels leave most of a GPU's matrix units without work; twelve do not.
    """
    x = jnp.pad(images, ((0, 0), (2, 4), (2, 4), (0, 0)))
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // 2, 2, width // 2, 2, channels).transpose(0, 1, 3, 2, 4, 5)
    kernel = jnp.pad(kernel.astype(x.dtype), ((0, 1), (0, 1), (0, 0), (0, 0)))
    kernel = kernel.reshape(4, 2, 4, 2, channels, -1).transpose(0, 2, 1, 3, 4, 5)
    join = lambda a, axes: a.reshape(*a.shape[:axes], 4 * channels, *a.shape[axes + 3 :])
    return jax.lax.conv_general_dilated(
        join(x, 3), join(kernel, 2), (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _transition(norm: NormRelu, conv: nnx.Conv, x):
    # Pooling and the 1x1 convolution commute; pooling first does a quarter of the work.
    x = norm(x)
    batch, height, width, channels = x.shape
    even = x[:, : height // 2 * 2, : width // 2 * 2]
    return conv(jnp.mean(even.reshape(batch, height // 2, 2, width // 2, 2, channels), axis=(2, 4)))


def _head(norm: NormRelu, head: nnx.Linear, x):
    return head(jnp.mean(norm(x).astype(head.dtype), axis=(1, 2)))
