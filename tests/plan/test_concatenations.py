"""Plans of networks in which a layer reads the features of all layers before it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from memjax._core.program.jaxpr import calls_in_place, evaluate_in, read
from memjax._plan.solve.concatenations import late_concatenations

LAYERS, GROWTH, ROWS = 10, 64, 512
FEATURES = 4 * ROWS * GROWTH * (LAYERS + 1)  # bytes


def weights(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    of = lambda width: jax.device_put(np.asarray(rng.normal(size=(width, GROWTH)) / width**0.5, dtype))
    return [of((i + 1) * GROWTH) for i in range(LAYERS)]


def rows(dtype=jnp.float32):
    return jax.device_put(np.asarray(np.random.default_rng(1).normal(size=(ROWS, GROWTH)), dtype))


def dense_loss(ws, x):
    """Each layer adds its features to a concatenation, in front of it or behind."""
    for i, w in enumerate(ws):
        new = jnp.sin(jnp.tanh(x) @ w)
        x = jnp.concatenate([x, new] if i % 3 else [new, x], -1)
    return jnp.mean(x**2)


def test_features_are_kept_once():
    """Not one concatenation for each place where the program is cut."""
    ws, x = weights(), rows()
    plan = memjax.plan(dense_loss, ws, x, budget="min")
    assert sum(stretch.nbytes for stretch in plan.stretches[:-1]) <= FEATURES  # the last one is the loss
    # The features, the concatenation that a layer reads, its gradient, and what the layer makes of them.
    assert memjax.measure(jax.grad(memjax.planned(dense_loss, plan=plan)), ws, x).temp_bytes < 3.6 * FEATURES


def test_a_norm_of_all_features_is_gone_when_the_last_layer_runs_again():
    def loss(ws, head, x):
        for w in ws:
            x = jnp.concatenate([x, jnp.sin(jnp.tanh(x) @ w)], -1)
        x = jax.nn.relu(x / jnp.sqrt(jnp.mean(x**2, 0)))
        pooled = jnp.mean(x.reshape(ROWS // 4, 4, -1), 1)
        return jnp.mean(jnp.tanh(pooled @ head) ** 2)

    ws, x = weights(), rows()
    plan = memjax.plan(loss, ws, jnp.ones(((LAYERS + 1) * GROWTH, GROWTH)), x, budget="min")
    # The features, the concatenation of the last layer, what it makes of it, and gradients of both.
    assert plan.nbytes < 5.4 * FEATURES


def test_a_whole_step_keeps_them_once():
    ws, x = weights(), rows()
    budget = 5 * FEATURES
    step = lambda ws, x: jax.tree.map(lambda w, dw: w - 0.1 * dw, ws, jax.grad(dense_loss)(ws, x))
    assert memjax.measure(jax.jit(step), ws, x).temp_bytes > 2 * budget
    assert memjax.jit(step, budget=budget).plan(ws, x).nbytes <= budget


@pytest.mark.usefixtures("x64")
def test_gradients():
    ws, x = weights(jnp.float64)[:5], rows(jnp.float64)
    got, wanted = (jax.jit(jax.grad(f, (0, 1)))(ws, x) for f in (memjax.planned(dense_loss, budget="min"), dense_loss))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-14)


def test_concatenations_run_where_they_are_read():
    def f(a, b):
        one = jnp.concatenate([a, b])  # is read later than the next one is made of it: stays a part
        two = jnp.concatenate([one, jnp.sin(a)])
        three = jnp.concatenate([two, a])  # of the three parts
        columns = jnp.concatenate([three[None], three[None]], 0)  # along another dimension
        unread = jnp.concatenate([b, b])
        return jnp.sum(jnp.cos(a)), three * 2, jnp.sum(one), columns, unread

    a, b = np.arange(3.0, dtype=np.float32), np.arange(4.0, dtype=np.float32)
    program = calls_in_place(jax.make_jaxpr(f)(a, b), differentiable=False)
    late = late_concatenations(program)
    values = [one.given([a, b]) for one in (program, late)]
    for one, env in zip((program, late), values, strict=True):
        evaluate_in(one.eqns, env)
    for one, other in zip(*(read(env, program.outvars) for env in values), strict=True):
        np.testing.assert_array_equal(one, other)
    made = {eqn.outvars[0].aval.shape: len(eqn.invars) for eqn in late.eqns if eqn.primitive.name == "concatenate"}
    assert made == {(7,): 2, (10,): 2, (13,): 3, (2, 13): 2, (8,): 2}
    place = late.flow.place
    joined = [eqn for eqn in late.eqns if eqn.primitive.name == "concatenate" and eqn.outvars[0] in late.flow.readers]
    for eqn in joined:
        readers = late.flow.readers[eqn.outvars[0]]
        between = late.eqns[place[eqn.outvars[0]] + 1 : readers[0]]
        assert all(other.primitive.name == "concatenate" for other in between)
