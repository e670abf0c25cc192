"""Where the kernels of blocks run in a network: for what convolutions and batch norms read."""

import functools

import flax.linen as nn
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import memjax
from memjax.compress._codecs import block_kernel
from tests.compress.codecs.round_trip import normal


@pytest.fixture
def with_kernels(monkeypatch):
    """Programs as if a GPU was at hand. On a CPU they run XLA's code in place of kernels."""

    def use():
        monkeypatch.setattr(block_kernel, "has_kernels", lambda: True)
        monkeypatch.setattr(block_kernel, "is_of_one_device", lambda aval: True)

    return use


def _network(weights, x):
    """A convolution reads the output of a ReLU, which is encoded in blocks, and so does the derivative of a product."""
    conv = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = jax.nn.relu(conv(x, weights[0]))
    return jnp.sum((conv(x, weights[1]) * jnp.sin(x)).astype(jnp.float32))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_kernel_decodes_what_convolutions_read(bits, with_kernels):
    """What others read of the same code is decoded where they read it."""
    weights = [(normal(3, 3, 64, 64, seed=i) / 24).astype(jnp.bfloat16) for i in range(2)]
    x = normal(4, 16, 16, 64, dtype=jnp.bfloat16)
    gradient = lambda: jax.grad(memjax.compressed(_network, bits=bits))  # anew: traces are remembered
    expected = jax.jit(gradient())(weights, x)
    with_kernels()
    kernels = str(jax.make_jaxpr(gradient())(weights, x)).count("pallas_call")
    for got, wanted in zip(jax.jit(gradient())(weights, x), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert kernels == 2  # one encodes the ReLU's output, one decodes it for the convolution


def test_gradients_of_an_array_are_made_before_the_backward_pass_goes_on(with_kernels):
    """Otherwise XLA puts them off, for the decoded array is large, and the cotangents that they need stay until then."""

    def network(weights, x):
        conv = functools.partial(
            lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(conv(x, weights[0]))
        return jnp.sum((conv(x, weights[1]) * jnp.sin(conv(x, weights[2]))).astype(jnp.float32))

    weights = [(normal(3, 3, 64, 64, seed=i) / 24).astype(jnp.bfloat16) for i in range(3)]
    with_kernels()
    jaxpr = jax.make_jaxpr(jax.grad(memjax.compressed(network)))(weights, normal(4, 16, 16, 64, dtype=jnp.bfloat16))
    convolutions = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive is lax.conv_general_dilated_p]
    products = {eqn.outvars[0] for eqn in convolutions}
    is_product = lambda atom: isinstance(atom, jax.extend.core.Var) and atom in products
    barriers = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive is lax.optimization_barrier_p]
    [waiting] = [eqn for eqn in barriers if sum(map(is_product, eqn.invars)) > 1]
    gradients = [atom for atom in waiting.invars if is_product(atom)]
    assert [atom.aval.shape for atom in gradients] == [(3, 3, 64, 64)] * 2
    # Both go on from their cotangents afterwards.
    assert (
        sum(not waiting_for.isdisjoint(eqn.invars) for waiting_for in [{*waiting.outvars}] for eqn in convolutions) == 2
    )


def test_masks_may_be_decoded_between_products(with_kernels):
    """What makes the next cotangent is then read by an equation that decodes something itself."""

    def network(weights, x):
        for w in weights:
            y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, y.shape), jax.nn.relu(y), 0)
        return jnp.sum(jnp.sin(x.astype(jnp.float32)))

    weights = [(normal(3, 3, 64, 64, seed=i) / 24).astype(jnp.bfloat16) for i in range(3)]
    x = normal(4, 16, 16, 64, dtype=jnp.bfloat16)
    expected = jax.jit(jax.grad(memjax.compressed(network)))(weights, x)
    with_kernels()
    for got, wanted in zip(jax.jit(jax.grad(memjax.compressed(network)))(weights, x), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


class _Norms(nn.Module):
    """A batch norm after each of two convolutions."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.Conv(64, (3, 3), use_bias=False, dtype=jnp.bfloat16)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16)(x))
        return x


@jax.numpy_dtype_promotion("standard")  # Flax's batch norm needs it
def test_sums_of_batch_norms_come_from_the_kernel(with_kernels):
    x = normal(4, 16, 16, 64, dtype=jnp.bfloat16)
    stats = dict(jax.jit(_Norms().init)(jax.random.key(1), x))
    args = stats.pop("params"), stats, x

    # In one program, rather than about 180 of an operation each, XLA leaves roundings to bfloat16 out where it fuses.
    options = {"xla_allow_excess_precision": False}

    def step():
        model = memjax.compressed(_Norms())

        def loss(params, stats, x):
            y, new = model.apply({**stats, "params": params}, x, mutable=["batch_stats"])
            return jnp.sum(jnp.square(y.astype(jnp.float32))), new

        return jax.jit(jax.grad(loss, has_aux=True), compiler_options=options).trace(*args)

    sums_of_arrays = lambda step: sum(
        eqn.primitive.name == "reduce_sum" and eqn.invars[0].aval.size == x.size and eqn.outvars[0].aval.size == 64
        for eqn in step.jaxpr.eqns
    )
    plain = step()
    with_kernels()
    kernels = step()
    assert sums_of_arrays(plain) - sums_of_arrays(kernels) == 4  # of values and of squares, for each norm
    (expected, _), (got, _) = (step.lower().compile()(*args) for step in (plain, kernels))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=1e-6)
