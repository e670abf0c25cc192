"""What a dense block is: its static description, its parameters, and its batch statistics as arrays.

Parameters of all layers are stored together. Layer `i` reads the first `c_i = in_features + i * growth_rate` channels,
so its scales, biases and 1x1 kernel rows are the `c_i` rows that start at `offset(i)` of one long array. One array per kind
keeps the number of leaves small, and lets one loop body serve every layer.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax._core import check
from memjax._core.arrays import accumulator
from memjax._core.barriers import barrier
from memjax._core.segments import shards

_TERMS = 8  # at least, that one step of `column_sums` adds up
KEEP = ("all", "convolutions", "features")


@dataclasses.dataclass(frozen=True)
class DenseSpec:
    """Static description of a dense block; hashable, so that it can key a compiled function."""

    in_features: int
    growth_rate: int
    num_layers: int
    bottleneck: int | None = 4  # width of the 1x1 convolution in units of growth_rate; None: a single 3x3
    epsilon: float = 1e-5
    dropout_rate: float = 0.0
    use_running_average: bool = False  # normalise with running instead of batch statistics

    def __post_init__(self) -> None:
        values: dict[str, Any] = {
            name: check.integer(name, getattr(self, name), least=1, what="a number of channels or layers")
            for name in ("in_features", "growth_rate", "num_layers")
        }
        if self.bottleneck is not None:
            values["bottleneck"] = check.integer("bottleneck", self.bottleneck, least=1, what="None or a multiple")
        values["epsilon"] = check.number("epsilon", self.epsilon, least=0)
        values["dropout_rate"] = check.number("dropout_rate", self.dropout_rate, least=0, below=1)
        values["use_running_average"] = check.flag("use_running_average", self.use_running_average)
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.rows * (self.width if self.bottleneck else self.growth_rate) >= 2**40:
            raise ValueError(
                f"in_features, growth_rate and num_layers must give fewer than {2**40} parameters, got {self.in_features}, "
                f"{self.growth_rate} and {self.num_layers}"
            )

    @property
    def out_features(self) -> int:
        return self.in_features + self.num_layers * self.growth_rate

    @property
    def width(self) -> int:
        """Channels that the 1x1 convolution produces."""
        assert self.bottleneck is not None
        return self.bottleneck * self.growth_rate

    @property
    def rows(self) -> int:
        """Length of the arrays that hold one row for every (layer, input channel)."""
        return self.offset(self.num_layers)

    def check_params(self, params: Any) -> None:
        """That they have the shapes of this block."""
        rows, layers, growth = self.rows, self.num_layers, self.growth_rate
        shapes: list[tuple[int, ...] | None]
        if self.bottleneck is None:
            shapes = [(rows,), (rows,), None, None, None, (rows, 3, 3, growth)]
        else:
            width = self.width
            shapes = [(rows,), (rows,), (rows, width), (layers, width), (layers, width), (layers, 3, 3, width, growth)]
        _check_shapes("params", params, shapes)

    def check_running(self, running: Any) -> None:
        """That they have the shapes of this block."""
        inputs = (self.out_features - self.growth_rate,)
        between = None if self.bottleneck is None else (self.num_layers, self.width)
        _check_shapes("running", running, (inputs, inputs, between, between))

    def channels(self, layer):
        """Input channels of `layer` (a Python or traced integer)."""
        return self.in_features + layer * self.growth_rate

    def offset(self, layer):
        """First row of `layer` in the arrays that hold one row for every (layer, input channel)."""
        return layer * self.in_features + self.growth_rate * (layer * (layer - 1) // 2)


def _check_shapes(name: str, arrays: Any, shapes: Sequence[tuple[int, ...] | None]) -> None:
    for field, a, shape in zip(arrays._fields, arrays, shapes, strict=True):
        wanted = "None without a bottleneck" if shape is None else f"of shape {shape}, as spec has it"
        if shape is not None:
            check.array(f"{name}.{field}", a, floating=True)
        if (None if a is None else a.shape) != shape:
            raise check.fail(ValueError, f"{name}.{field}", wanted, a)


class DenseParams(NamedTuple):
    """Parameters of every layer of a block. R = spec.rows, L = layers, k = growth rate, w = bottleneck * k.

    Without a bottleneck `kernel1`, `scale2` and `bias2` are None and `kernel2` is (R, 3, 3, k), input channel first.
    """

    scale1: Float[Array, " R"]
    bias1: Float[Array, " R"]
    kernel1: Float[Array, "R w"] | None
    scale2: Float[Array, "L w"] | None
    bias2: Float[Array, "L w"] | None
    kernel2: Float[Array, "..."]  # (L, 3, 3, w, k), or (R, 3, 3, k)


class DenseStatistics(NamedTuple):
    """Mean and (biased) variance of every channel that a normalisation reads, in float32 or wider.

    A channel looks the same to every later layer, so it has one mean and one variance: C = out_features - growth_rate
    of them, for the block's inputs and for the features that some layer consumes.
    """

    mean1: Float[Array, " C"]
    var1: Float[Array, " C"]
    mean2: Float[Array, "L w"] | None
    var2: Float[Array, "L w"] | None


def column_sums(x: Float[Array, "*batch c"]) -> Float[Array, " c"]:
    """Sums over all axes but the last, in steps of few terms each, so that rounding errors hardly grow with their number.

    In one step a compiler may add up a hundred thousand values one after the other.
    """
    rows, channels = math.prod(x.shape[:-1]), x.shape[-1]
    x = x.reshape(rows, channels)
    held = shards(jax.typeof(x), 0)  # a term of each device stays until the end
    while rows > max(_TERMS, held):
        most = max(_TERMS, round(rows ** (1 / 3)))
        terms = next((t for t in range(most, 1, -1) if rows % (t * held) == 0), rows // held)
        rows //= terms
        # Without the barrier the compiler merges the steps.
        x = barrier(jnp.sum(x.reshape(rows, terms, channels), 1))
    return jnp.sum(x, 0)


def moments(x: Float[Array, "*batch c"]) -> tuple[Float[Array, " c"], Float[Array, " c"]]:
    """Per-channel mean and variance in one pass over `x`."""
    wide = x.astype(accumulator(x.dtype))
    count = math.prod(x.shape[:-1])
    mean = column_sums(wide) / count
    # Rounding may leave a tiny negative number where a channel is constant.
    return mean, jnp.maximum(column_sums(jnp.square(wide)) / count - jnp.square(mean), 0)


def norm_relu(x, mean, gain, bias):
    """`relu((x - mean) * gain + bias)` as Flax's BatchNorm orders it, in the vectors' precision, rounded once to that of `x`."""
    return jax.nn.relu((x.astype(gain.dtype) - mean) * gain + bias).astype(x.dtype)


def dropout(spec: DenseSpec, key, layer, new):
    """Drops new features of `layer`. The mask depends on `key` and `layer` alone, so that it can be recomputed."""
    if spec.dropout_rate == 0.0:
        return new
    kept = jax.random.bernoulli(jax.random.fold_in(key, layer), 1.0 - spec.dropout_rate, new.shape)
    return jnp.where(kept, new / (1.0 - spec.dropout_rate), jnp.zeros_like(new))
