"""Programs with their calls in place, what makes and reads their variables, and when two are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax._core.backward.two_passes import Part
from memjax._core.compat import scope
from memjax._core.program.dataflow import Walk, is_literal
from memjax._core.program.jaxpr import Program, bind, calls_in_place, read, same_program

X = jnp.linspace(-1, 1, 6).reshape(2, 3)


@jax.jit
def shifted(x):
    return jnp.sin(x + jnp.asarray(np.arange(3, dtype=np.float32)))


def f(x):
    with jax.named_scope("outer"):
        y = shifted(x) * shifted(2 * x)  # one body twice
        return jax.nn.relu(y), y, x


def outputs(program: Program, *inputs):
    env = dict(zip([*program.constvars, *program.invars], [*program.consts, *inputs], strict=True))
    for eqn in program.eqns:
        env.update(zip(eqn.outvars, bind(eqn, read(env, eqn.invars)), strict=True))
    return read(env, program.outvars)


def names(program):
    return [eqn.primitive.name for eqn in program.eqns]


@pytest.mark.parametrize("differentiable", [True, False])
def test_calls_in_place_compute_the_same(differentiable):
    program = calls_in_place(jax.make_jaxpr(f)(X), differentiable=differentiable)
    for got, want in zip(outputs(program, X), f(X), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert not {"jit", "pjit"}.intersection(names(program))
    assert ("custom_jvp_call" in names(program)) == differentiable
    made = [out for eqn in program.eqns for out in eqn.outvars]
    assert len(made) == len(set(made))
    assert {scope(eqn).split("/")[0] for eqn in program.eqns} == {"outer"}


def test_constants_become_inputs():
    shift = jnp.arange(3.0)
    closed = jax.make_jaxpr(lambda x: jnp.sin(x + shift))(X)
    program = calls_in_place(closed, differentiable=False).with_inputs(len(closed.consts))
    assert not program.consts
    np.testing.assert_allclose(outputs(program, *closed.consts, X)[0], jnp.sin(X + shift), rtol=1e-6)


def test_makers_and_consumers():
    program = calls_in_place(jax.make_jaxpr(lambda x: (x * x, jnp.sin(x)))(X), differentiable=False)
    square, sine = program.eqns
    assert program.flow.makers == {square.outvars[0]: square, sine.outvars[0]: sine}
    assert program.flow.consumers == {program.invars[0]: [square, sine]}


def test_a_walk_visits_each_variable_once():
    program = calls_in_place(jax.make_jaxpr(lambda x: (x + 1) * (x + 2) * x)(X), differentiable=False)
    producer, walk, seen = program.flow.makers, Walk(program.outvars), []
    for var in walk:
        seen.append(var)
        walk.add(producer[var].invars if var in producer else [])
    assert len(seen) == len(set(seen)) == 5
    assert not any(map(is_literal, seen))


def test_what_is_known_is_not_replaced_by_its_recomputation():
    def f(x):
        low, high = jnp.split(jnp.sin(x), 2)
        return low * high, low

    program = calls_in_place(jax.make_jaxpr(f)(jnp.arange(4.0)), differentiable=False)
    low = program.outvars[1]
    part = Part(program.flow, [*program.invars, low], program.outvars, effects=False)
    product, known = part([jnp.arange(4.0), jnp.full(2, 7.0)])  # what was kept may be rounded
    np.testing.assert_array_equal(known, [7, 7])
    np.testing.assert_allclose(product, 7 * np.sin([2, 3]), rtol=1e-6)


def test_programs_are_the_same_by_their_equations():
    program = lambda f, x=X: calls_in_place(jax.make_jaxpr(f)(x, x), differentiable=False)
    one = program(lambda x, y: jnp.maximum(x, 0) * y)
    assert same_program(one, program(lambda a, b: jnp.maximum(a, 0) * b))
    for other in (
        lambda x, y: jnp.maximum(y, 0) * x,
        lambda x, y: jnp.maximum(x, 1) * y,
        lambda x, y: y * jnp.maximum(x, 0),
        lambda x, y: jnp.minimum(x, 0) * y,
        lambda x, y: jnp.maximum(x, 0) * y + y,
        lambda x, y: (jnp.maximum(x, 0) * y, y)[::-1],
        lambda x, y: jnp.maximum(x, 0) * (y + jnp.arange(3.0)),
    ):
        assert not same_program(one, program(other))
    assert not same_program(one, program(lambda x, y: jnp.maximum(x, 0) * y, X.astype(jnp.bfloat16)))
    assert not same_program(program(lambda x, y: x.sum(0)), program(lambda x, y: x.sum(1)))
