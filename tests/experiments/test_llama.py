"""The Llama decoder: every recipe's gradients against a plain model in float64, its bytes, and compressed layer inputs."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from experiments.context import measure
from experiments.models import llama
from experiments.models.recipe import parse
from experiments.models.stack import codec

SMALL = llama.LlamaConfig(24, 16, 3, 4, 2, 4, 24, tied=True, dtype="float64", rope_base=100.0)
# Each way to keep and each way to cut, in pairs. Slots are in the last, and without `keep_attention` in the ring.
EXACT = [
    "tiled+plain",
    "groups=1+checkpoint",
    "tiled=5+groups=2+budget=min",
    "tiled=5+groups+slots=2+keep_attention",
]


def tokens(length=13, examples=2):
    text = np.random.default_rng(1).integers(SMALL.vocabulary, size=(examples, length + 1), dtype=np.int32)
    return text[:, :-1], text[:, 1:]


def plain(config, params, tokens, labels):
    """The same decoder in a few lines, with all attention and all logits."""
    x, where = params["embed"][tokens], jnp.arange(tokens.shape[1])
    norm = lambda x, scale: x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    half = config.head_dim // 2
    turn = jnp.exp(1j * where[:, None] * config.rope_base ** (-jnp.arange(half) / half))[:, None]
    for i in range(config.layers):
        p = jax.tree.map(lambda a, i=i: a[i], params["layers"])
        h = norm(x, p["attention_norm"])
        q, k, v = (jnp.tensordot(h, p[name], 1) for name in ("query", "key", "value"))
        pairs = lambda a: (a[..., :half] + 1j * a[..., half:]) * turn
        q, k = (jnp.concatenate([pairs(a).real, pairs(a).imag], -1) for a in (q, k))
        k, v = (jnp.repeat(a, config.heads // config.kv_heads, 2) for a in (k, v))
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(config.head_dim)
        weights = jax.nn.softmax(jnp.where(where[:, None] >= where, logits, -jnp.inf), -1)
        x = x + jnp.tensordot(jnp.einsum("bnts,bsnh->btnh", weights, v), p["out"], 2)
        h = norm(x, p["mlp_norm"])
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    logits = norm(x, params["norm"]) @ params.get("head", params["embed"]).T
    return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


@functools.cache
def expected(tied, length=13):
    config = dataclasses.replace(SMALL, tied=tied)
    params = jax.device_get(jax.jit(functools.partial(llama.init, config))(jax.random.key(0)))
    params = jax.tree.map(lambda a: a + 0.1 * np.sin(np.arange(a.size, dtype=a.dtype)).reshape(a.shape), params)
    return config, params, jax.jit(jax.value_and_grad(functools.partial(plain, config)))(params, *tokens(length))


def assert_close(found, wanted):
    found, wanted = jax.device_get((found, wanted))
    chex.assert_trees_all_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("recipe", EXACT)
def test_every_recipe_has_the_plain_gradients(x64, recipe):
    with jax.numpy_dtype_promotion("standard"):
        config, params, wanted = expected(True)
    found = jax.jit(jax.value_and_grad(functools.partial(llama.loss, config, parse(recipe))))(params, *tokens())
    assert_close(found, wanted)


def test_a_ring_has_the_plain_gradients(x64):
    """The sequence in zigzag order over four devices, which hold a quarter of the parameters each; the head is untied."""
    with jax.numpy_dtype_promotion("standard"):
        config, params, wanted = expected(False, length=16)
    inputs, labels = map(jnp.asarray, tokens(length=16))
    mesh = jax.make_mesh((4,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    parts, sequence = llama.shards(params, "ring"), jax.P(None, "ring")
    loss = jax.shard_map(
        functools.partial(llama.loss, config, parse("tiled=3+groups+slots=2"), axis_name="ring"),
        mesh=mesh,
        in_specs=(parts, sequence, sequence),
        out_specs=jax.P(),
    )
    found = jax.jit(jax.value_and_grad(loss))(params, *(memjax.shard.zigzag(a, 4) for a in (inputs, labels)))
    assert_close(found, wanted)


def test_low_precision_is_as_good_as_that_of_the_plain_recipe():
    """With as many groups as heads: sums over groups would be rounded."""
    wide = llama.LlamaConfig(64, 128, 3, 8, 8, 16, 256, tied=True, dtype="float64")
    config = dataclasses.replace(wide, dtype="bfloat16")
    text = np.random.default_rng(1).integers(wide.vocabulary, size=(4, 65), dtype=np.int32)
    params = jax.jit(functools.partial(llama.init, config))(jax.random.key(0))
    gradient = lambda config, recipe: jax.jit(
        jax.grad(lambda params: llama.loss(config, parse(recipe), params, text[:, :-1], text[:, 1:]))
    )
    with jax.enable_x64(True):
        exact = jax.device_get(
            gradient(wide, "plain")(jax.tree.map(lambda a: a.astype(np.float64), jax.device_get(params)))
        )

    def error(recipe):
        found = jax.device_get(gradient(config, recipe)(params))
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
        squares = [(((a.astype(np.float64) - b) ** 2).sum(), (b**2).sum()) for a, b in pairs]
        return float(sum(e for e, _ in squares) / sum(s for _, s in squares)) ** 0.5

    assert error("tiled=16+groups+slots=2") <= 1.1 * error("plain") < 0.03


TINY = dataclasses.replace(llama.SHAPES["tiny"], dtype="float32", layers=4)


@functools.cache
def tiny_params():
    return jax.jit(functools.partial(llama.init, TINY))(jax.random.key(0))


def test_bytes_per_token_are_those_of_the_formula(monkeypatch):
    """What does not grow with the length, such as gradients of parameters, is no part of them, nor is attention's own work."""
    monkeypatch.setattr(llama, "_ROWS", 1)
    few, many = (
        measure.Gradient(TINY, parse("tiled=32+groups+bits=4"), length, quick=True).bytes.temp for length in (512, 1024)
    )
    assert (many - few) / 512 <= 1.1 * parse("tiled=32+groups+bits=4").bytes_per_token(TINY)


