"""Maxima and minima under a plan: no comparison asks whether a value that is computed twice is equal to itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import memjax
from memjax._core.program.dataflow import is_literal
from memjax._plan.derivative import Derivative

ROWS, WIDTH = 64, 16


def layer(w, x):
    h = jnp.sin(x @ w) / 3
    return jnp.maximum(h, jnp.tanh(2 * h)) - jnp.minimum(0.5 * h, jnp.cos(h))


def unrolled(ws, x):
    for w in ws:
        x = x + layer(w, x)
    return jnp.sum(x**2)


def scanned(ws, x):
    return jnp.sum(lax.scan(lambda x, w: (x + layer(w, x), None), x, ws)[0] ** 2)


def arguments():
    rng = np.random.default_rng(0)
    return jax.device_put((rng.normal(size=(6, WIDTH, WIDTH)), rng.normal(size=(ROWS, WIDTH))))


def compared_with_results(passes):
    """How many equations ask whether something is equal to a maximum or a minimum. JAX writes them before 0.11."""
    pairs = [(passes.forward, passes.backward), *((pair.program, pair.pull) for pair in passes.loops)]
    makers = {var: eqn.primitive.name for pair in pairs for one in pair for var, eqn in one.flow.makers.items()}
    eqns = [eqn for pair in pairs for one in pair for eqn in one.eqns if eqn.primitive.name == "eq"]
    of = lambda atom: None if is_literal(atom) else makers.get(atom)
    return sum(any(of(atom) in ("max", "min") for atom in eqn.invars) for eqn in eqns)


@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_operands_are_compared_with_each_other(loss):
    args = arguments()
    derivative = Derivative(jax.make_jaxpr(loss)(*args), args, [True, False], [True], {})
    assert compared_with_results(derivative) or jax.__version_info__ >= (0, 11)
    assert not compared_with_results(derivative.in_plans("cpu"))


@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_gradients_are_those_of_plain_jax(loss):
    args = arguments()
    plain = jax.jit(jax.grad(loss))(*args)
    planned = jax.jit(jax.grad(memjax.planned(loss, budget="min")))(*args)
    np.testing.assert_allclose(planned, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("of", [jnp.maximum, jnp.minimum])
def test_equal_operands_and_nan_are_as_in_jax(of):
    x = jnp.asarray([1.0, 2.0, 2.0, 3.0, jnp.nan, 0.0, 4.0, -0.0])
    y = jnp.asarray([2.0, 2.0, 1.0, 3.0, 0.0, jnp.nan, 4.0, 0.0])
    loss = lambda x, y: jnp.sum(jnp.exp(of(jnp.cos(x), jnp.cos(y))))
    plan = memjax.plan(loss, x, y, argnums=(0, 1), budget="min")
    for ours, plain in zip(
        jax.grad(memjax.planned(loss, plan=plan), (0, 1))(x, y), jax.grad(loss, (0, 1))(x, y), strict=True
    ):
        np.testing.assert_allclose(ours, plain, rtol=1e-6)
