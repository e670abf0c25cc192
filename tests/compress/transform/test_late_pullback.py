"""In which order a pullback computes what."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from memjax import compressed
from memjax._core.program.jaxpr import Walk, calls_in_place, producers

NARROW, WIDE, ROWS = 64, 256, 512


def gated(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def with_gelu(p, x):
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def parameters():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"down": (WIDE, NARROW), "gate": (NARROW, WIDE), "up": (NARROW, WIDE)}
    return {name: jax.random.normal(key, shape) / 8 for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def pullback(f):
    """The program of a pullback, whose first three outputs are the gradients of down, gate and up."""
    x = jnp.sin(jnp.arange(ROWS * NARROW)).reshape(ROWS, NARROW)
    y, pull = jax.vjp(f, parameters(), x)
    return calls_in_place(jax.make_jaxpr(pull)(y), differentiable=False)


def ancestors(program, outvars, *, through_barriers):
    """The variables that some are computed from; also those, if asked, that they only wait for."""
    producer, walk, found = producers(program), Walk(outvars), set()
    for var in walk:
        found.add(var)
        if (eqn := producer.get(var)) is not None:
            waits_only = eqn.primitive is lax.optimization_barrier_p and not through_barriers
            walk.add([eqn.invars[eqn.outvars.index(var)]] if waits_only else eqn.invars)
    return found


def is_wide(var):
    return var.aval.shape == (ROWS, WIDE) and jnp.issubdtype(var.aval.dtype, jnp.floating)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("f", [gated, with_gelu])
def test_the_gradient_of_a_narrowing_product_comes_first(f, bits):
    """It shares no wide array with the others, which wait for it, so that one pass cannot make the arrays of both."""
    program = pullback(compressed(f, bits=bits))
    down, *others = program.outvars
    of_down, of_others = (ancestors(program, outvars, through_barriers=False) for outvars in ([down], others))
    assert any(map(is_wide, of_down))
    assert any(map(is_wide, of_others))
    assert not any(map(is_wide, of_down & of_others))
    products = [out for eqn in program.eqns if eqn.primitive is lax.dot_general_p for out in eqn.outvars]
    [product] = of_down.intersection(products)
    for var in filter(is_wide, of_others):
        assert product in ancestors(program, [var], through_barriers=True)


def test_a_product_that_widens_is_not_waited_for():
    """Its operand is the smaller array: computing that twice would free little."""
    program = pullback(compressed(lambda p, x: jnp.tanh(x) @ p["up"], bits=8))
    assert sum(eqn.primitive is lax.tanh_p for eqn in program.eqns) == 1