def test_a_ring_takes_the_same_steps():
    """Devices hold parts of the text in zigzag order. Loss and norm of the gradient are those of one device."""
    recipe, text = parse("tiled=16+groups+checkpoint"), np.arange(64).astype(np.uint8)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("ring",))
    shared = jax.device_put(tiny_params(), measure.params_at(TINY, mesh))
    _, *found = measure.Gradient(TINY, recipe, 64, mesh=mesh).step(shared, text)
    _, *expected = measure.Gradient(TINY, recipe, 64).step(tiny_params(), text)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_the_error_of_compressed_inputs_is_predicted():
    """Where positions contribute to the gradient independently, as those of random text do; elsewhere it is less."""
    random = np.random.default_rng(0).integers(256, size=200).astype(np.uint8)
    params = tiny_params()
    found = measure.gradient_error(TINY, parse("bits=4"), params, random, 128)
    assert found["measured"] == pytest.approx(found["at_most"], rel=0.25)
    assert 0.1 / 2**4 < found["at_most"] < 6 / 2**4


def test_the_error_of_compressed_slots_shrinks_with_their_bits():
    """By as much as levels are closer, 17 times; it has no prediction."""
    random = np.random.default_rng(0).integers(256, size=200).astype(np.uint8)
    params = tiny_params()
    fine, coarse = (measure.gradient_error(TINY, parse(f"slots=2+bits={bits}"), params, random, 128) for bits in (8, 4))
    assert fine["at_most"] is None
    assert coarse["measured"] == pytest.approx(17 * fine["measured"], rel=0.25)
    assert fine["measured"] < 0.03


def test_compressed_inputs_leave_the_loss_alone_and_rounding_is_unbiased():
    rng = np.random.default_rng(1)
    text = rng.integers(256, size=(1, 65), dtype=np.int32)
    of_recipe = lambda recipe: jax.jit(functools.partial(llama.loss, TINY, parse(recipe)))
    plain, *coded = (
        of_recipe(r)(tiny_params(), text[:, :-1], text[:, 1:]) for r in ("plain", "bits=4", "slots=2+bits=4")
    )
    np.testing.assert_allclose(coded, 2 * [plain], rtol=1e-6)
    x = (rng.normal(size=(1, 40, 512)) * np.exp(np.arange(40.0) / 4)[:, None]).astype(np.float32)
    coder = codec(parse("bits=4"), 512)
    decoded = lambda x, seed: (c := dataclasses.replace(coder, seed=seed)).decode(c.encode(x))
    draws = np.asarray(jax.jit(lambda x: jax.lax.map(lambda seed: decoded(x, seed), jnp.arange(400)))(x))
    step = (x.max(-1, keepdims=True) - x.min(-1, keepdims=True)) / 15
    assert np.abs(draws - x).max() <= 1.001 * step.max()
    assert np.abs((draws.mean(0) - x) / step).max() < 5 / 400**0.5  # five standard deviations, of at most a step


def test_recipes_are_read_and_written():
    for text in (
        "plain",
        "tiled+groups+slots=6",
        "tiled=64+groups=2+budget=12GiB",
        "groups+bits=4",
        "groups+plain+keep_attention",
        "tiled+groups+slots=8+bits=4",
        "offload",
    ):
        assert str(parse(text)) == text
    assert str(parse("groups+keep_attention")) == "groups+plain+keep_attention"
    assert parse("slots=6+tiled") == parse("tiled+slots=6")
    assert parse("bits=8+slots=6") == parse("slots=6+bits=8")
    assert parse("checkpoint").bytes_per_token(llama.SHAPES["8B"]) == 1024 * (256 + 32 + 112)
    assert parse("tiled+groups+slots=6").bytes_per_token(llama.SHAPES["8B"]) == 1024 * (48 + 16 + 12 + 5)


@pytest.mark.parametrize(
    "text", ["", "slots", "slots=0", "slots=2+checkpoint", "bits=5", "bits=8+checkpoint", "tiled=x", "tile", "groups="]
)
def test_what_is_no_recipe_is_refused(text):
    with pytest.raises(ValueError, match="a recipe must"):
        parse(text)
    with pytest.raises(ValueError, match="keep_attention must come with groups"):
        parse("keep_attention")


@pytest.mark.parametrize(("fixed", "slope", "bend"), [(1000, 3, 0.0), (0, 5, 0.002), (900, 2, -0.0001)])
def test_the_longest_length_is_found_in_few_steps(fixed, slope, bend):
    tried = []

    def bytes_of(length):
        tried.append(length)
        return int(fixed + slope * length + bend * length**2)

    found = measure.longest(bytes_of, 10_000, fixed=fixed, unit=16, first=64, last=100_000)
    after = found + max(16, found // 16) + 16
    assert bytes_of(found) <= 10_000 < bytes_of(after)
    assert found % 16 == 0
    assert len(tried) <= 10
    assert measure.longest(bytes_of, 10_000, fixed=fixed, unit=16, first=64, last=128) == 128
    assert measure.longest(bytes_of, fixed + 10, fixed=fixed, unit=16, first=64, last=128) == 0
