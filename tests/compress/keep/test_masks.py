"""Masks are kept as bits, or follow from what is encoded."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax import compressed
from memjax.compress import Cast, ErrorBounded
from memjax.compress._training.array_bits import Errors
from memjax.compress._transform.array_codecs import Role, array_codecs
from tests.compress.codecs.round_trip import normal
from tests.compress.kept import kept_bytes, kept_of_sum, saved
from tests.compress.networks import SIZE, batch_norm, conv, errors, images, loss_of, parameters


def test_masks_are_bits_unless_they_are_signs():
    x = jnp.ones((64, 64))
    relu = compressed(lambda x: jax.nn.relu(jnp.sin(x)), ErrorBounded(0.1, bits_per_value=4))
    # sin's derivative, cos, encoded, and the mask, as bits; no zeros. The argument is no part of it.
    assert ("bool", 4096) not in saved(relu, x)
    assert ("float32", 4096) not in saved(relu, x)[1:]
    assert kept_of_sum(relu, x) <= 4096 // 2 + 36 + 16 + 4096 // 8

    def square_of_relu(x):
        return jnp.square(jax.nn.relu(x))

    exact_signs = compressed(square_of_relu, ErrorBounded(0.1, bits_per_value=4), inputs=True)
    without = compressed(square_of_relu, Cast(jnp.bfloat16), inputs=True)
    assert kept_of_sum(exact_signs, x) <= 4096 // 2 + 36 + 16
    assert kept_of_sum(without, x) == 4096 * 2 + 4096 // 8
    x = np.linspace(-1, 1, 4096, dtype=np.float32)
    g = jax.jit(jax.grad(lambda x: jnp.sum(exact_signs(x))))(x)
    np.testing.assert_array_equal(np.asarray(g) != 0, x > 0)


def test_masks_of_nan_are_false():
    x = np.linspace(-1, 1, 4096, dtype=np.float32)
    x[7] = np.nan
    f = lambda x: jnp.sum(jnp.where(jnp.isnan(x), 0, jnp.square(jax.nn.relu(x))))
    wanted, got = (jax.jit(jax.grad(g))(x) for g in (f, compressed(f, ErrorBounded(0.1, bits_per_value=28))))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))


def test_masks_of_what_a_convolution_reads_are_exact():
    """They are packed where its input lies in memory: zeros of both signs and a NaN among the values."""
    x = np.array(images())
    x[0, 0], x[1, 1], x[2, 2, 2, 2] = 0.0, -0.0, np.nan
    w = jnp.ones((3, 3, 16, 16))
    f = lambda x: jnp.nansum(conv(jax.nn.relu(jnp.sin(x)), w))
    wanted, got = (jax.jit(jax.grad(g))(x) for g in (f, compressed(f, Cast(jnp.float32), inputs=True)))
    np.testing.assert_array_equal(np.asarray(got) == 0, np.asarray(wanted) == 0)
    np.testing.assert_array_equal(got, wanted)


CODES = [{"bits": 8}, {"bits": 4}, {"sigma": 0.01}, {"sigma": 1e-9}, {"bits": Errors(4)}]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        *((options, "float32") for options in CODES),
        *((options, "bfloat16") for options in CODES[:3]),
        *((options, "float16") for options in (CODES[0], CODES[-1])),
    ],
)
def test_masks_follow_from_codes_of_what_convolutions_read(options, dtype):
    """The gradient of a sum's operand depends on no code but the mask's: zeros of both signs, small and large values, a NaN."""
    a = np.array(images())
    a[0, 0], a[1, 1] = 0.0, -0.0
    a[:, 2] *= 1e-7
    a[:, 3] *= 1e4
    if options != {"bits": Errors(4)}:  # errors of steps say nothing of the others in a NaN's block
        a[2, 2, 2, 2] = np.nan
    a = a.astype(dtype)
    b = np.zeros_like(a)
    b[0, :, 5] = -1
    w = (normal(3, 3, 16, 16, seed=1) / 12).astype(dtype)
    f = lambda a, b, w: conv(jax.nn.relu(a + b), w)
    wrapped = compressed(f, inputs=[0, 1], **options)
    assert "uint32" not in [kind for kind, _ in saved(wrapped, a, b, w)]
    loss = lambda f: lambda a, b, w: jnp.nansum(f(a, b, w).astype(jnp.float32))
    gradients = (jax.device_get(jax.jit(jax.grad(loss(g), argnums=(0, 1, 2)))(a, b, w)) for g in (f, wrapped))
    wanted, got = (gradient[:2] for gradient in gradients)
    chex.assert_trees_all_equal(got, wanted)
    assert 0.3 < np.mean(got[0] == 0) < 0.7


def _blocks(params, x):
    for layer in params:
        y = jax.nn.relu(batch_norm(conv(x, layer["w"]), layer["scale"], layer["bias"]))
        x = jax.nn.relu(x + batch_norm(conv(y, layer["w"]), layer["scale"], layer["bias"]))
    return x


@pytest.mark.parametrize("bits", [8, 4])
def test_a_residual_network_keeps_no_mask_of_a_block_whose_output_is_encoded(bits):
    wrapped = compressed(_blocks, bits=bits)
    kept = lambda layers: kept_bytes(loss_of(wrapped), parameters(layers), images())
    # Both norms' inputs, the block's output and the mask of the other ReLU. With 8 bits one of two outputs is recomputed.
    less = (bits - 1) / 8 / 2 if bits == 8 else 0
    assert SIZE * (3 * bits / 8 + 1 / 8 - less) < (kept(4) - kept(2)) / 2 < SIZE * (3 * bits / 8 + 1.99 / 8 - less)
    gradient = lambda f: jax.jit(jax.grad(loss_of(f)))(parameters(2), images())
    assert max(errors(gradient(wrapped), gradient(_blocks))) < (0.006 if bits == 8 else 0.1)


def test_a_norm_may_read_the_relu():
    """The code is then made where the norm normalises."""

    def layers(params, x):
        for layer in params:
            x = batch_norm(jax.nn.relu(conv(x, layer["w"])), layer["scale"], layer["bias"])
        return x

    wrapped = compressed(layers)
    assert "uint32" not in [kind for kind, _ in saved(wrapped, parameters(3), images())]
    gradient = lambda f: jax.jit(jax.grad(loss_of(f)))(parameters(3), images())
    assert max(errors(gradient(wrapped), gradient(layers))) < 0.01


def test_what_follows_from_a_code_is_what_its_codec_keeps():
    """Whichever codec an array has by its role and the bits chosen for it."""
    aval = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    roles = [Role(aval, False, False, channel, 1.0, False, relu) for channel in (True, False) for relu in (True, False)]
    given = [(None, bits, None) for bits in (8, 6, 4, 3)] + [(None, None, 0.01), (None, None, 1e-9)]
    given += [(None, Errors(4), None), (ErrorBounded(0.1), None, None), (Cast(), None, None)]
    for arguments in given:
        codecs = array_codecs(*arguments)
        for role, codec in zip(roles, codecs.each(roles), strict=True):
            assert codec.keeps_zeros or not codecs.keeps_zeros_of(role)
