"""What `explain` says of functions that are wrapped by `memjax.compressed`: why each array is kept, in how many bits, or not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from tests.compress import transformer_layers as transformer


@functools.cache
def explained(bits, scanned):
    layer = memjax.compressed(transformer.with_rule, bits=bits, inputs=1)

    def unrolled_loss(params, x):
        return jnp.mean(layer(params, x) ** 2)

    def scanned_loss(params, x):
        return jnp.mean(jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0] ** 2)

    params = transformer.parameters()
    params = jax.tree.map(lambda one: np.stack([one, one]), params) if scanned else params
    return memjax.explain(scanned_loss if scanned else unrolled_loss, params, transformer.inputs())


@pytest.mark.parametrize(("bits", "of_sources", "scanned"), [(8, 8, False), (4, 5, False), (8, 8, True)])
def test_rows_say_why_and_in_how_many_bits(bits, of_sources, scanned):
    """Of sources: of what other arrays are computed from."""
    found = explained(bits, scanned)
    codes = [row for row in found.rows if row.dtype == "uint8"]
    assert any(row.why.startswith(f"{of_sources} bits, PositionQuantized") for row in codes)
    assert all("bits, " in row.why for row in codes)
    exact = [row.why for row in found.rows if row.dtype == "float32" and np.prod(row.shape) >= 4096]
    if bits == 8:
        assert any("agree with other values" in why for why in exact)  # queries and keys, with their log-sum-exp
        assert any("subtracted from another" in why for why in exact)  # values and outputs
    assert not any(remedy.kind == "8 bits" for row in found.rows if row.why for remedy in row.remedies)
    assert sum(row.bytes for row in found.rows) == found.residual_bytes


def test_what_is_not_kept_is_told_with_what_it_follows_from():
    found = explained(8, False)
    hidden = f"float32[{','.join(map(str, (*transformer.TOKENS, transformer.HIDDEN)))}]"
    silu = [text for text in found.dropped if text.startswith(f"{hidden} of logistic")]
    assert len(silu) == 1
    assert "dot_general, decoded" in silu[0]
    assert f"not kept: {silu[0]}" in str(found)
    assert "why" in str(found)
    assert type(found).from_json(found.to_json()) == found


def test_where_nothing_is_encoded_a_note_says_so():
    small = memjax.compressed(lambda x: jnp.sin(x) * 2)
    found = memjax.explain(lambda x: jnp.sum(small(x)), jnp.ones(100))
    assert any("encodes nothing" in note for note in found.notes)
    assert not any("encodes nothing" in note for note in explained(8, False).notes)


def test_gradients_and_programs_outside_are_as_before():
    loss = lambda x: jnp.sum(memjax.compressed(jnp.tanh, inputs=True)(x))
    x = jnp.linspace(-1, 1, 8192)
    before = str(jax.make_jaxpr(jax.grad(loss))(x))
    memjax.explain(loss, x)
    assert str(jax.make_jaxpr(jax.grad(loss))(x)) == before
