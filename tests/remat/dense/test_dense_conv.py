"""The 3x3 convolution's gradients, written out for CPUs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.remat._dense.xla import conv3x3, conv3x3_backward


@pytest.mark.parametrize("shape", [(2, 5, 7, 3), (1, 1, 1, 2), (3, 4, 1, 1)])
def test_equals_autodiff(x64, shape):
    normal = np.random.default_rng(0).normal
    x, kernel, dy = normal(size=shape), normal(size=(3, 3, shape[-1], 4)), normal(size=(*shape[:-1], 4))
    exact = jax.jit(lambda x, kernel, dy: jax.vjp(conv3x3, x, kernel)[1](dy))(x, kernel, dy)
    for found, expected in zip(jax.jit(conv3x3_backward)(x, kernel, dy), exact, strict=True):
        assert found.dtype == expected.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_loops_hold_convolutions_in_the_fast_layout_only():
    def loop(x, kernels):
        def layer(x, kernel):
            dx, d_kernel = conv3x3_backward(x, kernel, x)
            return x + dx, d_kernel

        return jax.lax.scan(layer, x, kernels)

    compiled = jax.jit(loop).lower(jnp.zeros((2, 8, 8, 4)), jnp.zeros((3, 3, 3, 4, 4))).compile()
    layouts = re.findall(r"convolution\(.*dim_labels=(\S+?),", compiled.as_text())
    assert layouts == ["b01f_01io->b01f"] * 2
