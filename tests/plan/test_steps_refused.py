"""A training step is refused; a loss that computes gradients on its way is planned."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import memjax
from memjax._core.compat import derivatives, is_backward
from tests.plan.networks import inputs, parameters, unrolled_loss

ARGS = parameters(jnp.float32, layers=2), inputs(jnp.float32, 8)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def planned(f):
    return memjax.planned(f, budget="1GiB")


def sgd(params, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(unrolled_loss)(params, x))


def momentum(params, x):
    value, gradients = jax.value_and_grad(unrolled_loss)(params, x)
    updates, state = OPTIMIZER.update(gradients, OPTIMIZER.init(params), params)
    return optax.apply_updates(params, updates), state, value


def accumulated(params, x):
    def turn(total, x):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(unrolled_loss)(params, x)), None

    return jax.lax.scan(turn, (0.0, jax.tree.map(jnp.zeros_like, params)), jnp.stack([x, x]))[0]


def penalty(params, x):
    return unrolled_loss(params, x) + jnp.sum(jax.grad(unrolled_loss, 1)(params, x) ** 2)


def forces(params, x):
    return -jax.grad(unrolled_loss, 1)(params, x)


STEPS = {
    "sgd": sgd,
    "momentum": momentum,
    "accumulated": accumulated,
    "value_and_grad": jax.jit(jax.value_and_grad(unrolled_loss)),
    "grad": jax.grad(unrolled_loss),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_refused(name):
    for run in (jax.jit(planned(STEPS[name])), lambda *args: memjax.plan(STEPS[name], *args, budget="1GiB")):
        with pytest.raises(ValueError, match=r"f must be a loss.*Pass the loss"):
            run(*ARGS)


def test_a_step_of_nnx_is_refused():
    def step(model, optimizer, x):
        value, gradients = nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))(model, x)
        optimizer.update(model, gradients)
        return value

    model = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"f must be a loss"):
        nnx.jit(planned(step))(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), ARGS[1])


def test_what_is_differentiated_once_more_is_not():
    outer = {
        "penalty": lambda f: lambda params: f(penalty)(*(params, ARGS[1])),
        "forces": lambda f: lambda params: jnp.sum(f(forces)(params, ARGS[1]) ** 2),
        "a step of an inner loop": lambda f: lambda params: unrolled_loss(f(sgd)(params, ARGS[1]), ARGS[1]),
    }
    for loss in outer.values():
        assert jax.jit(jax.grad(jax.jit(loss(planned)))).trace(ARGS[0])
    for f in (penalty, forces):  # validation
        assert jnp.allclose(jnp.sum(jax.jit(planned(f))(*ARGS)), jnp.sum(jax.jit(f)(*ARGS)))


def test_marks_of_derivatives():
    """The one place that reads them from name stacks."""

    def stacks(f):
        return [str(eqn.source_info.name_stack) for eqn in jax.make_jaxpr(f)(jnp.ones(3)).eqns]

    loss = lambda x: jnp.sum(jnp.sin(x) * x)
    assert not any(map(is_backward, stacks(loss)))
    assert not any(map(is_backward, stacks(jax.linear_transpose(lambda x: 2 * x, jnp.ones(3)))))
    both = stacks(jax.grad(loss))
    assert {bool(derivatives(one)) for one in both} == {True}
    assert {is_backward(one) for one in both} == {True, False}
    assert derivatives("jvp(a)/transpose(jvp(b))") == ["jvp", "transpose", "jvp"]
