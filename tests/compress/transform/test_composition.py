"""`compressed` under and around JAX's transforms."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import memjax
from memjax import compressed
from memjax.compress import ErrorBounded
from memjax.remat import DenseSpec, dense_block
from tests.compress.codecs.round_trip import normal
from tests.compress.networks import EXACT, conv, errors, images, parameters
from tests.remat.dense.dense_cases import random_block


class TestComposition:
    """Gradients with the exact codec agree with those without it, and gradients with ErrorBounded are near."""

    @staticmethod
    def same(with_codec, args, rounding=0.02):
        want = jax.device_get(jax.jit(with_codec(lambda f: f))(*args))
        got = jax.device_get(jax.jit(with_codec(lambda f: compressed(f, EXACT, inputs=True)))(*args))
        chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-7)
        rounded = jax.jit(with_codec(lambda f: compressed(f, ErrorBounded(2**-10, bits_per_value=28), inputs=True)))(
            *args
        )
        assert 0 < max(errors(rounded, want)) < rounding

    def test_checkpoint(self):
        def loss(wrap):
            inner = lambda w, x: jax.nn.relu(conv(x, w))
            inside = jax.checkpoint(wrap(inner))
            around = wrap(jax.checkpoint(inner))
            return jax.grad(lambda w, x: jnp.mean(around(w, jnp.sin(inside(w, x)))))

        self.same(loss, (parameters(1)[0]["w"], images()))

    @pytest.mark.parametrize("scan", [lax.scan, functools.partial(memjax.remat.scan, budget="256KiB")])
    def test_scan(self, scan):
        def loss(wrap):
            def run(w, h, xs):
                cell = wrap(lambda h, x: jnp.tanh(h @ w) + x)
                return jnp.mean(scan(lambda h, x: (cell(h, x), None), h, xs)[0] ** 2)

            return jax.grad(run, argnums=(0, 1, 2))

        self.same(loss, (normal(64, 64) / 16, normal(64, 64, seed=1), normal(6, 64, 64, seed=2)))

    def test_scan_inside(self):
        def loss(wrap):
            run = wrap(lambda w, h: lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, None, 4)[0])
            return jax.grad(lambda w, h: jnp.mean(run(w, h) ** 2))

        self.same(loss, (normal(64, 64) / 16, normal(64, 64, seed=1)))

    def test_dense_block(self):
        spec = DenseSpec(16, 8, 2)
        params, running, x, _ = random_block(spec, (2, 16, 16), seed=0)

        def loss(wrap):
            block = wrap(lambda params, x: dense_block(spec, params, running, x)[0])
            return jax.grad(lambda params, x: jnp.mean(jnp.sin(block(params, jnp.tanh(x)))))

        self.same(loss, (params, x), rounding=0.2)

    def test_closed_over_arrays_and_auxiliary_integers(self):
        def loss(wrap):
            def run(w, x):
                f = wrap(lambda x, n: {"y": jnp.tanh(conv(jnp.sin(x), w)), "n": n + 1, "x": x})
                out = f(x, jnp.int32(2))
                return jnp.mean(out["y"] * out["n"].astype(jnp.float32) + out["x"])

            return jax.grad(run, argnums=(0, 1))

        self.same(loss, (parameters(1)[0]["w"], images()))
