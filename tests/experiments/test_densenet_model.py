"""DenseNets: published sizes, memory of the whole network, and the modes' agreement."""

import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import memjax
from experiments.models.densenet import DenseNet, _conv7x7_in_blocks, densenet, densenet_bc, max_pool


def parameters(model) -> int:
    return sum(math.prod(p.shape) for p in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize(
    ("depth", "growth_rate", "published"),
    [
        (121, None, 7_978_856),
        (161, None, 28_681_000),
        (169, None, 14_149_480),
        (201, None, 20_013_928),
        (232, None, 55_570_000),
        (264, None, 72_686_632),
        (264, 32, 33_340_000),
    ],
)
def test_published_parameter_counts(depth, growth_rate, published):
    model = nnx.eval_shape(lambda: densenet(depth, 1000, growth_rate=growth_rate, rngs=nnx.Rngs(0)))
    assert abs(parameters(model) - published) < (1 if published % 10_000 else 5_001)


@pytest.mark.parametrize(
    ("depth", "growth_rate", "millions"),
    [(40, 12, 0.176), (100, 12, 0.769), (160, 12, 1.739), (190, 40, 25.6), (250, 24, 15.3)],
)
def test_published_bc_parameter_counts(depth, growth_rate, millions):
    model = nnx.eval_shape(lambda: densenet_bc(depth, 10, growth_rate=growth_rate, rngs=nnx.Rngs(0)))
    assert parameters(model) / 1e6 == pytest.approx(millions, rel=5e-3)


def step(model):
    graph, params, state = nnx.split(model, nnx.Param, ...)

    def loss(params, state, images):
        network = nnx.merge(graph, params, state, copy=True)
        return jnp.sum(jnp.square(network(images))), nnx.split(network, nnx.Param, ...)[2]

    return jax.value_and_grad(loss, has_aux=True), params, state


def temp_bytes(depth, keep) -> int:
    f, params, state = step(nnx.eval_shape(lambda: densenet_bc(depth, 10, keep=keep, rngs=nnx.Rngs(0))))
    return memjax.measure(f, params, state, jax.ShapeDtypeStruct((64, 32, 32, 3), jnp.float32)).temp_bytes


def test_memory_of_densenet_bc_40():
    """The memory of plain autodiff grows with the square of the depth; that of "features" with the depth, as that of a block.

    The paper reports 22% at depth 160. At depth 100 it was 9.6%, at 160 6.4%; compiling takes many times as long there.
    """
    assert temp_bytes(40, "features") <= 0.22 * temp_bytes(40, "all")


def test_the_stem_of_gpus_is_the_convolution(x64):
    conv = nnx.Conv(3, 8, (7, 7), strides=2, use_bias=False, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    images = jax.random.normal(jax.random.key(0), (2, 10, 16, 3), jnp.float64)
    found, wanted = jax.jit(lambda images: (_conv7x7_in_blocks(conv.kernel[...], images), conv(images)))(images)
    np.testing.assert_allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 8, 8, 3), (1, 7, 9, 2), (2, 1, 1, 1), (1, 2, 5, 4), (0, 4, 4, 2)])
def test_the_pool_is_that_of_flax(x64, shape):
    whole = lambda x: nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))

    @jax.jit
    def both(x, cotangent):
        return [(result, pull(cotangent)[0]) for result, pull in (jax.vjp(f, x) for f in (max_pool, whole))]

    for values in (1000, 3):  # with three, most windows have several largest pixels
        rng = np.random.default_rng(0)
        x = np.asarray(rng.integers(0, values, shape), np.float64)
        cotangent = rng.normal(size=jax.eval_shape(whole, x).shape)
        (result, gradient), (exact, exact_gradient) = both(x, cotangent)
        np.testing.assert_array_equal(result, exact)
        np.testing.assert_allclose(gradient, exact_gradient, atol=1e-12)
        x[..., :1, :1, :1] = np.nan
        (result, _), (exact, _) = both(x, cotangent)
        np.testing.assert_array_equal(result, exact)


@pytest.mark.parametrize(
    ("stem", "keep", "sizes"), [("imagenet", "later_convolutions", (1, 2)), ("cifar", "features", (2,))]
)
def test_modes_agree(stem, keep, sizes):
    images = np.random.default_rng(0).normal(size=(4, 33, 33, 3)).astype(np.float32)

    @partial(jax.jit, static_argnums=0)
    def results(keep):
        f, params, state = step(DenseNet(sizes, 4, 7, stem=stem, keep=keep, rngs=nnx.Rngs(0)))
        with jax.default_matmul_precision("highest"):
            return f(params, state, jnp.asarray(images))

    chex.assert_trees_all_close(*jax.device_get([results(keep), results("all")]), rtol=5e-3, atol=5e-3)
    logits = jax.eval_shape(lambda: DenseNet(sizes, 4, 7, stem=stem, keep=keep, rngs=nnx.Rngs(0))(jnp.asarray(images)))
    chex.assert_shape(logits, (4, 7))
    chex.assert_type(logits, jnp.float32)


def test_refuses():
    with pytest.raises(ValueError, match=r"depth must be one of \[121, 161, 169, 201, 232, 264\], got 265"):
        densenet(265, 10, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"depth must be 6 n \+ 4 .* got 500; try 502"):
        densenet_bc(500, 10, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="growth_rate must be at least 1, got 0"):
        DenseNet((2,), 0, 10, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="stem must be 'imagenet' or 'cifar'"):
        DenseNet((2,), 4, 10, stem="mnist", rngs=nnx.Rngs(0))
