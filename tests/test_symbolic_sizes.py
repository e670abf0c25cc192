"""`jax.export` with a symbolic batch: what decides by sizes says so."""

import jax
import jax.numpy as jnp
import pytest
from jax import export

import memjax


def layer(w, x):
    return x + jnp.tanh(x @ w)


TRANSFORMS = {
    "planned": lambda: memjax.planned(layer, budget="min"),
    "compressed": lambda: memjax.compressed(layer),
    "remat.chain": lambda: lambda w, x: memjax.remat.chain([layer, layer], [w, w], x, budget="1MiB"),
    "remat.scan": lambda: lambda w, x: memjax.remat.scan(lambda c, _: (layer(w, c), None), x, length=4, slots=2)[0],
    "remat.tiled": lambda: memjax.remat.tiled(layer, (None, 0), 0, tile=16),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_refuse_symbolic_sizes(name):
    (n,) = export.symbolic_shape("n")
    types = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((8 * n, 64), jnp.float32)
    loss = lambda w, x: jnp.mean(TRANSFORMS[name]()(w, x) ** 2)
    if name != "remat.tiled":
        assert export.export(jax.jit(loss))(*types)
    with pytest.raises(ValueError, match=rf"arguments of memjax\.{name} must be arrays of known sizes"):
        export.export(jax.jit(jax.grad(loss)))(*types)
