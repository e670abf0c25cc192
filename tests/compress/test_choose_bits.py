"""`choose_bits`: the choice beside all choices, and errors of gradients with the bits that were chosen."""

import itertools

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


@pytest.mark.smoke
def test_few_bits_beside_all_choices():
    """Never more error than allowed; of the savings of the best choice at least 90% on average, and all but a step always."""
    random = np.random.default_rng(0)
    shares = []
    for _ in range(200):
        squares, sizes = 10 ** random.uniform(-6, -3, 4), random.uniform(0.5, 2, 4)
        most = sum(squares) * 10 ** random.uniform(0, 3)
        bits = fewest_bits(squares, sizes, most)
        assert _square(squares, bits) <= most * (1 + 1e-9)
        saved = lambda bits, sizes=sizes: float(np.dot(sizes, 8 - np.array(bits)))
        allowed = [c for c in itertools.product(BITS, repeat=4) if _square(squares, c) <= most]
        best = max(map(saved, allowed))
        assert best - saved(bits) <= 5 * max(sizes)
        shares.append(saved(bits) / best if best else 1)
    assert np.mean(shares) > 0.9
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

        return jax.grad(loss)(weights)

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


def test_refuses():
    with pytest.raises(ValueError, match="parts must be an integer of at least 1, got 0"):
        choose_bits(lambda codecs: (), 0, 0.01)
    with pytest.raises(ValueError, match="sigma must be a positive finite number, got -1"):
        choose_bits(lambda codecs: (), 1, -1)
    with pytest.raises(ValueError, match="sizes must be 2 positive numbers, one for each part, got"):
        choose_bits(lambda codecs: (), 2, 0.01, sizes=[1.0])
