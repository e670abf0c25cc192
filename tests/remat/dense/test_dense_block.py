"""Dense blocks: the memory-saving versions against plain autodiff, their bytes, and what they refuse."""

import functools

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

import memjax
from memjax.remat import DenseBlock, DenseSpec, dense_block
from tests.compress.kept import measured_bytes
from tests.remat.dense.dense_cases import random_block, relative_errors, total_error
from tests.remat.dense.dense_cases import run_block as run

SAVING = ("convolutions", "features")


@pytest.mark.parametrize(
    ("bottleneck", "running", "dropout_rate", "keeps"),
    [
        (4, False, 0.3, SAVING),
        (None, True, 0.0, ("convolutions",)),
        (4, True, 0.0, ("features",)),
        (None, False, 0.3, ("features",)),
    ],
)
def test_equals_plain_autodiff_in_float64(x64, bottleneck, running, dropout_rate, keeps):
    spec = DenseSpec(5, 3, 3, bottleneck, dropout_rate=dropout_rate, use_running_average=running)
    case = random_block(spec, (1, 5, 3), seed=0, dtype=jnp.float64)
    plain = run(spec, case, keep="all")
    for keep in keeps:
        saving = run(spec, case, keep=keep)
        chex.assert_trees_all_equal_shapes_and_dtypes(saving, plain)
        errors = relative_errors(saving, plain)
        assert max(errors.values()) < 1e-10, (keep, errors)


@hypothesis.settings(max_examples=4, deadline=None, derandomize=True)
@hypothesis.given(
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from([1, 4, None]),
)
def test_equals_plain_autodiff_for_any_size(channels, growth, layers, batch, side, bottleneck):
    hypothesis.assume(batch * side > 1)  # one pixel has no variance
    with jax.enable_x64(True):
        spec = DenseSpec(channels, growth, layers, bottleneck)
        case = random_block(spec, (batch, side, side + 1), seed=1, dtype=jnp.float64)
        plain, saving = (run(spec, case, keep=keep) for keep in ("all", "features"))
        assert max(relative_errors(saving, plain).values()) < 1e-8


@pytest.mark.parametrize(("dtype", "running"), [(jnp.float32, False), (jnp.bfloat16, False), (jnp.bfloat16, True)])
def test_rounding_errors_are_those_of_plain_autodiff(x64, dtype, running):
    """Over several seeds, and their median: a sign that flips before a ReLU makes one error a hundred times another."""
    spec = DenseSpec(24, 12, 3, use_running_average=running)
    errors = {"all": [], "features": []}
    for seed in range(5):
        exact = run(spec, random_block(spec, (4, 8, 8), seed=seed, dtype=jnp.float64), keep="all")
        case = random_block(spec, (4, 8, 8), seed=seed)
        for keep, found in errors.items():
            result = run(spec, case, keep=keep, dtype=dtype)
            found.append([total_error(result[name], exact[name]) for name in exact])
    plain, saving = (np.array(errors[keep]) for keep in ("all", "features"))
    close = (saving + 1e-12) / (plain + 1e-12)  # running statistics come out as they went in
    assert (np.median(close, 0) <= 1.1).all(), close


def test_statistics_carry_no_gradient():
    spec = DenseSpec(4, 2, 3)
    params, running, x, _ = random_block(spec, (2, 4, 4), seed=3)
    loss = lambda p: jnp.sum(dense_block(spec, p, running, x)[1].mean1)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(jax.device_get(jax.jit(jax.grad(loss))(params))))


