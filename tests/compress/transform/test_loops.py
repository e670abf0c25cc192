"""Loops inside of a compressed function encode in each turn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import memjax
from memjax import compressed
from memjax.compress import ErrorBounded
from tests.compress.codecs.round_trip import normal
from tests.compress.kept import kept_bytes
from tests.compress.networks import EXACT, errors

WS, X = np.float32(0.05) * normal(16, 128, 128), normal(512, 128, seed=1)


def layers(wrap):
    cell = wrap(lambda w, x: jnp.tanh(x @ w))
    return lambda ws, x: lax.scan(lambda x, w: (cell(w, x), None), x, ws)[0]


def loss_of(f):
    return lambda ws, x: jnp.mean(f(ws, x) ** 2)


def test_no_more_memory_than_with_the_body_compressed():
    found = {}
    for name, f in {"outside": compressed(layers(lambda f: f)), "inside": layers(compressed)}.items():
        found[name] = memjax.measure(jax.grad(loss_of(f)), WS, X).temp_bytes, kept_bytes(loss_of(f), WS, X)
    assert all(out <= within for out, within in zip(found["outside"], found["inside"], strict=True))
    # Two codes a turn, of what is carried and of tanh; weights are not stacked again. The last sum of squares reads the output.
    assert found["outside"][1] < 2.3 * WS.shape[0] * X.size + 4 * X.size


def _outputs_and_integers(w, x):
    def turn(x, each):
        i, w = each
        return jnp.tanh(x @ w) + i.astype(jnp.float32), jnp.sin(x).sum(1)

    return sum(map(jnp.sum, lax.scan(turn, x, (jnp.arange(4), w), reverse=True)))


def _nested(w, x):
    inner = lambda x, w: lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 2)
    return lax.scan(inner, x, w)[0]


def _remat_and_keys(w, x):
    def turn(carry, w):
        key, x = carry
        key, now = jax.random.split(key)
        return (key, jax.checkpoint(lambda w, x: jnp.tanh(x @ w) + jax.random.normal(now, x.shape))(w, x)), None

    return lax.scan(turn, (jax.random.key(0), jnp.sin(x)), w)[0][1]


@pytest.mark.parametrize("f", [_outputs_and_integers, _nested, _remat_and_keys])
def test_gradients(f):
    gradient = lambda f: jax.jit(jax.grad(loss_of(f), (0, 1)))(WS[:4], X)
    want = gradient(f)
    assert max(errors(gradient(compressed(f, EXACT, inputs=True)), want)) < 1e-5
    bounded = gradient(compressed(f, ErrorBounded(2**-12, bits_per_value=28)))
    assert 0 < max(errors(bounded, want)) < 0.01
