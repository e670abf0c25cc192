"""`compressed` functions: gradients, bytes, what is encoded and what is not, and composition with JAX's transforms."""

import functools
import re
from contextlib import nullcontext

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import memjax
from memjax import compress, compressed
from memjax._residuals import residual_bytes
from memjax.compress import Cast, ChannelQuantized, ErrorBounded, GroupQuantized
from memjax.compress._transform import overflow
from memjax.remat import DenseSpec, dense_block
from tests.compress.networks import SIZE, batch_norm, conv, errors, images, loss_of, network, parameters
from tests.remat.dense_cases import random_block

EXACT = Cast(jnp.float32)  # changes nothing, so that gradients must not either
CODES = SIZE // 4096 * 36 + 8  # headers of a code of SIZE values


def gradients(f, *args):
    return jax.jit(jax.grad(loss_of(f), argnums=(0, 1)))(*args)


@pytest.mark.smoke
def test_gradients_are_exact_with_an_exact_codec():
    args = parameters(), images()
    chex.assert_trees_all_close(
        gradients(compressed(network, EXACT, inputs=True), *args), gradients(network, *args), rtol=1e-4, atol=1e-8
    )


@pytest.mark.smoke
@pytest.mark.parametrize("where", [None, "conv"])
def test_gradients_err_with_the_bound_and_values_do_not(where):
    args = parameters(2), images()
    want = gradients(network, *args)
    worst = []
    for k in (-4, -8):
        f = compressed(network, ErrorBounded(jnp.float32(2.0**k), bits_per_value=28), where=where)
        worst.append(max(errors(gradients(f, *args), want)))
    assert worst[1] < 0.01
    assert 8 < worst[0] / worst[1] < 32  # proportional to the bound
    np.testing.assert_allclose(jax.jit(f)(*args), jax.jit(network)(*args), rtol=1e-5, atol=1e-5)


def kept_bytes(f, *args):
    """Residual bytes of the gradient of a function, nothing compiled."""
    return residual_bytes(jax.jit(jax.grad(f)).trace(*args).jaxpr).device


def kept_by_network(f, layers):
    return kept_bytes(loss_of(f), parameters(layers), images())


def kept_of_sum(f, x):
    return kept_bytes(lambda x: jnp.sum(f(x)), x)


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
    # Of what is left alone, too, one array is kept for several.
    alone = compressed(network, ErrorBounded(2**-4, bits_per_value=28), smallest=SIZE + 1)
    assert kept_by_network(alone, 3) < kept_by_network(network, 3) / 1.3


