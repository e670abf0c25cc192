"""`memjax.jit` where no plan fits as XLA orders programs for speed: the compiler orders the step for the least memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import memjax
from memjax._jit.ways.order import ordered_for_memory
from tests.jit.steps import OPTIONS, held
from tests.jit.test_jit import close, copied

OPTIMIZER = optax.adam(1e-2)


def layer(w, x):
    """Attention and gates: XLA:CPU orders products that can run beside each other so, with the arrays of all of them alive."""
    query, key, value = (x @ w[i] for i in range(3))
    x = x + jax.nn.softmax(query @ key.swapaxes(1, 2)) @ value
    return x + (jax.nn.silu(x @ w[3]) * (x @ w[4])) @ w[5]


def loss(params, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, params)[0] ** 2)


def step(params, state, x):
    gradients = jax.grad(loss)(params, x)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def test_a_plan_that_takes_a_little_more_fits_in_the_order_of_the_least_memory():
    rng = np.random.default_rng(0)
    params, x = jax.device_put((rng.normal(size=(4, 6, 32, 32)) / 32**0.5, rng.normal(size=(16, 32, 32))))
    args = params, OPTIMIZER.init(params), x
    jitted = lambda **of_plan: memjax.jit(step, allow=("recompute",), **of_plan)
    least = jitted(budget="min").plan(*args)
    assert not least.ordered_for_memory

    budget = int(0.95 * least.nbytes)
    found = jitted(budget=budget)
    plan = found.plan(*args)
    assert plan.ordered_for_memory
    assert "for the least memory" in str(plan)
    assert held(found.lower(*args).compile(OPTIONS)) == plan.nbytes <= budget

    again = jitted(plan=memjax.StepPlan.from_json(plan.to_json()))
    assert held(again.lower(*args).compile(OPTIONS)) == plan.nbytes
    close(again(*copied(args)), jax.jit(step)(*args))


def test_options_that_were_given_stay():
    given = {"xla_disable_hlo_passes": "rematerialization"}
    assert ordered_for_memory("gpu", given) == {"xla_disable_hlo_passes": "rematerialization,latency-hiding-scheduler"}
    assert ordered_for_memory("tpu", given) == {}
