"""bfloat16 weights without masters: neighbours, no bias, small updates are not lost, the same on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from memjax import compress
from memjax.compress._state.stochastic_round import _rounded


@pytest.fixture(autouse=True)
def standard_promotion():
    """optax mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def run(tx, weights, gradient, steps):
    def step(carry, _):
        weights, state = carry
        updates, state = tx.update(gradient, state, weights)
        return (optax.apply_updates(weights, updates), state), None

    return jax.jit(lambda w: jax.lax.scan(step, (w, tx.init(w)), length=steps)[0][0])(weights)


def test_small_updates_are_not_lost():
    weights, gradient = (
        {"a": jnp.ones((64, 64), jnp.bfloat16), "norm": jnp.ones(4)},
        {"a": jnp.ones((64, 64)), "norm": jnp.ones(4)},
    )
    gradient["a"] = gradient["a"].astype(jnp.bfloat16)
    sgd = optax.sgd(2.0**-14)  # neighbours of 1 are 2^-7 above and 2^-8 below
    np.testing.assert_array_equal(run(sgd, weights, gradient, 256)["a"], weights["a"])  # what happens without
    found = run(compress.stochastic_round(sgd), weights, gradient, 256)
    moved = 1 - np.asarray(found["a"], np.float32)
    assert np.all(moved >= 0)
    # 256 steps up or down by 2^-8, with a chance of 2^-6.
    deviation = 2.0**-8 * (256 * 2.0**-6) ** 0.5 / 64
    assert abs(np.mean(moved) - 2.0**-6) < 4 * deviation
    assert 0.8 < np.std(moved) / (64 * deviation) < 1.2
    np.testing.assert_allclose(found["norm"], 1 - 2.0**-6, rtol=1e-5)


def test_weights_become_neighbours_and_stay_finite():
    x = jnp.asarray([1.0, -1.003, 3.38e38, -3.38e38, jnp.inf, 0.0, -0.0, 1e-39, jnp.nan])
    for noise in (0, 0x7FFFFFFF, 0xFFFFFFFF):
        bits = _rounded(x, jnp.full(x.shape, noise, jnp.uint32))
        found = np.asarray(jax.lax.bitcast_convert_type(bits, jnp.bfloat16), np.float32)
        assert np.all(np.isfinite(found[:4]))
        assert found[1] in (-1.0, -1.0078125)
        np.testing.assert_array_equal(found[4:7], [np.inf, 0, 0])
        assert np.isnan(found[8])
    assert found[1] == -1.0078125


def test_it_is_the_same_on_a_mesh():
    weights = jax.random.normal(jax.random.key(0), (64, 128)).astype(jnp.bfloat16)
    gradient = jax.random.normal(jax.random.key(1), weights.shape).astype(jnp.bfloat16)
    tx = compress.stochastic_round(optax.adamw(1e-3))
    step = jax.jit(lambda w, s: tx.update(gradient, s, w))
    alone = optax.apply_updates(weights, step(weights, tx.init(weights))[0])
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P("a") if x.ndim else P()))
    sharded = put(weights)
    updates, _ = step(sharded, jax.tree.map(put, tx.init(weights)))
    np.testing.assert_array_equal(optax.apply_updates(sharded, updates), alone)
    assert jnp.mean(alone != weights) > 0.05


def test_errors_say_what_to_do():
    tx = compress.stochastic_round(optax.sgd(0.1))
    with pytest.raises(ValueError, match="some are bfloat16"):
        tx.init(jnp.ones(3))
    weights = jnp.ones(3, jnp.bfloat16)
    with pytest.raises(ValueError, match="params must be given"):
        tx.update(weights, tx.init(weights))
    with pytest.raises(TypeError, match="state must be a StochasticRoundState"):
        tx.update(weights, (), weights)