def test_compiled_memory_grows_by_the_codes_alone():
    f = compressed(network, ErrorBounded(2**-4, bits_per_value=4))
    few, many = (temporary(f, layers) for layers in (2, 6))
    plain_few, plain_many = (temporary(network, layers) for layers in (2, 6))
    assert (many - few) / 4 < 1.3 * 2 * (SIZE // 2 + CODES)  # weights' gradients are in it too
    assert (many - few) < 0.4 * (plain_many - plain_few)


def test_what_convolutions_do_not_read_leaves_memory_when_it_has_a_code():
    both = compressed(compressed(network, ErrorBounded(2**-4, bits_per_value=4), where="conv"), ChannelQuantized(4))
    few, many = (temporary(both, count) for count in (2, 6))
    assert (many - few) / 4 < 5.5 * SIZE  # 8.5 without waiting, 12 of the network as it is


def saved(f, *args):
    """Shapes and dtypes of what a function keeps, arguments left out."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], *args))
    return sorted((str(leaf.dtype), leaf.size) for leaf in leaves if leaf.size >= 512)


def test_masks_are_bits_unless_they_are_signs():
    x = jnp.ones((64, 64))
    relu = compressed(lambda x: jax.nn.relu(jnp.sin(x)), ErrorBounded(0.1, bits_per_value=4))
    # sin's derivative, cos, encoded, and the mask, as bits; no zeros. The argument is no part of it.
    assert ("bool", 4096) not in saved(relu, x)
    assert ("float32", 4096) not in saved(relu, x)[1:]
    assert kept_of_sum(relu, x) <= 4096 // 2 + 36 + 16 + 4096 // 8

    def square_of_relu(x):
        return jnp.square(jax.nn.relu(x))

    exact_signs = compressed(square_of_relu, ErrorBounded(0.1, bits_per_value=4))
    without = compressed(square_of_relu, Cast(jnp.bfloat16))
    assert kept_of_sum(exact_signs, x) <= 4096 // 2 + 36 + 16
    assert kept_of_sum(without, x) == 4096 * 2 + 4096 // 8
    g = jax.jit(jax.grad(lambda x: jnp.sum(exact_signs(x))))(jnp.linspace(-1, 1, 4096))
    np.testing.assert_array_equal(g != 0, np.linspace(-1, 1, 4096) > 0)


def test_masks_of_nan_are_false():
    x = jnp.linspace(-1, 1, 4096).at[7].set(jnp.nan)
    f = lambda x: jnp.sum(jnp.where(jnp.isnan(x), 0, jnp.square(jax.nn.relu(x))))
    wanted, got = (jax.grad(g)(x) for g in (f, compressed(f, ErrorBounded(0.1, bits_per_value=28))))
    np.testing.assert_array_equal(jnp.isnan(got), jnp.isnan(wanted))


def test_parameters_integers_and_small_arrays_are_left_alone():
    w = jax.random.normal(jax.random.key(0), (128, 128))
    labels = jnp.arange(5000) % 128

    def f(w, x):
        return jnp.tanh(x @ w.astype(jnp.bfloat16).astype(jnp.float32))[jnp.arange(5000) % 40, labels]

    x = jax.random.normal(jax.random.key(1), (40, 128))
    wrapped = compressed(f, ErrorBounded(0.5, bits_per_value=28))
    # tanh's derivative is all that is encoded: the arguments, cast weights and indices are exact. Not under jit, where
    # the compiler may leave out roundings to bfloat16.
    by_w = lambda f: jax.grad(lambda w: jnp.sum(f(w, x)))(w)
    np.testing.assert_allclose(by_w(compressed(f, EXACT)), by_w(f), rtol=1e-5, atol=1e-6)
    by_x = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(f(w, x))))(x[:8])
    np.testing.assert_allclose(by_x(wrapped), by_x(f), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(("window", "stride"), [((2, 2), (2, 2)), ((3, 3), (2, 2)), ((3, 2), (1, 3)), ((2, 5), (4, 3))])
def test_max_pool_keeps_an_index(window, stride, padding):
    """With many equal values, in bfloat16: the gradient goes to the first."""
    x = jnp.round(jax.random.normal(jax.random.key(0), (4, 17, 19, 16)) * 2).astype(jnp.bfloat16)

    def pool(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, *window, 1), (1, *stride, 1), padding)

    wrapped = compressed(pool, EXACT)
    out = jax.eval_shape(pool, x)
    ct = jnp.round(jax.random.normal(jax.random.key(1), out.shape) * 4).astype(jnp.bfloat16)  # sums are exact

    @jax.jit
    def both(x, ct):
        results = []
        for f in (pool, wrapped):
            out, pull = jax.vjp(f, x)
            results.append((out, pull(ct)))
        return results

    chex.assert_trees_all_equal(*both(x, ct))
    assert kept_of_sum(wrapped, x) == out.size


def test_batch_norm_has_the_bound_in_units_of_its_deviation():
    """Channels of scales from 0.1 to 1000: a bound on each is one on the normalised values."""
    scales = jnp.logspace(-1, 3, 16)
    x = images() * scales
    f = compressed(lambda x: negated_batch_norm(x), ErrorBounded(2**-6, bits_per_value=28), inputs=True)
    ct = images() + jax.random.normal(jax.random.key(9), x.shape)  # so that its correlation with x is the same for all
    want, got = (jax.jit(jax.grad(lambda x, f=f: jnp.sum(ct * f(x))))(x) for f in (negated_batch_norm, f))
    by_channel = jnp.linalg.norm((got - want).reshape(-1, 16), axis=0) / jnp.linalg.norm(want.reshape(-1, 16), axis=0)
    assert float(by_channel.max()) < 0.02
    assert float(by_channel.max() / by_channel.min()) < 4


def negated_batch_norm(x):
    return batch_norm(jnp.negative(x), jnp.ones(16), jnp.zeros(16))


@pytest.mark.parametrize(
    "around", [lambda f: f, jax.checkpoint, lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x[:, None])]
)
def test_an_overflow_is_said_once_with_the_bits_needed(around, monkeypatch):
    monkeypatch.setattr(overflow, "_warned", set())
    f = around(compressed(lambda w, x: jnp.tanh(conv(jnp.tanh(x), w)), ErrorBounded(2**-8, bits_per_value=2)))
    args = parameters(1)[0]["w"], images()
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(f(w, x)))))

    def overflowed(*args):
        assert np.isnan(gradient(*args)).any()
        jax.effects_barrier()

    with pytest.warns(compress.CapacityWarning, match=r"bits_per_value=\d+\.\d or more") as said:
        overflowed(*args)
    assert len(said) == 1
    enough = float(re.search(r"bits_per_value=(\d+\.\d) or more", str(said[0].message))[1])
    overflowed(*args)  # a second warning would be an error
    roomy = around(compressed(lambda w, x: jnp.tanh(conv(jnp.tanh(x), w)), ErrorBounded(2**-8, bits_per_value=enough)))
    assert np.isfinite(jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(roomy(w, x)))))(*args)).all()


def test_codes_that_would_be_larger_are_not_used():
    """Exact gradients, no more bytes than without, and a warning when nothing at all is encoded."""
    f = lambda x: jnp.sum(jnp.sin(jnp.exp(x)))
    x = jnp.linspace(-1, 1, 8192)
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
                chex.assert_trees_all_close(jax.grad(wrapped)(x), jax.grad(f)(x), rtol=1e-6)


class TestParameters:
    """Whatever is done to parameters before they meet an activation, a code that is off by half leaves dx exact."""

    @staticmethod
    def check(f, w, x, **options):
        """f(w, x), linear in x, saves w alone for dx."""
        off = ErrorBounded(0.5, bits_per_value=12)
        by_x = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(f(w, x)))))(x)
        chex.assert_trees_all_close(by_x(compressed(f, off, **options)), by_x(f), rtol=1e-4, atol=1e-5)

    w = jax.random.normal(jax.random.key(0), (4, 64, 128))
    x = jax.random.normal(jax.random.key(1), (96, 64))

    @pytest.mark.parametrize(
        "part",
        [
            lambda w: w[1],
            lambda w: w[jnp.int32(2)],
            lambda w: jnp.split(w, 4)[3][0],
            lambda w: w.transpose(0, 2, 1)[0].T,
            lambda w: w.reshape(64, 4, 128)[:, 2],
            lambda w: jnp.concatenate([w[0, :32], w[1, 32:]]),
            lambda w: w[:, ::-1][0].astype(jnp.bfloat16).astype(jnp.float32),
            lambda w: jnp.take(w, jnp.arange(3, 67) % 64, axis=1)[2],
        ],
    )
    def test_moved_or_cast(self, part):
        self.check(lambda w, x: x @ part(w), self.w, self.x)

    def test_in_a_scan_over_layers(self):
        def f(w, x):
            body = lambda x, w: (x @ w.astype(jnp.bfloat16).astype(jnp.float32), None)
            return lax.scan(body, x, w[:, :, :64] / 8)[0]

        self.check(f, self.w, self.x, inputs=1)
        self.check(lambda w, x: lax.scan(lambda x, w: (x @ w[:, :64].T, None), x, w)[0], self.w / 8, self.x)

    def test_computed_of_parameters_alone(self):
        """A weight norm: what is an activation is said."""
        norm = lambda w: w[0] * lax.rsqrt(jnp.sum(w[0] ** 2, 0))
        for inputs in (1, "x", -1, (1,), ["x"]):
            self.check(lambda w, x: x @ norm(w), self.w, self.x, inputs=inputs)

    def test_activations_are_encoded_where_they_are_named(self):
        f = lambda w, x: jnp.tanh(x @ w[0]) @ w[1].T
        made_before = lambda inputs: (
            lambda w, x: jnp.sum(compressed(f, Cast(jnp.bfloat16), inputs=inputs)(w, jnp.sin(x)))
        )
        alone, named = (kept_bytes(made_before(inputs), self.w, self.x) for inputs in (False, 1))
        assert alone - named == self.x.nbytes // 2  # the cosine is kept either way


def test_the_bound_can_be_traced_and_changed_without_compiling():
    traces = []

    @jax.jit
    def step(bound, params, x):
        traces.append(1)
        f = compressed(network, ErrorBounded(bound, bits_per_value=28))
        return jax.grad(lambda bound, params: loss_of(f)(params, x), argnums=(0, 1))(bound, params)

    args = parameters(2), images()
    results = [step(jnp.float32(bound), *args) for bound in (0.1, 0.001)]
    assert len(traces) == 1
    assert errors(results[0][1], results[1][1]) != [0.0] * 6
    assert results[0][0] == 0


class TestComposition:
    """With the exact codec, against the same without it; and one pass each with ErrorBounded, which uses more of JAX."""

    @staticmethod
    def same(with_codec, args, rounding=0.02):
        want = jax.jit(with_codec(lambda f: f))(*args)
        got = jax.jit(with_codec(lambda f: compressed(f, EXACT, inputs=True)))(*args)
        chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-7)
        rounded = jax.jit(with_codec(lambda f: compressed(f, ErrorBounded(2**-10, bits_per_value=28), inputs=True)))(
            *args
        )
        assert 0 < max(errors(rounded, want)) < rounding

    def test_vmap(self):
        def per_example(wrap):
            one = lambda w, x: jnp.mean(jnp.tanh(wrap(lambda w, x: jnp.tanh(conv(jnp.tanh(x), w)))(w, x[None])))
            return jax.vmap(jax.grad(one), (None, 0))

        self.same(per_example, (parameters(1)[0]["w"], images()[:3, :, :, :]))

    def test_checkpoint(self):
        def loss(wrap):
            inner = lambda w, x: jax.nn.relu(conv(x, w))
            inside = jax.checkpoint(wrap(inner))
            around = wrap(jax.checkpoint(inner))
            return jax.grad(lambda w, x: jnp.mean(around(w, jnp.sin(inside(w, x)))))

        self.same(loss, (parameters(1)[0]["w"], images()))

    @pytest.mark.parametrize("scan", [lax.scan, functools.partial(memjax.remat.scan, budget="200KiB")])
    def test_scan(self, scan):
        def loss(wrap):
            def run(w, h, xs):
                cell = wrap(lambda h, x: jnp.tanh(h @ w) + x)
                return jnp.mean(scan(lambda h, x: (cell(h, x), None), h, xs)[0] ** 2)

            return jax.grad(run, argnums=(0, 1, 2))

        keys = jax.random.split(jax.random.key(0), 3)
        w = jax.random.normal(keys[0], (64, 64)) / 16
        self.same(loss, (w, jax.random.normal(keys[1], (64, 64)), jax.random.normal(keys[2], (6, 64, 64))))

    def test_scan_inside(self):
        def loss(wrap):
            run = wrap(lambda w, h: lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, None, 4)[0])
            return jax.grad(lambda w, h: jnp.mean(run(w, h) ** 2))

        w = jax.random.normal(jax.random.key(0), (64, 64)) / 16
        self.same(loss, (w, jax.random.normal(jax.random.key(1), (64, 64))))

    def test_dense_block(self):
        spec = DenseSpec(16, 8, 2)
        params, running, x, _ = random_block(spec, (2, 16, 16), seed=0)

        def loss(wrap):
            block = wrap(lambda params, x: dense_block(spec, params, running, x)[0])
            return jax.grad(lambda params, x: jnp.mean(jnp.sin(block(params, jnp.tanh(x)))))

        self.same(loss, (params, x), rounding=0.2)

    def test_shard_map(self):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

        def loss(wrap):
            f = wrap(lambda w, x: jax.nn.relu(conv(jnp.sin(x), w)))
            local = lambda w, x: lax.pmean(jnp.mean(jnp.sin(f(w, x))), "data")
            spread = jax.shard_map(local, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
            return jax.grad(spread, argnums=(0, 1))

        self.same(loss, (parameters(1)[0]["w"], images()))

    def test_closed_over_arrays_and_auxiliary_integers(self):
        def loss(wrap):
            def run(w, x):
                f = wrap(lambda x, n: {"y": jnp.tanh(conv(jnp.sin(x), w)), "n": n + 1, "x": x})
                out = f(x, jnp.int32(2))
                return jnp.mean(out["y"] * out["n"].astype(jnp.float32) + out["x"])

            return jax.grad(run, argnums=(0, 1))

        self.same(loss, (parameters(1)[0]["w"], images()))


def test_group_quantized():
    args = parameters(), images()
    got = gradients(compressed(network, GroupQuantized(bits=8)), *args)
    assert max(errors(got, gradients(network, *args))) < 0.05


def scoped(x, w):
    with jax.named_scope("encoder"):
        with jax.named_scope("first"):
            x = jnp.tanh(conv(jnp.sin(x), w))
        with jax.named_scope("second"):
            x = jnp.tanh(conv(x, w))
    return x


@pytest.mark.parametrize(
    ("where", "encoded"),
    [
        (None, 4),
        ("encoder", 4),
        ("encoder/second", 2),
        ("first", 3),
        (lambda path, x: path.endswith("second") and x.ndim == 4, 2),
    ],
)
def test_where_chooses_scopes(where, encoded):
    """The first saves cos x, sin x and its tanh, which the second's convolution reads as well; the second its own tanh."""
    f = compressed(scoped, Cast(jnp.bfloat16), where=where)
    w, x = parameters(1)[0]["w"], images()
    kept = jax.eval_shape(lambda x, w: jax.vjp(f, x, w)[1], x, w)
    narrow = [leaf for leaf in jax.tree.leaves(kept) if leaf.dtype == jnp.bfloat16]
    assert len(narrow) == encoded


def test_refuses():
    codec = ErrorBounded(0.1, bits_per_value=28)
    for bad in (0.1, None, "8 bits", ErrorBounded):
        with pytest.raises(TypeError, match=r"codec must be a codec, got .*: pass memjax"):
            compressed(network, bad)
    with pytest.raises(
        TypeError, match=r"f_or_module must be a function or a Flax module, got .*: make an instance first"
    ):
        compressed(nn.Dense)
    for bad in (2.5, [1.5], None, {1}):
        with pytest.raises(TypeError, match="inputs must be True, False, or positions and names of arguments, got"):
            compressed(network, inputs=bad)
    for bad in (2, -3, "images", (0, "y")):
        with pytest.raises(ValueError, match=r"inputs must be positions and names of arguments, got .* a call with 2"):
            compressed(network, inputs=bad)(parameters(1), images())
    with pytest.raises(ValueError, match=r"inputs must be left out for a module, got True: its arguments are always"):
        compressed(nn.Dense(3), inputs=True)
    with pytest.raises(TypeError, match='where must be "conv", a pattern'):
        compressed(network, codec, where=3)
    for smallest in (-1, 2.5, True):
        with pytest.raises((TypeError, ValueError), match=f"smallest must be a number of values.* got {smallest}"):
            compressed(network, codec, smallest=smallest)
    with pytest.raises(TypeError, match="f_or_module must be a function or a Flax module, got 3"):
        compressed(3, codec)
    x = jnp.ones((64, 64))
    with pytest.raises(ValueError, match=r"where='conv' matches nothing that the backward pass reads"):
        jax.grad(lambda x: jnp.sum(compressed(jnp.sin, codec, where="conv")(x)))(x)
    with pytest.raises(
        ValueError, match=r"where='third' matches nothing .* scopes of the function are \['encoder/first',"
    ):
        jax.grad(lambda x: jnp.sum(compressed(scoped, codec, where="third")(x, parameters(1)[0]["w"])))(images())
    forward = lambda x: jax.jvp(compressed(jnp.sin, codec), (x,), (x,))
    for f in (forward, jax.jit(forward), lambda x: jax.vmap(forward)(x[None]), jax.jacfwd(compressed(jnp.sin, codec))):
        with pytest.raises(TypeError, match=r"cannot be differentiated in forward mode .* use reverse mode"):
            f(x)
    with pytest.raises(TypeError, match="cannot be differentiated in forward mode"):
        jax.linearize(compressed(jnp.sin, codec), x)[1](x)
    twice = jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(compressed(lambda x: jnp.sin(x) ** 3, codec)(x)))(x)))
    with pytest.raises(TypeError, match="first derivatives in reverse mode only"):
        twice(x)


