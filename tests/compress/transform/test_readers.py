"""Which arrays `compressed` decodes without signs: those that only become gradients, by products with cotangents."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from memjax import compressed
from memjax.compress import ErrorBounded


@jax.custom_vjp
def product_with_a_rule_of_its_own(r, w):
    return r @ w


product_with_a_rule_of_its_own.defvjp(
    lambda r, w: (r @ w, (r, w)), lambda kept, ct: (ct @ kept[1].T, jnp.sqrt(jnp.abs(kept[0].T @ ct)))
)

USES = {
    "product": (lambda r, w: r @ w, False),
    "two products": (lambda r, w: r @ w + 2 * (r @ w), False),
    "convolution": (
        lambda r, w: lax.conv_general_dilated(
            r.reshape(1, 8, 8, 64), w.reshape(1, 1, 64, 64), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        False,
    ),
    "product and sine": (lambda r, w: (r @ w).sum() + jnp.sin(r + 1).sum(), True),
    "elementwise product": (lambda r, w: r * w[0, 0], True),
    "square root of a gradient": (product_with_a_rule_of_its_own, True),
    "checkpoint inside": (jax.checkpoint(lambda r, w: jnp.tanh(r @ w)), True),
}


@pytest.mark.parametrize("use", USES)
def test_what_is_only_multiplied_into_gradients_is_decoded_without_signs(use, monkeypatch):
    f, keeps_signs = USES[use]
    decode, seen = ErrorBounded.decode, []

    def noted(self, code):
        seen.append(self.keeps_signs)
        return decode(self, code)

    monkeypatch.setattr(ErrorBounded, "decode", noted)
    x, w = jax.random.normal(jax.random.key(0), (64, 64)), jnp.ones((64, 64))
    wrapped = compressed(lambda x, w: f(jax.nn.relu(x + 1), w).sum(), ErrorBounded(0.1, bits_per_value=28), inputs=0)
    jax.eval_shape(jax.grad(wrapped, (0, 1)), x, w)
    assert seen
    assert any(seen) == keeps_signs
