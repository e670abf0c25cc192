"""Parameters are exact: whatever is done to them before they meet an activation is not encoded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from memjax import compressed
from memjax.compress import Cast, ErrorBounded
from tests.compress.codecs.round_trip import normal
from tests.compress.kept import kept_bytes
from tests.compress.networks import EXACT


def test_parameters_integers_and_small_arrays_are_left_alone():
    w, x, labels = normal(128, 128), jnp.asarray(normal(40, 128, seed=1)), np.arange(5000, dtype=np.int32) % 128

    def f(w, x):
        return jnp.tanh(x @ w.astype(jnp.bfloat16).astype(jnp.float32))[np.arange(5000, dtype=np.int32) % 40, labels]

    wrapped = compressed(f, ErrorBounded(0.5, bits_per_value=28))
    # tanh's derivative is all that is encoded: the arguments, cast weights and indices are exact. Not under jit, where
    # the compiler may leave out roundings to bfloat16.
    by_w = lambda f: jax.grad(lambda w: jnp.sum(f(w, x)))(w)
    np.testing.assert_allclose(by_w(compressed(f, EXACT)), by_w(f), rtol=1e-5, atol=1e-6)
    by_x = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(f(w, x))))(x[:8])
    np.testing.assert_allclose(by_x(wrapped), by_x(f), rtol=1e-5, atol=1e-6)


class TestParameters:
    """Whatever is done to parameters before they meet an activation, a code that is off by half leaves dx exact."""

    @staticmethod
    def check(f, w, x, **options):
        """f(w, x), linear in x, saves w alone for dx."""
        off = ErrorBounded(0.5, bits_per_value=12)
        by_x = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(f(w, x)))))(x)
        np.testing.assert_allclose(by_x(compressed(f, off, **options)), by_x(f), rtol=1e-4, atol=1e-5)

    w, x = jnp.asarray(normal(4, 64, 128)), jnp.asarray(normal(96, 64, seed=1))

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


def test_what_follows_from_integers_and_parameters_is_an_activation():
    """Tokens are no parameter, though they last: what layers make of them is encoded."""
    params, tokens, scale = normal(3, 128, 128) / 8, np.arange(2048, dtype=np.int32) % 128, np.ones(128, np.float32)

    def f(params, tokens, scale):
        h = params[0][tokens]
        for w in params[1:]:
            h = jnp.tanh(jnp.tanh(h) @ w)
        return jnp.sum(h * scale)

    kept = [kept_bytes(g, params, tokens, scale) for g in (f, compressed(f, inputs="scale"))]
    assert kept[1] < kept[0] / 3
