"""What `compressed` keeps, and what of it it encodes: bytes between the passes, and compiled memory."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import memjax
from memjax import compress, compressed
from memjax.compress import Cast, ChannelQuantized, ErrorBounded, GroupQuantized
from tests.compress.kept import kept_bytes
from tests.compress.networks import SIZE, batch_norm, conv, errors, images, loss_of, network, parameters

CODES = SIZE // 4096 * 36 + 8  # headers of a code of SIZE values


def kept_by_network(f, layers):
    return kept_bytes(loss_of(f), parameters(layers), images())


def temporary(f, layers):
    return memjax.measure(jax.grad(loss_of(f)), parameters(layers), images()).temp_bytes


def test_residual_bytes():
    """Per layer the convolution's output and the ReLU's, which also is its mask; of max-pooling an index."""
    layers, four_bits = 3, ErrorBounded(2**-4, bits_per_value=4)
    code = SIZE // 2 + CODES
    index, outside = SIZE // 4, SIZE  # the loss keeps the cosine of the output
    small = 4096
    plain = kept_by_network(network, layers)
    # Convolutions' outputs and all ReLUs' but the last; of that, which is made after pooling, the mask as bits.
    everything = (2 * layers - 1) * code + SIZE // 4 // 8 + index + outside
    assert everything <= kept_by_network(compressed(network, four_bits), layers) <= everything + layers * small
    assert plain > 9.5 * SIZE * 4 > 5 * everything
    # Only what convolutions read, the first of which reads an argument; batch norms' inputs are kept once, and exact.
    only_conv = (layers - 1) * code + layers * 4 * SIZE + SIZE // 4 // 8 + index + outside
    found = kept_by_network(compressed(network, four_bits, where="conv"), layers)
    assert only_conv <= found <= only_conv + layers * small
    with_inputs = kept_by_network(compressed(network, four_bits, inputs=True), layers)
    assert everything + code <= with_inputs <= everything + code + layers * small


def test_a_relu_of_a_norm_follows_from_what_the_norm_reads():
    """By default a layer keeps its convolution's output in 8 bits, and a mask; not the ReLU's output besides."""
    few, many = (kept_by_network(compressed(network), layers) for layers in (2, 4))
    assert SIZE * (1 + 1 / 8) <= (many - few) / 2 <= SIZE * (1 + 1 / 8) * 1.1
    gradient = lambda f: jax.jit(jax.grad(loss_of(f)))(parameters(2), images())
    assert max(errors(gradient(compressed(network)), gradient(network))) < 0.02


def _blocks(params, x):
    for layer in params:
        x = jax.nn.relu(x + batch_norm(conv(x, layer["w"]), layer["scale"], layer["bias"]))
    return x


def test_a_relu_of_a_sum_of_blocks_is_kept():
    """It follows from all earlier blocks, which would be computed again at once. Its code tells its mask."""
    few, many = (kept_by_network(compressed(_blocks, bits=4), layers) for layers in (2, 4))
    assert SIZE <= (many - few) / 2 <= SIZE * (1 + 1 / 8)


def test_outputs_of_blocks_are_recomputed_in_short_chains():
    """With 8 bits three of four are recomputed, and their masks are kept. Chains near the end are shorter, for fewer codes are
    after them.
    """
    kept = {layers: kept_by_network(compressed(_blocks), layers) for layers in (1, 3, 5, 8, 12)}
    codes = 1 + 1 / 32  # with ranges in float32
    assert kept[12] - kept[8] == pytest.approx(SIZE * (4 * codes + codes + 3 / 8), rel=0.02)
    for few, more in ((1, 3), (3, 5)):
        assert kept[more] - kept[few] == pytest.approx(SIZE * (3 * codes + 1 / 8), rel=0.02)
    gradient = lambda f: jax.jit(jax.grad(loss_of(f)))(parameters(8), images())
    assert max(errors(gradient(compressed(_blocks)), gradient(_blocks))) < 0.01


@jax.custom_vjp
def _told(x, flag):
    return x


def _tell(flag, ct):
    lax.cond(flag, lambda ct: jax.debug.print("told of {}", ct.shape[0]), lambda ct: None, ct)
    return ct, None


_told.defvjp(lambda x, flag: (x, flag), _tell)


def test_outputs_of_blocks_are_read_by_all_kinds_of_equations(capfd):
    """Without a sum with the output, and beside products with effects; early and late; and where they lie in several chains."""

    def network(params, x, flag):
        early = _blocks(params[:2], x)
        x = _blocks(params[3:5], conv(early, params[2]["w"]))
        x = _blocks(params[6:], x + _told(conv(x, params[5]["w"]), flag))
        return jnp.concatenate([x, jnp.sin(early)], -1)

    def gradient(f):
        loss = lambda params, x: jnp.mean(jnp.sin(f(params, x, True)))
        return jax.block_until_ready(jax.jit(jax.grad(loss))(parameters(9), images()))

    wanted = gradient(network)
    jax.effects_barrier()
    capfd.readouterr()
    assert max(errors(gradient(compressed(network)), wanted)) < 0.01
    jax.effects_barrier()
    assert capfd.readouterr().out == "told of 8\n"


def test_arrays_of_less_than_the_smallest_are_kept_as_they_are():
    def f(w, x):
        y = jnp.sin(conv(jnp.sin(x), w))[:, ::2, ::2]
        return conv(jnp.sin(y), w)

    def codec(smallest):
        arrays = lambda own, w, x: jnp.sum(compressed(f, own, where="conv", smallest=smallest)(w, x))
        return compress.layers(arrays, parameters(1)[0]["w"], images()).shapes

    both = [(8, 16, 16, 16), (8, 8, 8, 16)]
    assert [shape for shape, _ in codec(0)] == both
    assert [shape for shape, _ in codec(SIZE // 4)] == both
    assert [shape for shape, _ in codec(SIZE // 4 + 1)] == both[:1]
    with pytest.raises(ValueError, match="nothing of it is encoded"):
        codec(SIZE + 1)
    # An array that is not encoded is also kept once for all that read it.
    alone = compressed(network, ErrorBounded(2**-4, bits_per_value=28), smallest=SIZE + 1)
    assert kept_by_network(alone, 3) < kept_by_network(network, 3) / 1.3


def test_compiled_memory_grows_by_the_codes_alone():
    f = compressed(network, ErrorBounded(2**-4, bits_per_value=4))
    few, many = (temporary(f, layers) for layers in (2, 3))
    plain_few, plain_many = (temporary(network, layers) for layers in (2, 3))
    assert many - few < 1.3 * 2 * (SIZE // 2 + CODES)  # weights' gradients are in it too
    assert many - few < 0.4 * (plain_many - plain_few)


def test_what_convolutions_do_not_read_leaves_memory_when_it_has_a_code():
    both = compressed(compressed(network, ErrorBounded(2**-4, bits_per_value=4), where="conv"), ChannelQuantized(4))
    few, many = (temporary(both, count) for count in (2, 3))
    assert many - few < 5.5 * SIZE  # 8.5 without waiting, 12 of the network as it is


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="on a GPU decoding is fused into what reads the array")
def test_codes_of_a_fixed_rate_are_not_decoded_in_the_forward_pass():
    few, many = (temporary(compressed(network, ChannelQuantized(4)), count) for count in (2, 3))
    assert many - few < 1.5 * SIZE  # 8.6 without waiting: two codes, of half a byte a value


def test_codes_that_would_be_larger_are_not_used():
    """Exact gradients, no more bytes than without, and a warning when nothing at all is encoded."""
    f = lambda x: jnp.sum(jnp.sin(jnp.exp(x)))
    x = np.linspace(-1, 1, 8192, dtype=np.float32)
    for codec in (
        ChannelQuantized(4),
        ErrorBounded(2**-7),
        GroupQuantized(8, group_size=16, seed=1),
        Cast(jnp.float32),
    ):
        wrapped = compressed(f, codec)
        larger = codec.nbytes(x) > x.nbytes
        with pytest.warns(UserWarning, match="leaves everything as it is: the code of") if larger else nullcontext():
            assert kept_bytes(wrapped, x) <= kept_bytes(f, x)
            if larger:
                np.testing.assert_allclose(*(jax.jit(jax.grad(g))(x) for g in (wrapped, f)), rtol=1e-6)


def test_constants_among_what_is_saved():
    """The padding of an associative scan."""

    def f(w, x):
        by, start = jnp.exp(-(jnp.sin(x * w) ** 2)), jnp.cos(x)
        return jnp.sum(lax.associative_scan(lambda a, b: (b[0] * a[0], b[0] * a[1] + b[1]), (by, start), axis=1)[1])

    x = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
    got, want = (jax.jit(jax.grad(g))(jnp.float32(2), x) for g in (compressed(f), f))
    np.testing.assert_allclose(got, want, rtol=0.02)
