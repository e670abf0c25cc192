"""What `compressed` keeps of Transformer layers, and how far their gradients are off."""

import functools
import math
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import memjax
from memjax import compressed
from memjax._attention.choice import causal_attention
from memjax.compress import BlockQuantized, ChannelQuantized, PositionQuantized
from memjax.compress._transform import array_codecs
from tests.compress.kept import kept_bytes, measured_bytes, saved
from tests.compress.transformer_layers import (
    FEATURES,
    HEADS,
    HIDDEN,
    TOKENS,
    backward,
    by_a_rule_of_its_own,
    forward,
    inputs,
    layer,
    norm,
    parameters,
    with_rule,
    with_softmax,
)

POSITIONS = math.prod(TOKENS)


@functools.cache
def gradient_of(f):
    return jax.jit(jax.grad(lambda p, x: jnp.sum(f(p, x) ** 2), (0, 1)))


def error(f, plain=layer, p=None):
    """The relative error of the gradient of all parameters and the input."""
    args = parameters() if p is None else p, inputs()
    got, want = (np.concatenate([np.ravel(a) for a in jax.tree.leaves(gradient_of(g)(*args))]) for g in (f, plain))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def code(size, bits):
    return PositionQuantized(bits).nbytes(jax.ShapeDtypeStruct((*TOKENS, size), jnp.float32))


def test_each_array_is_kept_once():
    """What attention reads and returns as it is; what the second norm reads, gate and up as codes. Nothing else: no norm's
    output, no gated product.
    """
    kept = lambda f: kept_bytes(lambda p, x: jnp.sum(f(p, jnp.sin(x)) ** 2), parameters(), inputs())
    exact = POSITIONS * 4 * (4 + 2) * FEATURES  # queries, keys, values, the output; the input and its cosine
    codes = code(FEATURES, 8) + 2 * code(HIDDEN, 8)
    statistics = POSITIONS * 4 * HEADS  # of attention; those of norms are computed again
    assert exact + codes <= (found := kept(compressed(layer))) <= exact + codes + statistics
    assert kept(layer) > 2.5 * found


def test_fewer_bits_keep_fewer_bytes():
    """With 4 bits queries and keys are computed again from the input, with 6 values and the output, too, which are exact then.
    Arrays of fewer features have more bits.
    """
    kinds = saved(compressed(layer, bits=4), parameters(), inputs())
    assert ("float32", POSITIONS * FEATURES) in kinds  # the input
    assert kinds.count(("float32", POSITIONS * FEATURES)) == 1
    nbytes = [kept_bytes(lambda p, x, f=f: jnp.sum(f(p, x)), parameters(), inputs()) for f in _of_bits((8, 6, 4, 3))]
    assert nbytes[0] > nbytes[2] > nbytes[3]
    assert nbytes[0] > nbytes[1]
    assert nbytes[2] < code(HIDDEN, 5) * 2 + code(FEATURES, 6) + 2 * code(FEATURES, 8) + POSITIONS * 4 * 10


@pytest.mark.parametrize("is_repeated", [True, False])
def test_one_product_that_gives_query_key_and_value_gives_all_or_none(is_repeated):
    """Queries and keys, which are exact, come from the input by one product, and values with them.

    Where the layer's products take more FLOPs for a byte on average, this one is repeated: then values have no code.
    """
    hidden = 16 * FEATURES if is_repeated else HIDDEN

    def joint(p, x):
        heads = (norm(x) @ p["joint"]).reshape(*TOKENS, 3, HEADS, -1)
        x = x + by_a_rule_of_its_own(*(heads[:, :, i] for i in range(3))).reshape(x.shape) @ p["out"]
        return x + jax.nn.silu(norm(x) @ p["gate"]) @ p["down"]

    p = parameters()
    p["joint"] = np.concatenate([p.pop(name) for name in ("query", "key", "value")], 1)
    p |= {"gate": np.resize(p["gate"], (FEATURES, hidden)), "down": np.resize(p["down"], (hidden, FEATURES))}
    found = kept_bytes(lambda p, x: jnp.sum(compressed(joint, bits=4)(p, x)), p, inputs())
    least = code(FEATURES, 8) + code(hidden, 5)  # the output, gate
    if is_repeated:
        least += code(FEATURES, 8)  # what the second norm reads: the smaller, the more bits
    else:
        least += code(FEATURES, 6) + code(FEATURES, 8) + 2 * POSITIONS * 4 * FEATURES  # that, values; queries and keys
    assert least <= found <= least + POSITIONS * 4 * HEADS
    assert error(compressed(joint, bits=4), joint, p) < 0.07


def test_on_gpus_products_that_take_less_time_than_codes_are_repeated(monkeypatch):
    """In narrow layers what one product gives from kept arrays is computed again. So gradients are exact."""
    kept = lambda: kept_bytes(lambda p, x: jnp.sum(compressed(layer, bits=8)(p, x)), parameters(), inputs())
    elsewhere = kept()
    monkeypatch.setattr(array_codecs, "traced_device", lambda: SimpleNamespace(platform="gpu"))
    assert kept() < elsewhere / 1.5
    assert error(compressed(layer, bits=8)) < 1e-6


def _of_bits(all_bits):
    return [compressed(layer, bits=bits) for bits in all_bits]


