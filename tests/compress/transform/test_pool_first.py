"""ReLUs that come before max-pooling are made after it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from memjax import compressed
from memjax._core.compat import scope
from memjax._core.program.jaxpr import calls_in_place
from memjax.compress import Cast
from memjax.compress._transform.max_pool import evaluate_pools_first, max_pool
from tests.compress.codecs.round_trip import normal


def pool(x, size=3, stride=2, padding=(1, 1), **dilation):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, size), (1, stride), ((0, 0), padding), **dilation)


@jax.custom_jvp
def straight_through(x):
    return jnp.maximum(x, 0)


straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), *tangents))


@jax.custom_jvp
def underivable(x):
    return jnp.round(x)


@underivable.defjvp
def _(primals, tangents):
    pytest.fail("nobody differentiates it")


def relu_then_pool(x, pool=pool):
    return jnp.sin(pool(jax.nn.relu(jnp.cos(x))))


def indexed_pool(x):
    """Its gradients of NaNs are where these are; those of JAX's are not."""
    shape = {"window_dimensions": (1, 3), "window_strides": (1, 2), "padding": ((0, 0), (1, 1))}
    return max_pool(x, **shape, base_dilation=(1, 1), window_dilation=(1, 1))


def sizes_of_relus(f, x):
    """The sizes of the arrays that a ReLU is applied to."""
    moved = jax.make_jaxpr(evaluated(jax.make_jaxpr(f)(x)))(x)
    return [eqn.invars[0].aval.size for eqn in moved.eqns if eqn.primitive.name == "custom_jvp_call"]


def evaluated(flat, **replace):
    return lambda x: evaluate_pools_first(calls_in_place(flat, differentiable=True), [x], replace=replace)[0]


X = jnp.asarray(np.round(4 * normal(3, 17)) / 4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_and_gradients_are_the_same(dtype):
    x = np.array(X)
    x[0], x[1, 5], x[2, 3:9] = np.pi, np.nan, np.pi / 2
    x = x.astype(dtype)
    moved = evaluated(
        jax.make_jaxpr(relu_then_pool)(x), reduce_window_max=lambda eqn, values: [max_pool(*values, **eqn.params)]
    )

    @functools.partial(jax.jit, static_argnums=0)
    def both(f, x):
        out, pullback = jax.vjp(f, x)
        return out, *pullback(jnp.arange(1, out.size + 1, dtype=dtype).reshape(out.shape))

    for a, b in zip(both(functools.partial(relu_then_pool, pool=indexed_pool), x), both(moved, x), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_relus_are_of_what_was_pooled():
    assert sizes_of_relus(relu_then_pool, X) == [3 * 9]


def test_names_stay_and_equations_without_outputs_run():
    seen = []

    def f(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x[0, 0])
        with jax.named_scope("act"):
            x = jax.nn.relu(jnp.sin(x))
        with jax.named_scope("pool"):
            return jnp.sin(pool(x))

    def names(f):
        kinds = ("custom_jvp_call", "reduce_window_max")
        return [scope(eqn) for eqn in jax.make_jaxpr(f)(X).eqns if eqn.primitive.name in kinds]

    assert names(f) == ["act", "pool"]
    assert names(evaluated(jax.make_jaxpr(f)(X))) == ["pool", "act"]
    plain, own = (jax.jit(jax.grad(lambda x, f=f: jnp.sum(f(x))))(X) for f in (f, compressed(f, Cast(jnp.float32))))
    jax.effects_barrier()
    np.testing.assert_allclose(plain, own, rtol=1e-6)
    assert seen == [float(X[0, 0])] * 2


@pytest.mark.parametrize(
    "f",
    [
        lambda x: pool(straight_through(x)),
        lambda x: pool(relu := jax.nn.relu(x)) + relu[:, ::2],
        lambda x: (relu := jax.nn.relu(x)) + pool(relu, 1, 1, (0, 0)),
        lambda x: pool(jax.nn.relu(x), 1, 2, (1, 0)),  # the first window is all padding
        lambda x: pool(jax.nn.relu(x), 2, 2, (0, 3)),
        # The only window is between what there is, and beside it.
        lambda x: pool(jax.nn.relu(x[:, :4]), 1, 1, (-1, -5), base_dilation=(1, 2)),
        lambda x: pool(jax.nn.relu(x[:, :3]), 2, 1, (1, 6), window_dilation=(1, 9)),
        lambda x: pool(jax.nn.relu(x[:, :0]), 2, 1, (1, 1)),
        lambda x: pool(jax.nn.relu6(x)),
        lambda x: pool(underivable(x)),
        lambda x: jnp.cumsum(jax.nn.relu(x)),
        lambda x: jax.nn.relu(x),
    ],
)
def test_others_stay_where_they_are(f):
    flat = jax.make_jaxpr(f)(X)
    before = [eqn.invars[0].aval.size for eqn in flat.eqns if eqn.primitive.name == "custom_jvp_call"]
    assert sizes_of_relus(f, X) == before
    chex.assert_trees_all_equal(jax.jit(evaluated(flat))(X), jax.jit(f)(X))