def test_integer_complex_and_double_precision_arrays_pass_through(x64):
    x = jnp.linspace(-1, 1, 5000)
    f = lambda x: jnp.abs(jnp.exp(1j * jnp.sin(x).astype(jnp.complex128)) * jnp.arange(5000).astype(jnp.complex128))
    gradient = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(f(x))))(x)
    got, want = gradient(compressed(f, ErrorBounded(0.5, bits_per_value=28))), gradient(f)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-8)


def test_constants_among_what_is_saved():
    """The padding of an associative scan."""

    def f(w, x):
        by, start = jnp.exp(-(jnp.sin(x * w) ** 2)), jnp.cos(x)
        return jnp.sum(lax.associative_scan(lambda a, b: (b[0] * a[0], b[0] * a[1] + b[1]), (by, start), axis=1)[1])

    x = jax.random.normal(jax.random.key(0), (64, 128))
    got, want = (jax.jit(jax.grad(g))(jnp.float32(2), x) for g in (compressed(f), f))
    np.testing.assert_allclose(got, want, rtol=0.02)


def test_empty_arrays():
    f = compressed(lambda x: jnp.sin(x) * 2, ErrorBounded(0.1, bits_per_value=28))
    assert jax.grad(lambda x: jnp.sum(f(x)))(jnp.zeros((0, 5))).shape == (0, 5)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_collectives_over_an_axis_of_vmap(jit):
    """A batch norm over the examples of a vmap: the axis has no name any more where the backward pass is traced."""

    def normalised(x):
        centred = x - jax.lax.pmean(x, "batch")
        return jnp.tanh(centred * jax.lax.rsqrt(jax.lax.pmean(centred**2, "batch") + 1e-5))

    def loss(f, x):
        return jit(lambda x: jnp.sum(jax.vmap(f, axis_name="batch")(x) ** 2))(x)

    x = jax.random.normal(jax.random.key(0), (3, 64, 96))
    got = jax.grad(lambda x: loss(compressed(normalised, EXACT, inputs=True), x))(x)
    chex.assert_trees_all_close(got, jax.grad(lambda x: loss(normalised, x))(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scanned", [False, True])
def test_statistics_of_many_values_are_exact(scanned):
    """The sums of a softmax over 128 keys, more than 4096 of them, are kept as they are; what they are sums of is not."""

    def attend(x):
        scores = jnp.einsum("bqd,bkd->bqk", x, x) * 2
        return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x)

    def f(x):
        return lax.scan(lambda x, _: (attend(x), None), x, None, length=2)[0] if scanned else attend(x)

    x = jax.random.normal(jax.random.key(0), (40, 128, 8))
    saved_by = lambda f: saved(f, x)
    coarse = saved_by(compressed(f, compress.BlockQuantized(4), inputs=True))
    statistics = 40 * 128 * (2 if scanned else 1)
    assert ("float32", statistics) in coarse
    assert ("uint4", statistics) not in coarse
    assert any(dtype == "uint4" and size >= 40 * 128 * 128 for dtype, size in coarse)
