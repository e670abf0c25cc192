"""`choose_bits`: the choice beside all choices, and errors of gradients with the bits that were chosen."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from memjax.compress import choose_bits
from memjax.compress._training.choose_bits import fewest_bits

BITS = (8, 6, 4, 3)


def _square(squares, bits):
    return sum(s * (255 / (2**b - 1)) ** 2 for s, b in zip(squares, bits, strict=True))


def test_few_bits_are_the_best_of_all_choices():
    random = np.random.default_rng(0)
    for _ in range(200):
        squares, sizes = 10 ** random.uniform(-6, -3, 4), random.uniform(0.5, 2, 4)
        most = sum(squares) * 10 ** random.uniform(0, 3)
        bits = fewest_bits(squares, sizes, most)
        assert _square(squares, bits) <= most * (1 + 1e-9)
        allowed = [c for c in itertools.product(BITS, repeat=4) if _square(squares, c) <= most]
        assert np.dot(sizes, bits) == pytest.approx(min(np.dot(sizes, c) for c in allowed))
    many = fewest_bits(squares := 10 ** random.uniform(-6, -3, 40), random.uniform(0.5, 2, 40), 30 * sum(squares))
    assert _square(squares, many) == pytest.approx(30 * sum(squares), rel=0.05)
    assert fewest_bits([1e-9] * 3, [1] * 3, 1.0) == (3, 3, 3)
    assert fewest_bits([1.0] * 3, [1] * 3, 1e-3) == (8, 8, 8)


def _layers():
    keys = jax.random.split(jax.random.key(0), 4)
    weights = [jax.random.normal(key, (2, 128, 128)) / 128**0.5 for key in keys[:3]]
    x = jax.random.normal(keys[3], (1024, 128))

    def gradient(wraps):
        layer = lambda w, x: x + jax.nn.silu(x @ w[0]) @ w[1]
        wrapped = [wrap(layer) for wrap in wraps]

        def loss(weights):
            y = x
            for f, w in zip(wrapped, weights, strict=True):
                y = f(w, y)
            return jnp.mean(jnp.tanh(y) ** 2)

        return jax.jit(jax.grad(loss))(weights)

    return gradient


def test_gradients_are_off_by_as_much_as_was_asked_for():
    gradient = _layers()
    exact = gradient([lambda f: f] * 3)
    before = 0
    for sigma in (0.004, 0.03, 0.3):
        by_codecs = lambda codecs: gradient([lambda f, c=c: memjax.compressed(f, c, inputs="x") for c in codecs])
        chosen = choose_bits(by_codecs, 3, sigma)
        assert chosen.sigma <= sigma
        bits = [lambda f, b=b: memjax.compressed(f, bits=b, inputs="x") for b in chosen.bits]
        errors = [jnp.sum((a - b) ** 2) / jnp.sum(b**2) for a, b in zip(gradient(bits), exact, strict=True)]
        assert float(jnp.sqrt(jnp.mean(jnp.array(errors)))) == pytest.approx(chosen.sigma, rel=0.2)
        assert before < 24 - sum(chosen.bits) or before == 0
        before = 24 - sum(chosen.bits)
    assert before > 9  # nearly all have 4 bits or 3


def test_choosing_again_compiles_few_steps():
    """Known bits stay if they do as well; a larger reference allows coarser ones; with five known there are no new ones."""
    gradient = _layers()
    by_codecs = lambda codecs: gradient([lambda f, c=c: memjax.compressed(f, c, inputs="x") for c in codecs])
    own = jax.tree.map(np.asarray, gradient([lambda f: f] * 3))
    choose = lambda **kwargs: choose_bits(by_codecs, 3, 0.03, **kwargs)
    first = choose(reference=own)
    assert choose(known=[first.bits, (8, 8, 8)]).bits == first.bits
    doubled = choose(reference=jax.tree.map(lambda x: 2 * x, own))
    np.testing.assert_allclose(doubled.alone, np.array(first.alone) / 2, rtol=1e-6)
    assert doubled.sigma <= 0.03
    assert sum(doubled.bits) < sum(first.bits)
    coarse = [(3, 3, 3), (4, 3, 3), (3, 4, 3), (3, 3, 4), (4, 4, 3)]
    assert choose(known=coarse).bits == (8, 8, 8)
    assert choose(known=coarse[1:]).bits == first.bits
    with pytest.raises(ValueError, match="known must be tuples of 3 of the numbers"):
        choose(known=[(8, 8)])
    with pytest.raises(ValueError, match="reference must be arrays of the shapes"):
        choose(reference=own[:2])


def test_refuses():
    with pytest.raises(ValueError, match="parts must be an integer of at least 1, got 0"):
        choose_bits(lambda codecs: (), 0, 0.01)
    with pytest.raises(ValueError, match="sigma must be a positive finite number, got -1"):
        choose_bits(lambda codecs: (), 1, -1)
    with pytest.raises(ValueError, match="sizes must be 2 positive numbers, one for each part, got"):
        choose_bits(lambda codecs: (), 2, 0.01, sizes=[1.0])
    with pytest.raises(TypeError, match="known must be tuples of 1 of the numbers"):
        choose_bits(lambda codecs: (), 1, 0.01, known=None)
    with pytest.raises(ValueError, match="known must be tuples of 1 of the numbers"):
        choose_bits(lambda codecs: (), 1, 0.01, known=((8.0,),))
    with pytest.raises(ValueError, match="reference must be arrays that are not all zero"):
        choose_bits(lambda codecs: [jnp.ones(3)], 1, 0.01, reference=[jnp.zeros(3)])
    with pytest.raises(ValueError, match="sizes must be 1 positive numbers"):
        choose_bits(lambda codecs: (), 1, 0.01, sizes=3)
    with pytest.raises(ValueError, match="gradient must return floating-point arrays, got none"):
        choose_bits(lambda codecs: None, 1, 0.01)


def test_refuses_a_gradient_that_codecs_do_not_reach():
    w, x = jnp.eye(64), jax.random.normal(jax.random.key(0), (1024, 64))
    layer = lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w)
    wrapped = lambda codec, x: jax.grad(lambda w: jnp.mean(memjax.compressed(layer, codec)(w, x) ** 2))(w)
    both = lambda codecs: (wrapped(codecs[0], x), wrapped(codecs[1], x))
    assert len(choose_bits(both, 2, 0.01).bits) == 2
    # A gradient of zero is reached all the same.
    assert choose_bits(lambda codecs: 0 * wrapped(codecs[0], x), 1, 0.01).alone == (0.0,)
    for ignores, parts, which in (
        (lambda codecs: wrapped(codecs[0], x), 2, "[1] of 2"),
        (lambda codecs: jax.grad(lambda w: layer(w, x).sum())(w), 2, "[0, 1] of 2"),
        (lambda codecs: wrapped(codecs[0], x[:16]), 1, "[0] of 1"),  # arrays that are too small to be encoded
    ):
        with pytest.raises(
            ValueError, match=re.escape(f"gradient must use the codec of each part, got one that codecs{which}")
        ):
            choose_bits(ignores, parts, 0.01)
    with pytest.raises(TypeError, match=r"gradient must take 1 codecs.* raises IndexError"):
        choose_bits(both, 1, 0.01)
    with pytest.raises(ValueError, match="gradient must be one that gives finite gradients"):
        choose_bits(lambda codecs: wrapped(codecs[0], x * jnp.nan), 1, 0.01)
    with pytest.raises(ValueError, match="reference must be finite arrays"):
        choose_bits(lambda codecs: wrapped(codecs[0], x), 1, 0.01, reference=w * jnp.nan)
