"""Dense blocks, the building block of DenseNets, with linear instead of quadratic activation memory.

After "Memory-Efficient Implementation of DenseNets" (Pleiss et al. 2017, arXiv 1707.06990), sections 3 and 4.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from memjax._core import check
from memjax._core.arrays import accumulator, vary, varying_axes
from memjax._core.backward.derivatives import forward_mode_message, refusing_forward_mode
from memjax._core.platforms import is_traced_for_one_device
from memjax.remat import policies
from memjax.remat._dense import triton
from memjax.remat._dense.shared import shared
from memjax.remat._dense.spec import KEEP, DenseParams, DenseSpec, DenseStatistics, dropout, norm_relu
from memjax.remat._dense.xla import conv1x1, conv3x3

_IMPLEMENTATIONS = (None, "xla", "triton")
_FORWARD_MODE = forward_mode_message("a dense block", "keep='all', of which forward mode keeps nothing")


def dense_block(
    spec: DenseSpec,
    params: DenseParams,
    running: DenseStatistics,
    x: Float[Array, "b h w c"],
    *,
    keep: str = "features",
    dropout_key: PRNGKeyArray | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "b h w o"], DenseStatistics]:
    """A dense block as a function: `num_layers` times, append what a layer computes from all features so far.

    A layer is `conv3x3(relu(norm(conv1x1(relu(norm(x))))))`, or `conv3x3(relu(norm(x)))` without a bottleneck.
    It normalises with batch statistics, or with `running` if `spec.use_running_average`.

    Args:
      spec: the static description.
      params: parameters of any float dtype; convolutions compute in that of `x`.
      running: running statistics, used if `spec.use_running_average`.
      x: (B, H, W, spec.in_features), any float dtype; statistics are float32, or float64 for float64.
      keep: what lives from the forward to the backward pass, in elements per pixel of x, with m layers, growth rate k,
        c0 input features and C = c0 + m k:

        - `"all"`: plain autodiff, about m (c0 + m k / 2) times a small constant: quadratic in depth.
        - `"convolutions"`: C for the features, which are also the output, and 4 k m for the 1x1 convolutions.
          The paper's choice. Recomputes normalisation and ReLU.
        - `"features"`: C. Recomputes the 1x1 convolutions too: 19% more arithmetic of convolutions in a
          DenseNet-264 step.
      dropout_key: needed if `spec.dropout_rate` is not zero.
      implementation: `"xla"` runs everywhere; `"triton"` fuses normalisation and ReLU into the 1x1 convolutions, on one
        NVIDIA GPU, in bfloat16 or float16, without `vmap`. By default the fastest of them that runs here. Ignored by
        `keep="all"`.

    Returns:
      The features (B, H, W, C), the input first, and the statistics that were used, which carry no gradient.

    During the backward pass one gradient buffer of C channels in float32 (float64 for float64) exists besides what was
    kept, and temporary arrays of one layer. `"convolutions"` and `"features"` support reverse mode only.

    The compiler must not undo the recomputation. Only XLA:CPU of JAX 0.10 does, where a block has runs of a single layer,
    unless the program is compiled with `memjax.remat_compiler_options()`.

    Raises:
      ValueError: for an unknown `keep`, a wrong number of channels, arrays of other shapes than `spec` has, a missing dropout
        key, or an implementation that is unknown or cannot run here.
      TypeError: if `x` is not floating point.
    """
    check.choice("keep", keep, KEEP)
    check.choice("implementation", implementation, _IMPLEMENTATIONS)
    for name, value, kind in (
        ("spec", spec, DenseSpec),
        ("params", params, DenseParams),
        ("running", running, DenseStatistics),
    ):
        if not isinstance(value, kind):
            raise check.fail(TypeError, name, f"a {kind.__name__}", value)
    spec.check_params(params)
    spec.check_running(running)
    check.array("x", x, floating=True)
    if x.ndim != 4 or x.shape[-1] != spec.in_features:
        raise check.fail(ValueError, "x", f"an array of shape (batch, height, width, {spec.in_features})", x)
    if x.size == 0 and not spec.use_running_average:
        raise check.fail(ValueError, "x", "an array with images and pixels", x, "statistics of none are NaN")
    if dropout_key is not None:
        check.prng_key("dropout_key", dropout_key)
    elif spec.dropout_rate > 0:
        fix = f"spec.dropout_rate is {spec.dropout_rate}"
        raise check.fail(ValueError, "dropout_key", "a random key", dropout_key, fix)
    check.known_sizes("remat.dense_block", x)
    if keep == "all":
        return _plain(spec, params, running, dropout_key, x)

    def run(params: DenseParams, x: Array) -> tuple[Array, DenseStatistics]:
        return shared(spec, keep, chosen, params, running, dropout_key, x)

    chosen = _choose(implementation, spec, x.dtype) if x.size else "xla"  # kernels need something to run for
    params, x = vary(
        (params, x), varying_axes(x, *jax.tree.leaves(params))
    )  # sums over devices are taken once, outside
    features, statistics = refusing_forward_mode(run, _FORWARD_MODE)(params, x)
    return features, jax.lax.stop_gradient(statistics)


def _choose(implementation: str | None, spec: DenseSpec, dtype) -> str:
    reason = triton.why_not(spec, dtype)
    if implementation == "triton" and reason is not None:
        raise ValueError(f"implementation must be 'xla' or None here, got 'triton': {reason}")
    if implementation is None:
        # A program partitioned over several devices can split XLA's operations, not a kernel.
        return "triton" if reason is None and is_traced_for_one_device() else "xla"
    return implementation


class DenseBlock(nnx.Module):
    """`dense_block` as a Flax NNX module that owns its parameters and running statistics.

    Calling it with (B, H, W, in_features) gives (B, H, W, in_features + num_layers * growth_rate), input first.
    `keep` changes what training keeps in memory, and nothing else: parameters, outputs and gradients are the same, so a
    checkpoint made with one value loads with another. See `dense_block` for its values and their cost.

    All running statistics are updated once per call in training mode, `new = momentum * old + (1 - momentum) * batch`,
    with biased variances. A channel's are shared by the layers that read it, which see the same batch statistics anyway.

    Args:
      in_features: channels of the input.
      growth_rate: channels that each layer adds (k).
      num_layers: layers (m).
      bottleneck: width of the 1x1 convolution in units of `growth_rate`, or None for layers of one 3x3 convolution.
      keep: `"all"`, `"convolutions"` or `"features"`.
      dropout_rate: share of each layer's new features dropped in training; needs a `dropout` stream in `rngs`.
      momentum, epsilon: of the normalisations.
      dtype: of computation and output; by default that of the input.
      param_dtype: of the parameters.
      implementation: `dense_block`'s.
      rngs: for initial values (He et al. 2015, normal, fan in) and dropout.

    Raises:
      ValueError: for a size below one, a rate outside [0, 1), or an unknown `keep`.
    """

    def __init__(
        self,
        in_features: int,
        growth_rate: int,
        num_layers: int,
        *,
        bottleneck: int | None = 4,
        keep: str = "features",
        dropout_rate: float = 0.0,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        spec = DenseSpec(in_features, growth_rate, num_layers, bottleneck, epsilon, dropout_rate)
        check.choice("keep", keep, KEEP)
        check.choice("implementation", implementation, _IMPLEMENTATIONS)
        momentum = check.number("momentum", momentum, least=0, below=1)
        check.dtype("param_dtype", param_dtype, floating=True)
        if dtype is not None:
            check.dtype("dtype", dtype, floating=True)
        if not isinstance(rngs, nnx.Rngs):
            raise check.fail(TypeError, "rngs", "an nnx.Rngs", rngs, "such as nnx.Rngs(0)")
        self.in_features, self.growth_rate, self.num_layers = spec.in_features, spec.growth_rate, spec.num_layers
        self.bottleneck, self.keep = spec.bottleneck, keep
        self.dropout_rate, self.momentum, self.epsilon = spec.dropout_rate, momentum, spec.epsilon
        self.dtype, self.implementation = dtype, implementation
        self.use_running_average = self.deterministic = False

        rows = spec.rows
        # Input channels of the layer that a row belongs to: the fan-in of its kernel.
        fan_in = jnp.concatenate([jnp.full(spec.channels(i), spec.channels(i)) for i in range(spec.num_layers)])
        deviation = jnp.sqrt(2 / fan_in.astype(param_dtype))
        normal = lambda *shape: jax.random.normal(rngs.params(), shape, param_dtype)
        wide = accumulator(param_dtype)
        self.scale1 = nnx.Param(jnp.ones(rows, param_dtype))
        self.bias1 = nnx.Param(jnp.zeros(rows, param_dtype))
        consumed = spec.out_features - spec.growth_rate
        self.mean1 = nnx.BatchStat(jnp.zeros(consumed, wide))
        self.var1 = nnx.BatchStat(jnp.ones(consumed, wide))
        if spec.bottleneck is None:
            self.kernel1 = self.scale2 = self.bias2 = self.mean2 = self.var2 = nnx.data(None)
            self.kernel2 = nnx.Param(normal(rows, 3, 3, spec.growth_rate) * (deviation / 3)[:, None, None, None])
        else:
            width = spec.width
            self.kernel1 = nnx.Param(normal(rows, width) * deviation[:, None])
            self.scale2 = nnx.Param(jnp.ones((spec.num_layers, width), param_dtype))
            self.bias2 = nnx.Param(jnp.zeros((spec.num_layers, width), param_dtype))
            self.kernel2 = nnx.Param(normal(spec.num_layers, 3, 3, width, spec.growth_rate) * (2 / (9 * width)) ** 0.5)
            self.mean2 = nnx.BatchStat(jnp.zeros((spec.num_layers, width), wide))
            self.var2 = nnx.BatchStat(jnp.ones((spec.num_layers, width), wide))
        self.dropout_rngs = rngs.dropout.fork() if spec.dropout_rate > 0 else nnx.data(None)

    @property
    def spec(self) -> DenseSpec:
        """The static description of what the block computes now, in training or evaluation mode."""
        return DenseSpec(
            self.in_features,
            self.growth_rate,
            self.num_layers,
            self.bottleneck,
            self.epsilon,
            0.0 if self.deterministic else self.dropout_rate,
            self.use_running_average,
        )

    @property
    def params(self) -> DenseParams:
        return DenseParams(*(self._array(name) for name in DenseParams._fields))

    @property
    def running(self) -> DenseStatistics:
        return DenseStatistics(*(self._array(name) for name in DenseStatistics._fields))

    def _array(self, name: str):
        variable = getattr(self, name)
        return None if variable is None else variable[...]

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w o"]:
        spec = self.spec
        check.array("x", x)
        x = x if self.dtype is None else x.astype(self.dtype)
        key = self.dropout_rngs() if self.dropout_rngs is not None and spec.dropout_rate > 0 else None
        features, used = dense_block(
            spec,
            self.params,
            self.running,
            x,
            keep=self.keep,
            dropout_key=key,
            implementation=self.implementation,
        )
        if not spec.use_running_average:
            for name, batch in used._asdict().items():
                if batch is not None:
                    running = getattr(self, name)
                    new = self.momentum * running[...] + (1 - self.momentum) * batch.astype(running.dtype)
                    running[...] = new
        return features


# The dense block as one would write it: concatenate, normalise, convolve, and let autodiff keep what it likes.
#
# This is the reference that the memory-saving version is tested against, and what `keep="all"` runs.


def _normalise(spec: DenseSpec, x, scale, bias, running):
    if spec.use_running_average:
        mean, var = running
    else:
        wide, axes = x.astype(accumulator(x.dtype)), tuple(range(x.ndim - 1))
        mean = jnp.mean(wide, axes)
        var = jnp.maximum(jnp.mean(jnp.square(wide), axes) - jnp.square(mean), 0)
    gain = scale.astype(mean.dtype) * jax.lax.rsqrt(var + spec.epsilon)
    return norm_relu(x, mean, gain, bias.astype(mean.dtype)), (mean, var)


def _plain(spec: DenseSpec, params: DenseParams, running: DenseStatistics, key, x):
    """Features (B, H, W, out_features) and the statistics used, by plain autodiff."""
    features, statistics2 = [x], []
    used = (running.mean1, running.var1)
    for i in range(spec.num_layers):
        c = spec.channels(i)
        rows = slice(spec.offset(i), spec.offset(i + 1))
        joined = jnp.concatenate(features, -1)
        hidden, used1 = _normalise(
            spec, joined, params.scale1[rows], params.bias1[rows], (running.mean1[:c], running.var1[:c])
        )
        if i == spec.num_layers - 1:  # the last layer reads every channel that has statistics
            used = used1
        if params.kernel1 is not None:
            assert params.scale2 is not None
            assert params.bias2 is not None
            assert running.mean2 is not None
            assert running.var2 is not None
            z = checkpoint_name(conv1x1(hidden, params.kernel1[rows]), policies.CONV_OUTPUT)
            hidden, used2 = _normalise(spec, z, params.scale2[i], params.bias2[i], (running.mean2[i], running.var2[i]))
            statistics2.append(used2)
            kernel2 = params.kernel2[i]
        else:
            kernel2 = jnp.moveaxis(params.kernel2[rows], 0, 2)
        new = checkpoint_name(conv3x3(hidden, kernel2), policies.DENSE_FEATURES)
        features.append(dropout(spec, key, i, new))
    mean2, var2 = (jnp.stack(s) for s in zip(*statistics2, strict=True)) if statistics2 else (None, None)
    statistics = DenseStatistics(*used, mean2, var2)
    return jnp.concatenate(features, -1), jax.lax.stop_gradient(statistics)