@pytest.mark.parametrize(("plain", "bits", "most"), [(layer, 8, 0.01), (layer, 4, 0.07), (with_softmax, 4, 0.07)])
def test_gradients_are_off_by_the_roundings_alone(plain, bits, most):
    assert 1e-4 < error(compressed(plain, bits=bits), plain) < most


def test_queries_and_keys_agree_with_their_log_sum_exp():
    """Rounded to 4 bits by themselves they make gradients wrong by more than half, whatever the codec."""
    for codec in (ChannelQuantized(4), BlockQuantized(4)):
        assert error(compressed(layer, codec)) < 0.35
    rounded = lambda p, x: layer(p, x, attend=_with_rounded_scores)
    assert error(rounded) > 0.5


@jax.custom_vjp
def _with_rounded_scores(query, key, value):
    return by_a_rule_of_its_own(query, key, value)


def _rounding_forward(query, key, value):
    out, (query, key, *rest) = forward(query, key, value)
    codec = ChannelQuantized(4)
    return out, (codec.decode(codec.encode(query)), codec.decode(codec.encode(key)), *rest)


_with_rounded_scores.defvjp(_rounding_forward, backward)


def test_attention_of_memjax_is_known():
    plain = lambda p, x: layer(p, x, attend=causal_attention)
    assert error(compressed(plain, ChannelQuantized(4)), plain) < 0.4


def test_layers_in_a_scan_and_under_checkpoints():
    stacked, layer = jax.tree.map(lambda *leaves: np.stack(leaves), parameters(0), parameters(2)), with_rule

    def over(f):
        return lambda p, x: lax.scan(lambda x, p: (f(p, x), None), x, p)[0]

    plain, small = over(layer), over(compressed(layer))
    checkpointed = over(jax.checkpoint(compressed(layer))), over(compressed(jax.checkpoint(layer), inputs=1))
    for f in (small, *checkpointed, compressed(plain)):
        assert error(f, plain, stacked) < 0.02
    kept = [kept_bytes(lambda p, x, f=f: jnp.sum(f(p, x)), stacked, inputs()) for f in (plain, small)]
    assert kept[1] < kept[0] / 3


def test_layers_in_a_chain():
    every, mlp = (parameters(0), parameters(2)), lambda p, x: x + jax.nn.silu(norm(x) @ p["gate"]) @ p["down"]
    chain = lambda every, x: memjax.remat.chain([compressed(mlp)] * 2, list(every), x, budget="64MiB")
    assert error(chain, lambda every, x: mlp(every[1], mlp(every[0], x)), every) < 0.02


class NNXLayer(nnx.Module):
    def __init__(self, rngs):
        linear = lambda a, b: nnx.Linear(a, b, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 128, rngs=rngs, decode=False)
        self.norms = nnx.List([nnx.LayerNorm(128, rngs=rngs), nnx.LayerNorm(128, rngs=rngs)])
        self.up, self.down = linear(128, 512), linear(512, 128)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return x + nn.Dense(128)(nn.gelu(nn.Dense(512)(nn.LayerNorm()(x)), approximate=False))


def test_an_nnx_module():
    module, x = NNXLayer(nnx.Rngs(0)), inputs()
    loss = lambda module, x: jnp.sum(module(x) ** 2)
    small = compressed(module, bits=8)
    kept = [measured_bytes(loss, m, x) for m in (module, small)]
    assert kept[1] < kept[0] / 2
    assert _largest_error(*(nnx.jit(nnx.grad(loss))(m, x) for m in (small, module))) < 0.03


def test_a_linen_module():
    plain, x = LinenLayer(), inputs()
    params = jax.jit(plain.init)(jax.random.key(0), x)
    loss = lambda m: lambda p: jnp.sum(m.apply(p, x) ** 2)
    models = compressed(plain, bits=4), plain
    kept = [measured_bytes(loss(m), params) for m in models]
    assert kept[0] < kept[1] / 3
    assert _largest_error(*(jax.jit(jax.grad(loss(m)))(params) for m in models)) < 0.3


def _largest_error(got, want):
    """Errors of leaves, relative to the largest leaf: the gradients of keys' biases are zero."""
    got, want = (list(map(np.asarray, jax.tree.leaves(tree))) for tree in (got, want))
    scale = max(map(np.linalg.norm, want))
    return max(np.linalg.norm(a - b) for a, b in zip(got, want, strict=True)) / scale


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x / (1 + jnp.exp(-jnp.clip(x, -20, 20))),
        lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
        lambda x: x / (jnp.abs(x) + 1e-6),
        lambda x: jnp.sqrt(x * x + 1e-12) * jnp.log(1e-9 + x * x),
        lambda x: jax.nn.softplus(x) * jax.nn.gelu(x, approximate=False),
        lambda x: jax.nn.log_softmax(x) * jnp.tanh(1 / (x * x + 1e-8)),
    ],
)
def test_finite_values_give_finite_gradients(f):
    """Values of very unequal sizes in a group, of which some are decoded to zero."""
    w, x = np.eye(256, dtype=np.float32), np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32) ** 5

    of = lambda g: lambda w, x: jax.grad(lambda w: jnp.sum(g(x @ w) ** 2))(w)
    gradients = jax.jit(lambda w, x: [of(g)(w, x) for g in (f, compressed(f, bits=8), compressed(f, bits=3))])
    assert np.isfinite(gradients(w, x)).all()
