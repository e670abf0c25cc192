"""Attention in groups refuses what treats heads differently, which groups would get wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.remat import attention_in_groups

X = np.linspace(-1, 1, 2 * 6 * 8, dtype=np.float32).reshape(2, 6, 8)
Q, KV, OUT = (
    np.linspace(-1, 2, 64, dtype=np.float32).reshape(shape)[:, :n]
    for shape, n in (((8, 4, 2), 4), ((8, 4, 2), 2), ((4, 2, 8), 2))
)


def attend(change):
    """Attention with `change` of its logits, which are (B, heads, T, T)."""

    def run(q, k, v):
        k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], 2) for a in (k, v))
        logits = change(jnp.einsum("btnh,bsnh->bnts", q, k))
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)

    return run


def in_groups(attend, groups):
    return attention_in_groups(X, Q, KV, KV, OUT, attend=attend, groups=groups)


MIXING = {
    "slopes by number of heads": lambda logits: logits * jnp.arange(logits.shape[1], dtype=logits.dtype)[:, None, None],
    "first slopes of a table": lambda logits: logits * jnp.arange(9, dtype=logits.dtype)[: logits.shape[1], None, None],
    "scale by number of heads": lambda logits: logits / logits.shape[1],
    "talking heads": lambda logits: logits - jnp.mean(logits, 1, keepdims=True),
}


@pytest.mark.parametrize("name", MIXING)
def test_refused(name):
    with pytest.raises(ValueError, match=r"attend must treat heads apart and alike, got .*groups=1"):
        in_groups(attend(MIXING[name]), 2)
    in_groups(attend(MIXING[name]), 1)


def test_a_rotary_that_is_run_for_a_group_and_mixes_heads_is_refused():
    """Its gradients would be of other heads. Where all heads are projected at once, it may mix them."""
    run = lambda **options: attention_in_groups(X, Q, KV, KV, OUT, **options)
    centred = lambda a, positions: a - jnp.mean(a, 2, keepdims=True)
    with pytest.raises(ValueError, match=r"rotary must treat heads apart and alike, got .*over heads.*groups=1"):
        run(rotary=centred, groups=2, keep_attention=True)
    np.testing.assert_allclose(run(rotary=centred, groups=2), run(rotary=centred, groups=1), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="must not mix positions, got norm or rotary"):
        run(norm=lambda x: x - jnp.mean(x, 1, keepdims=True), groups=2)
    with pytest.raises(TypeError, match="positions must be integers or floats"):
        run(positions=np.ones(6, bool))


@pytest.mark.parametrize(
    "attention",
    [
        attend(lambda logits: 20 * jnp.tanh(logits / 20)),
        attend(
            lambda logits: (
                logits + jax.lax.dynamic_slice_in_dim(jnp.zeros((1, *logits.shape[1:-1], 99)), 0, logits.shape[-1], 3)
            )
        ),
        jax.nn.dot_product_attention,
    ],
    ids=["soft cap", "part of zeros", "jax.nn"],
)
def test_accepted(attention):
    np.testing.assert_allclose(in_groups(attention, 2), in_groups(attention, 1), rtol=1e-4, atol=1e-5)
