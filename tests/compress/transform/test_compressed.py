"""`compressed` functions: gradients and values, and what it refuses."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax import compressed
from memjax.compress import ErrorBounded, GroupQuantized
from tests.compress.networks import EXACT, errors, images, loss_of, network, parameters, scoped


@functools.cache
def gradients_of(f):
    return jax.jit(jax.grad(loss_of(f), argnums=(0, 1)))


def gradients(f, *args):
    return jax.device_get(gradients_of(f)(*args))


@pytest.mark.smoke
def test_gradients_are_exact_with_an_exact_codec():
    args = parameters(), images()
    chex.assert_trees_all_close(
        gradients(compressed(network, EXACT, inputs=True), *args), gradients(network, *args), rtol=1e-4, atol=1e-8
    )


@pytest.mark.parametrize("where", [None, "conv"])
def test_gradients_err_with_the_bound_and_values_do_not(where):
    args = parameters(2), images()
    want = gradients(network, *args)
    of = lambda bound: compressed(network, ErrorBounded(bound, bits_per_value=28), where=where)
    traces = []

    @jax.jit
    def step(bound, params, x):
        """It takes another bound without compiling again."""
        traces.append(1)
        return jax.grad(lambda bound, params, x: loss_of(of(bound))(params, x), argnums=(0, 1, 2))(bound, params, x)

    found = [step(np.float32(2.0**k), *args) for k in (-4, -8)]
    assert len(traces) == 1
    assert found[0][0] == 0  # a bound has no gradient
    worst = [max(errors(got, want)) for _, *got in found]
    assert worst[1] < 0.01
    assert 8 < worst[0] / worst[1] < 32  # proportional to the bound
    np.testing.assert_allclose(
        *jax.jit(lambda *args: (of(2.0**-8)(*args), network(*args)))(*args), rtol=1e-5, atol=1e-5
    )


def test_group_quantized():
    args = parameters(), images()
    got = gradients(compressed(network, GroupQuantized(bits=8)), *args)
    assert max(errors(got, gradients(network, *args))) < 0.05


def test_refuses():
    codec = ErrorBounded(0.1, bits_per_value=28)
    for bad in (0.1, "8 bits", ErrorBounded):
        with pytest.raises(TypeError, match=r"codec must be a codec, got .*: pass memjax"):
            compressed(network, bad)
    with pytest.raises(
        TypeError, match=r"f_or_module must be a function or a Flax module, got .*: make an instance first"
    ):
        compressed(nnx.Linear)
    for bad in (2.5, [1.5], None, {1}):
        with pytest.raises(TypeError, match="inputs must be True, False, or positions and names of arguments, got"):
            compressed(network, inputs=bad)
    for bad in (2, -3, "images", (0, "y")):
        with pytest.raises(ValueError, match=r"inputs must be positions and names of arguments, got .* a call with 2"):
            compressed(network, inputs=bad)(parameters(1), images())
    with pytest.raises(ValueError, match=r"inputs must be left out for a module, got True: its arguments are always"):
        compressed(nn.Dense(3), inputs=True)
    with pytest.raises(ValueError, match=r"bits must be one of \(3, 4, 6, 8\), got 5"):
        compressed(network, bits=5)
    with pytest.raises(ValueError, match="bits must be left out beside a codec, got 4"):
        compressed(network, codec, bits=4)
    with pytest.raises(TypeError, match='where must be "conv", a pattern'):
        compressed(network, codec, where=3)
    for smallest in (-1, 2.5, True):
        with pytest.raises((TypeError, ValueError), match=f"smallest must be a number of values.* got {smallest}"):
            compressed(network, codec, smallest=smallest)
    with pytest.raises(TypeError, match="f_or_module must be a function or a Flax module, got 3"):
        compressed(3, codec)
    x = jnp.ones((64, 64))
    with pytest.raises(
        ValueError, match=r"where must be a match for something that the backward pass reads, got 'conv'"
    ):
        jax.grad(lambda x: jnp.sum(compressed(jnp.sin, codec, where="conv")(x)))(x)
    with pytest.raises(
        ValueError,
        match=r"where must be a match for something .* got 'third': .* scopes of the function are \['encoder/first',",
    ):
        jax.grad(lambda x: jnp.sum(compressed(scoped, codec, where="third")(x, parameters(1)[0]["w"])))(images())
    forward = lambda x: jax.jvp(compressed(jnp.sin, codec), (x,), (x,))
    for f in (forward, jax.jit(forward), lambda x: jax.vmap(forward)(x[None]), jax.jacfwd(compressed(jnp.sin, codec))):
        with pytest.raises(TypeError, match=r"cannot be differentiated in forward mode .* use reverse mode"):
            f(x)
    with pytest.raises(TypeError, match="cannot be differentiated in forward mode"):
        jax.linearize(compressed(jnp.sin, codec), x)[1](x)
    rounded = compressed(lambda x: jnp.sin(x) ** 3, codec, inputs=True)
    twice = jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(rounded(x)))(x)))
    with pytest.raises(TypeError, match="first derivatives in reverse mode only"):
        twice(x)


def test_integer_complex_and_double_precision_arrays_pass_through(x64):
    x = jnp.linspace(-1, 1, 5000)
    f = lambda x: jnp.abs(jnp.exp(1j * jnp.sin(x).astype(jnp.complex128)) * jnp.arange(5000).astype(jnp.complex128))
    gradient = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(f(x))))(x)
    got, want = gradient(compressed(f, ErrorBounded(0.5, bits_per_value=28))), gradient(f)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-8)


def test_empty_arrays():
    f = compressed(lambda x: jnp.sin(x) * 2, ErrorBounded(0.1, bits_per_value=28))
    assert jax.grad(lambda x: jnp.sum(f(x)))(jnp.zeros((0, 5))).shape == (0, 5)
