"""`compressed(model)` with nothing chosen: trainings end like plain ones, and gradients are finite whatever activations are."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from memjax import compressed
from tests.compress.codecs.round_trip import normal

STEPS, SEEDS, CLASSES = 30, 3, 4
CHECKED = 5  # last steps, whose mean loss counts
plain = lambda model: model


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9)
        x = nn.relu(norm()(nn.Conv(16, (3, 3), use_bias=False)(x)))
        y = nn.relu(norm()(nn.Conv(16, (3, 3), use_bias=False)(x)))
        x = nn.relu(x + norm(scale_init=nn.initializers.zeros)(nn.Conv(16, (3, 3), use_bias=False)(y)))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
        self.wide, self.narrow = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.narrow(nnx.gelu(self.wide(self.norms[1](x))))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.places = nnx.Embed(32, 32, rngs=rngs), nnx.Embed(32, 32, rngs=rngs)
        self.block = Block(32, rngs)
        self.out = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.places(jnp.arange(tokens.shape[1]))
        return self.out(self.block(x, nnx.make_causal_mask(tokens)))


def resnet():
    """Images of a class have one colour, and noise."""

    def init(key):
        variables = ResNet().init(key, jnp.zeros((1, 16, 16, 3)))
        return variables["params"], variables["batch_stats"]

    def loss(wrap, params, stats, key):
        kinds = jax.random.normal(jax.random.key(0), (CLASSES, 1, 1, 3))
        labels = jax.random.randint(key, (16,), 0, CLASSES)
        images = kinds[labels] + jax.random.normal(jax.random.fold_in(key, 1), (16, 16, 16, 3))
        variables = {"params": params, "batch_stats": stats}
        logits, updates = wrap(ResNet()).apply(variables, images, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updates["batch_stats"]

    return init, loss


def of_nnx(make, loss_of):
    def init(key):
        return nnx.split(make(nnx.Rngs(key)), nnx.Param, ...)[1:]

    def loss(wrap, params, rest, key):
        graph = nnx.split(nnx.eval_shape(lambda: wrap(make(nnx.Rngs(0)))))[0]
        return loss_of(nnx.merge(graph, params, rest), key), rest

    return init, loss


def transformer():
    """Sequences that count up in steps of 1, 3 or 5; some tokens are replaced."""

    def loss(model, key):
        keys = jax.random.split(key, 4)
        start, by = jax.random.randint(keys[0], (8, 1), 0, 32), 1 + 2 * jax.random.randint(keys[1], (8, 1), 0, 3)
        tokens = (start + by * jnp.arange(33)) % 32
        noise = jax.random.randint(keys[2], tokens.shape, 0, 32)
        tokens = jnp.where(jax.random.bernoulli(keys[3], 0.1, tokens.shape), noise, tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
        return losses.mean()

    return of_nnx(Transformer, loss)


def assert_finite(tree):
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("case", [resnet, transformer])
def test_trainings_end_where_plain_ones_do(case):
    init, loss = case()
    optimizer = optax.adam(3e-3)

    def step_of(wrap):
        @jax.jit
        def step(params, rest, state, key):
            of = functools.partial(loss, wrap)
            (value, rest), gradient = jax.value_and_grad(of, has_aux=True)(params, rest, key)
            with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
                changes, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, changes), rest, state, value, gradient

        return step

    steps = {"compressed": step_of(compressed), "plain": step_of(plain)}
    init, start = jax.jit(init), jax.jit(optimizer.init)
    ends, began = {name: [] for name in steps}, []
    for seed in range(SEEDS):
        keys = jax.random.split(jax.random.key(seed + 10), STEPS)
        params, rest = init(jax.random.key(seed))
        first = {name: step(params, rest, start(params), keys[0]) for name, step in steps.items()}
        # The forward pass is the same, batch statistics with it.
        for own, exact in zip(jax.tree.leaves(first["compressed"][1]), jax.tree.leaves(first["plain"][1]), strict=True):
            np.testing.assert_allclose(own, exact, rtol=1e-5, atol=1e-6)
        got, exact = (np.concatenate(list(map(np.ravel, jax.tree.leaves(first[name][4])))) for name in steps)
        # Something was encoded, and little is lost.
        assert 0 < np.linalg.norm(got - exact) < 0.02 * np.linalg.norm(exact)
        for name, step in steps.items():
            state, losses = (params, rest, start(params)), []
            for key in keys:
                *state, value, gradient = step(*state, key)
                losses.append(value)
            assert_finite((state, gradient))
            ends[name].append(np.mean(losses[-CHECKED:]))
            began.append(float(losses[0]))
    less = np.subtract(ends["compressed"], ends["plain"])
    spread = np.std(ends["plain"], ddof=1)
    assert np.mean(ends["plain"]) < 0.8 * np.mean(began)
    assert np.abs(less).max() < spread / 10


SHAPE = (8, 64, 16)  # examples, positions, channels
LARGEST = 1.6e38  # twice it is finite, in bfloat16, too


def times(scale, place):
    def changed(x):
        x[place] *= np.float32(scale)
        return x

    return changed


def constant_channels(x):
    x[:, :, ::3] = 7
    return x


ACTIVATIONS = {
    "channels": times(1000, np.s_[:, :, ::5]),
    "examples": times(1000, np.s_[::3]),
    "positions": times(1000, np.s_[:, ::7]),
    "small channels": times(1e-30, np.s_[:, :, ::5]),
    "constant channels": constant_channels,
    "constant": lambda x: np.full_like(x, -3),
    "zero": np.zeros_like,
    "large": lambda x: x * np.float32(1e30),
    "largest": lambda x: np.where(x < 0, -LARGEST, LARGEST),
}


def gradients_of_all(f, dtype, names):
    """Name, and gradients of compressed(f)(x) and f(x); each compiled once."""
    own, exact = (jax.jit(jax.grad(g, (0, 1))) for g in (compressed(f, inputs="x"), f))
    for name in names:
        x = np.clip(ACTIVATIONS[name](normal(*SHAPE)), -LARGEST, LARGEST).astype(dtype)
        weights = [(normal(16, 16, seed=i) / 4).astype(dtype) for i in range(4)]
        yield name, own(weights, x), exact(weights, x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_finite_whatever_is_encoded(dtype):
    """What is encoded here is `x`, and both channelwise and elementwise functions of it; no gradient overflows."""

    def f(weights, x):
        scale = weights[0][0]
        y = x * scale
        largest = jnp.maximum(jax.lax.stop_gradient(jnp.abs(x).max().astype(jnp.float32)), 1)
        rectified, whole = ((one * scale).astype(jnp.float32) / largest for one in (jax.nn.relu(y), y))
        return jnp.mean(rectified) + jnp.mean(jnp.tanh(whole))

    for name, own, exact in gradients_of_all(f, dtype, ACTIVATIONS):
        assert_finite(exact)
        assert_finite(own)
        for got, want in zip(jax.tree.leaves(own), jax.tree.leaves(exact), strict=True):
            got, want = (np.asarray(one, np.float64) for one in (got, want))
            assert np.linalg.norm(got - want) <= 0.02 * np.linalg.norm(want), name


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_of_normalised_attention_are_finite(dtype):
    """A layer norm, an attention and a ReLU after activations of all scales whose squares are finite."""

    def f(weights, x):
        y = x - x.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + jnp.asarray(1e-5, dtype))
        q, k, v = (y @ w for w in weights[:3])
        y = jax.nn.softmax(q @ k.mT) @ v
        return jnp.mean(jnp.square(jax.nn.relu(y @ weights[3])).astype(jnp.float32))

    names = [name for name in ACTIVATIONS if not name.startswith("larg")]
    for name, own, exact in gradients_of_all(f, dtype, names):
        assert_finite(exact)
        assert np.isfinite([np.asarray(one, np.float32).sum() for one in jax.tree.leaves(own)]).all(), name