def gradient_and_arguments(keep, layers):
    block = nnx.eval_shape(lambda: DenseBlock(24, 12, layers, keep=keep, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(block)

    def loss(state, x):
        # A sum: its gradient needs nothing, so that what is kept is the block's.
        return jnp.sum(nnx.merge(graph, state, copy=True)(x))

    x = jax.ShapeDtypeStruct((8, 16, 16, 24), jnp.float32)
    return jax.grad(loss, allow_int=True), (state, x)


@functools.cache
def measured(keep, layers):
    step, args = gradient_and_arguments(keep, layers)
    return memjax.measure(step, *args)


def test_bytes_kept_are_the_features_and_the_convolutions():
    pixels, layers = 8 * 16 * 16, 16
    features = pixels * (24 + 12 * layers) * 4
    bottlenecks = pixels * 48 * layers * 4
    kept = {keep: measured(keep, layers) for keep in ("all", "features")}
    small = 64 * 1024  # statistics, by channel
    assert features <= kept["features"].residual_bytes <= features + small
    step, args = gradient_and_arguments("convolutions", layers)
    assert features + bottlenecks <= measured_bytes(step, *args) <= features + bottlenecks + small
    assert kept["features"].temp_bytes < 0.25 * kept["all"].temp_bytes
    # The feature buffer, its gradient and four arrays of one layer's width: nothing hoisted out of the loops.
    assert kept["features"].temp_bytes < 6 * features


def test_memory_is_linear_in_depth():
    shallow, deep = (measured("features", layers).temp_bytes for layers in (16, 48))
    assert deep < 4.2 * shallow  # the feature buffer grows 2.8 times; squared depth would give 9


def test_module_updates_running_statistics_once():
    x = np.random.default_rng(0).normal(size=(4, 6, 6, 8)).astype(np.float32)
    blocks = {keep: DenseBlock(8, 4, 3, keep=keep, momentum=0.75, rngs=nnx.Rngs(0)) for keep in ("all", *SAVING)}
    statistics = {}
    for keep, block in blocks.items():
        nnx.jit(nnx.grad(lambda block: jnp.sum(block(jnp.asarray(x)))))(block)
        statistics[keep] = jax.device_get([getattr(block, name)[...] for name in ("mean1", "var1", "mean2", "var2")])
        np.testing.assert_allclose(statistics[keep][0][:8], 0.25 * x.mean((0, 1, 2)), atol=1e-6)
        chex.assert_trees_all_close(statistics[keep], statistics["all"], atol=1e-5)


def test_module_evaluates_with_running_statistics_and_without_dropout():
    x = jax.random.normal(jax.random.key(0), (4, 6, 6, 8))
    block = DenseBlock(8, 4, 3, dropout_rate=0.5, rngs=nnx.Rngs(0, dropout=1))
    run = nnx.jit(lambda block, x: block(x))
    assert not np.allclose(run(block, x), run(block, x))
    block.eval()
    before = jax.device_put(nnx.state(block, nnx.BatchStat), may_alias=False)
    chex.assert_trees_all_equal(run(block, x), run(block, x))
    chex.assert_trees_all_equal(nnx.state(block, nnx.BatchStat), before)
    chex.assert_trees_all_close(run(block, x)[:1], run(block, x[:1]), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"growth_rate": 0}, "growth_rate must be a number of channels or layers of at least 1, got 0"),
        ({"num_layers": 0}, "num_layers must be .* of at least 1, got 0"),
        ({"keep": "everything"}, "keep must be one of 'all', 'convolutions', 'features', got 'everything'"),
        ({"dropout_rate": 1.0}, r"dropout_rate must be a finite number in \[0, 1\), got 1.0"),
        ({"bottleneck": 0}, "bottleneck must be .* of at least 1, got 0"),
    ],
)
def test_module_refuses(change, message):
    arguments = {"in_features": 8, "growth_rate": 4, "num_layers": 2, "rngs": nnx.Rngs(0)} | change
    with pytest.raises(ValueError, match=message):
        DenseBlock(**arguments)


def test_function_refuses():
    spec = DenseSpec(4, 2, 2)
    params, running, x, _ = random_block(spec, (1, 4, 4), seed=5)
    with pytest.raises(ValueError, match=r"x must be an array of shape \(batch, height, width, 4\), got"):
        dense_block(spec, params, running, x[..., :3])
    with pytest.raises(TypeError, match="x must be a floating-point array, got an array of int32"):
        dense_block(spec, params, running, x.astype(jnp.int32))
    with pytest.raises(
        ValueError, match=r"x must be an array with images and pixels, got .*: statistics of none are NaN"
    ):
        dense_block(spec, params, running, x[:0])
    with pytest.raises(ValueError, match="implementation must be"):
        dense_block(spec, params, running, x, implementation="cuda")
    if jax.default_backend() != "gpu":
        with pytest.raises(
            ValueError, match="implementation must be 'xla' or None here, got 'triton': it needs an NVIDIA GPU"
        ):
            dense_block(spec, params, running, x, implementation="triton")
    with pytest.raises(ValueError, match="dropout_key must be a random key, got None"):
        dense_block(DenseSpec(4, 2, 2, dropout_rate=0.5), params, running, x)
