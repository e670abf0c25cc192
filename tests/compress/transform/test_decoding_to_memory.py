"""On a GPU a kernel decodes what a convolution reads; what others read of the same code is decoded where they read it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import memjax
from memjax.compress._codecs import block_kernel


def _network(weights, x):
    """A convolution reads the output of a ReLU, which is encoded in blocks. So does a product, whose factor is computed from it."""
    conv = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = jax.nn.relu(conv(x, weights[0]))
    return jnp.sum((conv(x, weights[1]) * jnp.sin(x)).astype(jnp.float32))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_kernel_decodes_what_convolutions_read(bits, monkeypatch):
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.random.normal(key, (3, 3, 64, 64), jnp.bfloat16) / 24 for key in keys[:2]]
    x = jax.random.normal(keys[2], (4, 16, 16, 64), jnp.bfloat16)
    gradient = lambda: jax.grad(memjax.compressed(_network, bits=bits))  # anew: traces are remembered
    expected = jax.jit(gradient())(weights, x)
    monkeypatch.setattr(block_kernel, "has_kernels", lambda: True)
    monkeypatch.setattr(block_kernel, "is_of_one_device", lambda aval: True)
    kernels = str(jax.make_jaxpr(gradient())(weights, x)).count("pallas_call")
    for got, wanted in zip(jax.jit(gradient())(weights, x), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert kernels == 2  # one encodes the ReLU's output, one decodes it for the convolution
